"""Versions that are LoRAs: tokens are PEFT's, what does not fit is refused, the base stays."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from paceline.core.errors import DeadlineExceededError, PreflightError, UsageError
from paceline.refit.digest import root_digest
from paceline.refit.generators.protocol import EngineConfig, EngineState, Generation, Sampling
from paceline.refit.generators.transformers.loading import load_model
from paceline.refit.generators.transformers.tensors import view_live_tensors
from paceline.refit.manifest.v1 import LORA_PREFIX, Lora, LoraModule, Manifest
from paceline.refit.model import TensorBuffer
from paceline.refit.rollouts.wire import parse_choices
from paceline.refit.serving.response import render_completion
from paceline.refit.staging.torch_bytes import byte_view
from paceline.testing.fakes.trainer import State, root_of
from paceline.testing.payloads import delta_payload, full_payload, halves_payload, tensor_entry
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3
from refit.generators.refitting import Follower, MemoryRun

PROMPT = [10, 20, 30]
GREEDY = Sampling(max_tokens=16, temperature=0)
TARGETS = ("q_proj", "down_proj", "embed_tokens")


class Trained:
    """A LoRA of a model, held and judged by PEFT."""

    def __init__(self, base: torch.nn.Module, *, seed: int = 0, **options: Any) -> None:
        """Put a LoRA on a copy of the model, with loud weights."""
        fields = {"r": 4, "lora_alpha": 6, "target_modules": list(TARGETS), **options}
        self.model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **fields))
        self._random = torch.Generator().manual_seed(seed)
        self.root = root_digest(
            tensor_entry(each) for each in view_live_tensors(base_of(self.model)).buffers.values()
        )
        self.step(share=1.0)

    def step(self, *, share: float = 0.3) -> None:
        """Change a share of every tensor."""
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                if "lora_" in name:
                    noise = torch.randn(tensor.shape, generator=self._random)
                    mask = torch.rand(tensor.shape, generator=self._random) < share
                    tensor[mask] = (0.4 * noise).to(tensor.dtype)[mask]

    def state(self) -> State:
        """Return a copy of the LoRA's tensors, named as in its file."""
        return {
            name: byte_view(name, tensor.detach().clone())
            for name, tensor in get_peft_model_state_dict(
                self.model, save_embedding_layers=False
            ).items()
        }

    def describe(self) -> Lora:
        """Return what the version says of itself."""
        config = self.model.peft_config["default"]
        paths = sorted({name.removeprefix(LORA_PREFIX).split(".lora_")[0] for name in self.state()})
        return Lora(
            model_root=self.root,
            is_rank_stabilised=config.use_rslora,
            modules=tuple(
                LoraModule(name=path, rank=config.r, alpha=str(config.lora_alpha)) for path in paths
            ),
        )

    def greedy(self) -> list[int]:
        """Continue by the library's loop over PEFT's modules."""
        ids = torch.tensor([PROMPT])
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
        return [int(token_id) for token_id in out[0, len(PROMPT) :]]


def base_of(model: Any) -> torch.nn.Module:
    """Return a model without its LoRA, names and all."""
    fresh: torch.nn.Module = tiny_model(Path(model.get_base_model().config._name_or_path), seed=0)
    fresh.load_state_dict(
        {
            name.replace("base_layer.", ""): tensor
            for name, tensor in model.get_base_model().state_dict().items()
            if "lora_" not in name
        }
    )
    assert isinstance(fresh, torch.nn.Module)
    return fresh


@pytest.fixture
def run(tmp_path: Path) -> MemoryRun:
    made = MemoryRun(write_tiny_qwen3(tmp_path, tie_word_embeddings=False))
    made.model.module.save_pretrained(tmp_path)
    made.trainer.aliases = ()
    return made


@pytest.fixture
def trained(run: MemoryRun) -> Trained:
    return new_trained(run)


def new_trained(run: MemoryRun, **options: Any) -> Trained:
    base = tiny_model(run.model.model_dir, seed=0)
    base.load_state_dict(run.model.module.state_dict())
    base.config._name_or_path = str(run.model.model_dir)
    return Trained(base, **options)


@pytest.fixture
def follower(run: MemoryRun) -> Iterator[Follower]:
    made = Follower(run, "g-0", lora=True)
    yield made
    made.close()


def publish(run: MemoryRun, state: State, lora: Lora | None, *, base: State | None = None) -> str:
    """Publish a LoRA, whole or as the change since another."""
    made = full_payload(state.values()) if base is None else delta_payload(base, state)
    return publish_made(run, (replace(made[0], lora=lora), made[1]))


def publish_made(run: MemoryRun, made: tuple[Manifest, bytes]) -> str:
    run.sequence += 1
    (manifest, data), uid = made, f"v{run.sequence}"
    base_uid = None if manifest.base_root is None else f"v{run.sequence - 1}"
    run.trainer.publish(
        uid, run.sequence, manifest, data, parent_root=manifest.base_root, base_uid=base_uid
    )
    return uid


