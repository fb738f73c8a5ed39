"""Codes and scales are live: byte for byte the trainer's, and tokens are of what they mean."""

from pathlib import Path

import pytest
import torch

from paceline.core.errors import PreflightError, UsageError
from paceline.refit.generators.protocol import EngineConfig, EngineState, Sampling
from paceline.refit.generators.transformers.loading import load_model
from paceline.refit.staging.torch_bytes import byte_view
from paceline.refit.trainers.quantise import quantiser
from paceline.testing.fakes.trainer import State, root_of
from paceline.testing.tiny_model import tiny_model, write_tiny_moe, write_tiny_qwen3
from refit.generators.refitting import Follower, MemoryRun

PROMPT = [10, 20, 30]
GREEDY = Sampling(max_tokens=12, temperature=0)
LAYERS = "model.layers.*_proj.weight"
POLICIES = [{LAYERS: "fp8-block"}, {LAYERS: "int8-channel", "lm_head.weight": "fp8-block"}]


def codes_of(run: MemoryRun, policy: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return what the trainer's quantiser makes of the weights."""
    quantise = quantiser(policy)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in run.model.module.state_dict().items():
        found |= quantise(name, tensor) or {name: tensor.clone()}
    return found


def state_of(codes: dict[str, torch.Tensor]) -> State:
    return {name: byte_view(name, tensor) for name, tensor in codes.items()}


def meant(codes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights that codes stand for, one block after the other."""
    weights = {}
    for name, tensor in codes.items():
        if "_scale" in name:
            continue
        plain = tensor.float()
        if f"{name}_scale" in codes:
            plain = plain * codes[f"{name}_scale"]
        for (row, column), scale in _blocks(codes.get(f"{name}_scale_inv")):
            plain[row : row + 128, column : column + 128] *= scale
        weights[name] = plain.to(torch.bfloat16)
    return weights


def _blocks(scales: torch.Tensor | None) -> list[tuple[tuple[int, int], torch.Tensor]]:
    if scales is None:
        return []
    high, wide = scales.shape
    return [((128 * i, 128 * j), scales[i, j]) for i in range(high) for j in range(wide)]


def greedy(run: MemoryRun, weights: dict[str, torch.Tensor]) -> list[int]:
    fresh = tiny_model(run.model.model_dir, seed=0)
    fresh.load_state_dict(weights)
    ids = torch.tensor([PROMPT])
    out = fresh.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    return [int(token_id) for token_id in out[0, len(PROMPT) :]]


@pytest.mark.parametrize("policy", POLICIES, ids=["fp8", "int8 and fp8"])
def test_codes_arrive_and_are_used(tmp_path: Path, policy: dict[str, str]) -> None:
    """Whole and as a delta, also in blocks that do not fill up; tokens are of what codes mean."""
    sizes = {"hidden_size": 160, "intermediate_size": 136}
    run = MemoryRun(write_tiny_qwen3(tmp_path, tie_word_embeddings=False, **sizes))
    run.trainer.aliases = ()
    follower = Follower(run, "g-0", quantised=policy, weights="twice")
    first = codes_of(run, policy)
    run.trainer.publish_full("v0", 0, state_of(first))
    follower.settle()
    run.model.step()
    second = codes_of(run, policy)
    run.trainer.publish_delta("v1", 1, state_of(first), state_of(second), base_uid="v0")
    follower.settle()
    assert follower.receiver.health().state is EngineState.READY
    assert root_of(dict(follower.gate.live_tensors())) == root_of(state_of(second))
    choice = follower.generate(PROMPT, GREEDY).choices[0]
    assert choice.spans[0].installed.sequence == 1
    assert list(choice.token_ids) == greedy(run, meant(second)) != greedy(run, meant(first))
    follower.close()


def test_weights_where_codes_are_live(tmp_path: Path) -> None:
    """A version that is not quantised is refused whole, and the other way round."""
    run = MemoryRun(write_tiny_qwen3(tmp_path, tie_word_embeddings=False))
    run.trainer.aliases = ()
    coded, plain = Follower(run, "g-0", quantised=POLICIES[0]), Follower(run, "g-1")
    run.trainer.publish_full("v0", 0, state_of(codes_of(run, {})))
    for follower in (coded, plain):
        follower.settle()
    assert coded.receiver.health().state is EngineState.LOADING
    assert plain.receiver.health().state is EngineState.READY
    run.trainer.publish_full("v1", 1, state_of(codes_of(run, POLICIES[0])))
    for follower in (coded, plain):
        follower.settle()
        health = follower.receiver.health()
        assert health.installed is not None
        assert health.installed.version_id == ("v1" if follower is coded else "v0")
        follower.close()


@pytest.mark.parametrize(
    ("policy", "error", "match"),
    [
        ({LAYERS: "fp4"}, UsageError, "fp8-block, int8-channel"),
        ({"model.x.*": "fp8-block"}, UsageError, "matches no matrix"),
        ({"model.embed*": "fp8-block"}, PreflightError, "no linear module's alone"),
        ({"lm_head.*": "int8-channel"}, PreflightError, "no linear module's alone"),
    ],
    ids=["scheme", "nothing", "embedding", "tied"],
)
def test_policies_that_cannot_be(
    tmp_path: Path, policy: dict[str, str], error: type[Exception], match: str
) -> None:
    """Said at the start, not at the first version."""
    config = EngineConfig(model_dir=write_tiny_qwen3(tmp_path), quantised=policy)
    with pytest.raises(error, match=match):
        load_model(config)


def test_experts_cannot_hold_codes(tmp_path: Path) -> None:
    """Experts are no linear modules of their own: the glob that takes in a router is refused."""
    config = EngineConfig(
        model_dir=write_tiny_moe(tmp_path), quantised={"model.layers.*": "fp8-block"}
    )
    with pytest.raises(PreflightError, match="no linear module's alone"):
        load_model(config)
