"""A draft model is part of the version: exchanged with the model, and it changes no token.

In float32: in bfloat16 a pass over several tokens rounds otherwise, and may draw another token.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.errors import PreflightError
from paceline.refit.generators.protocol import EngineConfig, Generation, Sampling
from paceline.refit.generators.transformers.loading import load_draft, load_model
from paceline.refit.generators.transformers.sets import view_named
from paceline.testing.fakes.trainer import State, root_of
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3
from refit.generators.refitting import Follower, MemoryRun

PROMPT = [10, 20, 30]
LONG = Sampling(max_tokens=40, ignore_eos=True)


@pytest.fixture
def run(tmp_path: Path) -> MemoryRun:
    made = MemoryRun(write_tiny_qwen3(tmp_path / "main", tie_word_embeddings=False))
    made.model.module.float()
    return made


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    """Return a smaller model of the same tokens, tied as small ones are."""
    return write_tiny_qwen3(tmp_path / "draft", num_hidden_layers=1)


@pytest.fixture
def follower(run: MemoryRun, draft_dir: Path) -> Iterator[Follower]:
    made = Follower(run, "g-0", draft_dir=draft_dir, weights="twice", dtype="float32")
    yield made
    made.close()


def prefixed(state: State) -> State:
    return {
        f"draft.{name}": replace(each, name=f"draft.{name}", data=memoryview(bytes(each.data)))
        for name, each in state.items()
    }


def draft_state(draft_dir: Path, *, seed: int) -> State:
    return prefixed(dict(view_named(draft_model(draft_dir, seed=seed), "memory").buffers))


def draft_model(draft_dir: Path, *, seed: int) -> torch.nn.Module:
    model: torch.nn.Module = tiny_model(draft_dir, seed=seed, dtype=torch.float32)
    return model


def publish(run: MemoryRun, state: State, *, base: State | None = None) -> None:
    """Publish both models as one version; the draft's output is its embedding."""
    tied = "draft.model.embed_tokens.weight" in state and "draft.lm_head.weight" not in state
    run.trainer.aliases = (
        (("draft.lm_head.weight", "draft.model.embed_tokens.weight"),) if tied else ()
    )
    run.sequence += 1
    uid = f"v{run.sequence}"
    if base is None:
        run.trainer.publish_full(uid, run.sequence, state)
    else:
        run.trainer.publish_delta(uid, run.sequence, base, state, base_uid=f"v{run.sequence - 1}")


def alone(run: MemoryRun, sampling: Sampling) -> Generation:
    """Return what an engine without a draft generates with the model's weights."""
    other = MemoryRun(run.model.model_dir)
    other.model = run.model
    engine = Follower(other, "alone", dtype="float32")
    other.publish()
    engine.settle()
    generation = engine.generate(PROMPT, sampling)
    engine.close()
    return generation


SAMPLINGS = {
    "greedy": replace(LONG, temperature=0),
    "seed": replace(LONG, seed=5, n=2),
    "stop": Sampling(max_tokens=40, seed=6, stop=("a", "1", "(")),
    "short": replace(LONG, max_tokens=1, seed=1),
}


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tokens_are_those_without(
    run: MemoryRun, follower: Follower, draft_dir: Path, kind: str
) -> None:
    """With a draft that knows nothing the choices are the same to the last token."""
    publish(run, {**run.model.state(), **draft_state(draft_dir, seed=9)})
    follower.settle()
    found, wanted = follower.generate(PROMPT, SAMPLINGS[kind]), alone(run, SAMPLINGS[kind])
    for choice, other in zip(found.choices, wanted.choices, strict=True):
        assert (choice.token_ids, choice.text) == (other.token_ids, other.text)
        assert choice.finish_reason == other.finish_reason
        assert choice.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(("is_equal", "most"), [(True, 10), (False, 40)])