def tokens(generation: Generation) -> list[int]:
    return list(generation.choices[0].token_ids)


def test_tokens_are_those_of_peft(run: MemoryRun, trained: Trained, follower: Follower) -> None:
    """Whole at first, then by deltas; samples name the LoRA and the weights below it."""
    state: State | None = None
    seen = set()
    for _ in range(3):
        before, state = state, trained.state()
        uid = publish(run, state, trained.describe(), base=before)
        follower.settle()
        generation = follower.generate(PROMPT, GREEDY)
        assert tokens(generation) == trained.greedy()
        (span,) = generation.choices[0].spans
        assert (span.installed.version_id, span.installed.model_root) == (uid, trained.root)
        seen.add(tuple(tokens(generation)))
        trained.step()
    assert len(seen) == 3
    assert tuple(run.model.greedy(PROMPT, 16)) not in seen


@pytest.mark.parametrize("axis", [0, 1])
def test_a_lora_of_two_processes(
    run: MemoryRun, trained: Trained, follower: Follower, axis: int
) -> None:
    """Its halves come from two slots, whole and as deltas; halves of two LoRAs are none."""
    state: State | None = None
    for sequence in range(3):
        before, state = state, trained.state()
        made = halves_payload(state, axis=axis, base=before, lora=trained.describe())
        base_uid = f"v{sequence - 1}" if sequence else None
        run.trainer.publish_slots(f"v{sequence}", sequence, made, base_uid=base_uid)
        follower.settle()
        generation = follower.generate(PROMPT, GREEDY)
        (span,) = generation.choices[0].spans
        assert (span.installed.version_id, span.installed.model_root) == (
            f"v{sequence}",
            trained.root,
        )
        assert tokens(generation) == trained.greedy()
        trained.step()
    made = halves_payload(trained.state(), axis=axis, lora=trained.describe())
    made[1] = (replace(made[1][0], lora=of_others(trained.describe())), made[1][1])
    run.trainer.publish_slots("v3", 3, made)
    follower.settle()
    assert follower.receiver.figures()["refusals"]
    installed = follower.engine.installed()
    assert installed is not None
    assert installed.sequence == 2


def test_another_rank_and_other_modules(run: MemoryRun, follower: Follower) -> None:
    """A whole LoRA may be of another kind than the one before, and is followed by deltas."""
    options: list[dict[str, Any]] = [
        {},
        {"r": 8, "target_modules": ["v_proj", "up_proj", "lm_head"], "use_rslora": True},
        {"r": 2, "target_modules": ["embed_tokens"]},
    ]
    for fields in options:
        trained = new_trained(run, **fields)
        state = trained.state()
        publish(run, state, trained.describe())
        follower.settle()
        assert tokens(follower.generate(PROMPT, GREEDY)) == trained.greedy()
        trained.step()
        publish(run, trained.state(), trained.describe(), base=state)
        follower.settle()
        assert tokens(follower.generate(PROMPT, GREEDY)) == trained.greedy()
        assert run.sequence == follower.receiver.newest
    assert follower.receiver.figures()["refusals"] == 0


def test_another_rank_at_the_second_try(
    run: MemoryRun, trained: Trained, follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    """What a first try left in the spare set is never taken for what the live one held."""
    publish(run, trained.state(), trained.describe())
    follower.settle()
    other = new_trained(run, r=8)
    publish(run, other.state(), other.describe())
    at_safe_point = follower.engine.at_safe_point

    def too_late(*args: Any, **options: Any) -> float:
        follower.engine.at_safe_point = at_safe_point  # type: ignore[method-assign]
        raise DeadlineExceededError("no safe point")

    follower.engine.at_safe_point = too_late  # type: ignore[method-assign]
    follower.settle()
    assert tokens(follower.generate(PROMPT, GREEDY)) == trained.greedy()
    follower.receiver._refusals.keep_only(frozenset())
    follower.settle()
    assert tokens(follower.generate(PROMPT, GREEDY)) == other.greedy()
    spare = follower.gate.spare_weights()
    assert spare is not None
    assert root_of(dict(spare.tensors())) == root_of(other.state())
    assert "damaged" not in caplog.text


def without(state: State, part: str) -> State:
    return {name: each for name, each in state.items() if part not in name}


def reshaped(state: State) -> State:
    name = next(name for name in state if "q_proj.lora_B" in name)
    return {**state, name: replace(state[name], shape=state[name].shape[::-1])}


def recast(state: State) -> State:
    name = next(name for name in state if "q_proj.lora_B" in name)
    return {**state, name: replace(state[name], dtype="I32")}


def renamed(state: State) -> State:
    return {
        name.replace("q_proj", "x_proj"): replace(each, name=name.replace("q_proj", "x_proj"))
        for name, each in state.items()
    }


def as_it_is(state: State) -> State:
    return state


def without_last(lora: Lora) -> Lora:
    return replace(lora, modules=lora.modules[:-1])


def of_others(lora: Lora) -> Lora:
    return replace(lora, model_root="ab" * 32)


def of_x(lora: Lora) -> Lora:
    modules = [replace(m, name=m.name.replace("q_proj", "x_proj")) for m in lora.modules]
    return replace(lora, modules=tuple(sorted(modules, key=lambda each: each.name)))


def same(lora: Lora) -> Lora:
    return lora


def none_at_all(lora: Lora) -> None:
    return None


CASES: dict[str, tuple[Callable[[State], State], Callable[[Lora], Lora | None], str]] = {
    "a whole model": (as_it_is, none_at_all, "without --lora"),
    "other weights": (as_it_is, of_others, "for weights with the root abab"),
    "unknown module": (renamed, of_x, "x_proj"),
    "shape": (reshaped, same, ""),
    "dtype": (recast, same, "I32"),
    "a tensor is missing": (lambda s: without(s, "0.self_attn.q_proj.lora_B"), same, "missing"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(
    run: MemoryRun,
    trained: Trained,
    follower: Follower,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    """What does not fit is refused whole; the LoRA before is served, and another goes in."""
    publish(run, trained.state(), trained.describe())
    follower.settle()
    before = follower.generate(PROMPT, GREEDY)
    trained.step()
    change, say, reason = CASES[case]
    publish(run, change(trained.state()), say(trained.describe()))
    follower.settle()
    assert follower.receiver.figures()["refusals"] == 1
    assert follower.receiver.health().state is EngineState.READY
    assert follower.generate(PROMPT, GREEDY) == before
    assert reason in caplog.text
    publish(run, trained.state(), trained.describe())
    follower.settle()
    assert tokens(follower.generate(PROMPT, GREEDY)) == trained.greedy()


def test_a_delta_of_another_kind(run: MemoryRun, trained: Trained, follower: Follower) -> None:
    """A delta says whose it is: onto a LoRA of other modules it is refused."""
    publish(run, trained.state(), trained.describe())
    follower.settle()
    before = follower.generate(PROMPT, GREEDY)
    other = new_trained(run, target_modules=["v_proj"])
    state = other.state()
    other.step()
    manifest, data = delta_payload(state, other.state())
    manifest = replace(manifest, lora=other.describe())
    run.sequence += 1
    run.trainer.publish(
        "v1", 1, manifest, data, parent_root=root_of(trained.state()), base_uid="v0"
    )
    follower.settle()
    assert follower.receiver.figures()["refusals"] == 1
    assert follower.generate(PROMPT, GREEDY) == before
    trained.step()
    publish(run, trained.state(), trained.describe())
    follower.settle()
    assert tokens(follower.generate(PROMPT, GREEDY)) == trained.greedy()


def test_an_engine_of_whole_models_refuses(
    run: MemoryRun, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what to do instead."""
    follower = Follower(run, "g-1")
    publish(run, trained.state(), trained.describe())
    follower.settle()
    assert follower.receiver.health().state is EngineState.LOADING
    assert "is a LoRA alone" in caplog.text
    follower.close()


def test_answers_name_the_weights_below(
    run: MemoryRun, trained: Trained, follower: Follower
) -> None:
    """From the engine over the routes' document to the rollout client."""
    publish(run, trained.state(), trained.describe())
    follower.settle()
    generation = follower.generate(PROMPT, GREEDY)
    head: dict[str, object] = {"id": "x", "created": 0, "model": "m"}
    document = render_completion([generation], head=head, token_text=lambda one: "x")
    (choice,) = parse_choices(json.dumps(document).encode(), worker_id="g-0")
    assert choice.spans[0].installed.model_root == trained.root


def test_files_that_lack_a_tensor(run: MemoryRun) -> None:
    """Weights that nobody gave are never served below a LoRA."""
    state = run.model.module.state_dict()
    del state["model.norm.weight"]
    run.model.module.save_pretrained(run.model.model_dir, state_dict=state)
    with pytest.raises(PreflightError, match=r"model\.norm\.weight"):
        load_model(EngineConfig(model_dir=run.model.model_dir, lora=True))


def test_no_drafts(tmp_path: Path) -> None:
    """A draft's weights would have to be in a LoRA's version."""
    with pytest.raises(UsageError, match="leave one out"):
        EngineConfig(model_dir=tmp_path, lora=True, draft_dir=tmp_path)


def test_a_rank_that_no_module_has(run: MemoryRun, trained: Trained, follower: Follower) -> None:
    """No memory is taken for a rank above the module's own sizes."""
    wide = 64
    state = {
        name: TensorBuffer(
            name=name,
            dtype="F32",
            shape=tuple(wide if size == 4 else size for size in each.shape),
            data=memoryview(bytes(len(each.data) // 4 * wide)),
        )
        for name, each in trained.state().items()
    }
    lora = trained.describe()
    modules = tuple(replace(each, rank=wide) for each in lora.modules)
    publish(run, state, replace(lora, modules=modules))
    follower.settle()
    assert follower.receiver.figures()["refusals"] == 1
    assert not follower.gate.live_tensors()