def test_good_guesses_save_passes(run: MemoryRun, *, is_equal: bool, most: int) -> None:
    """A draft that is the model itself brings five tokens a pass; a bad one never costs any."""
    follower = Follower(run, "g-1", draft_dir=run.model.model_dir, dtype="float32")
    seed = 1 if is_equal else 9
    main, draft = (draft_model(run.model.model_dir, seed=each) for each in (1, seed))
    run.model.module = main
    state = prefixed(dict(view_named(draft, "memory").buffers))
    publish(run, {**run.model.state(), **state})
    follower.settle()
    passes: list[int] = []
    follower.models.main.register_forward_pre_hook(lambda module, given: passes.append(1))
    follower.generate(PROMPT, replace(LONG, temperature=0))
    assert 0 < len(passes) <= most
    assert is_equal or len(passes) > 10
    follower.close()


def test_both_go_in_together(run: MemoryRun, follower: Follower, draft_dir: Path) -> None:
    """A delta of both: proven whole, exchanged at once, told under one version."""
    first = {**run.model.state(), **draft_state(draft_dir, seed=2)}
    publish(run, first)
    follower.settle()
    run.model.step()
    second = {**run.model.state(), **draft_state(draft_dir, seed=3)}
    publish(run, second, base=first)
    follower.settle()
    assert root_of(dict(follower.gate.live_tensors())) == root_of(second)
    draft = follower.models.draft
    assert draft is not None
    wanted = draft_model(draft_dir, seed=3).state_dict()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, wanted[name])
    choice = follower.generate(PROMPT, replace(LONG, temperature=0)).choices[0]
    assert [span.installed.sequence for span in choice.spans] == [1]
    assert choice.token_ids == alone(run, replace(LONG, temperature=0)).choices[0].token_ids


def test_an_update_in_the_middle(run: MemoryRun, follower: Follower, draft_dir: Path) -> None:
    """Tokens that were found before it name the old version, also those that are told later."""
    first = {**run.model.state(), **draft_state(draft_dir, seed=2)}
    publish(run, first)
    follower.settle()
    told: list[int] = []

    def on_piece(piece: object) -> None:
        told.append(1)
        if len(told) == 3:  # the engine stands between two steps
            run.model.step()
            publish(run, {**run.model.state(), **draft_state(draft_dir, seed=3)}, base=first)
            follower.settle()

    future = follower.gate.submit_stream(PROMPT, replace(LONG, temperature=0), on_piece)
    spans = future.result(60).choices[0].spans
    assert [span.installed.sequence for span in spans] == [0, 1]
    assert spans[0].end >= 3
    assert (spans[1].start, spans[1].end) == (spans[0].end, 40)


@pytest.mark.parametrize("lacks", ["draft.model.norm.weight", "model.norm.weight"])
def test_half_a_version(run: MemoryRun, follower: Follower, draft_dir: Path, lacks: str) -> None:
    """One that lacks a tensor of either is refused whole."""
    whole = {**run.model.state(), **draft_state(draft_dir, seed=2)}
    publish(run, whole)
    follower.settle()
    run.model.step()
    later = {**run.model.state(), **draft_state(draft_dir, seed=3)}
    publish(run, {name: each for name, each in later.items() if name != lacks})
    follower.settle()
    assert follower.receiver.figures()["refusals"] == 1
    assert root_of(dict(follower.gate.live_tensors())) == root_of(whole)


def test_drafts_that_do_not_fit(run: MemoryRun, tmp_path: Path) -> None:
    """Shorter than the model, or of other tokens: said at the start."""
    config = EngineConfig(model_dir=run.model.model_dir)
    main = load_model(config)
    short = write_tiny_qwen3(tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(PreflightError, match="64 positions"):
        load_draft(replace(config, draft_dir=short), main)
    other = write_tiny_qwen3(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<end>"', '"<fin>"'))
    settings = (other / "tokenizer_config.json").read_text()
    (other / "tokenizer_config.json").write_text(settings.replace('"<end>"', '"<fin>"'))
    with pytest.raises(PreflightError, match="other tokens"):
        load_draft(replace(config, draft_dir=other), main)
