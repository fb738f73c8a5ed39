"""A version that is installed into vLLM is that version, token for token, or nothing happened."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from engines.conftest import worker
from paceline.core.waiting import wait_until
from paceline.refit.compose.vllm_offline import LlmFollower
from paceline.refit.generators.protocol import EngineState
from paceline.refit.generators.vllm import part
from paceline.refit.model import Pin, TensorBuffer
from paceline.system import system_clock
from paceline.testing.small_run import SmallRun

PROMPTS = ("1+2=", "9*(8-7)=", "abc, " * 40)
"""The last one is long enough for the prefix cache to keep blocks of it."""
PATIENCE_S = 60.0

Answer = list[tuple[tuple[int, ...], tuple[float, ...]]]


def ask(llm: Any) -> Answer:
    """Return tokens and log-probabilities of greedy continuations."""
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=0)
    return [
        (
            tuple(output.outputs[0].token_ids),
            tuple(
                found[token].logprob
                for token, found in zip(
                    output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
                )
            ),
        )
        for output in llm.generate(list(PROMPTS), params, use_tqdm=False)
    ]


def fresh(llm: Any, run: SmallRun, folder: Path) -> Answer:
    """Return the answers after vLLM's own loader has read the whole checkpoint."""
    checkpoint = load_file(run.save(folder) / "model.safetensors")
    worker(llm).reload_weights(weights_iterator=iter(checkpoint.items()))
    # A tied output layer holds a packed copy that vLLM's reload leaves as it was.
    for module in worker(llm).model_runner.get_model().modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)
    llm.reset_prefix_cache()
    return ask(llm)


def test_versions_are_what_a_fresh_load_gives(
    llm: Any, run: SmallRun, follower: LlmFollower, tmp_path: Path
) -> None:
    """Full, delta, delta, back again: tokens, log-probabilities and labels are the version's."""
    assert follower.health().state is EngineState.LOADING
    first: Answer = []
    for turn in range(4):
        if turn == 0:
            run.publish_full()
        else:
            run.train(share=0.02, seed=turn)
            run.publish_delta()
        installed = follower.catch_up(timeout_s=PATIENCE_S)
        assert (installed.version_id, installed.root_digest) == (run.uid, run.root)
        assert llm.get_weight_version() == run.uid
        got = ask(llm)
        first = first or got
        assert got == fresh(llm, run, tmp_path / str(turn))
        worker(llm).weight_transfer_engine.prove()
    assert got != first
    assert follower.health().state is EngineState.READY
    outputs = llm.generate("1", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    (span,) = outputs[0].outputs[0].weight_versions
    assert follower.version(span.version) == follower.health().installed


@pytest.mark.parametrize("axis", [0, 1])
def test_versions_of_two_processes(
    llm: Any, run: SmallRun, follower: LlmFollower, tmp_path: Path, axis: int
) -> None:
    """Halves of rows are stretches of the copy that versions apply to; halves of columns none."""
    for turn in range(3):
        run.train(share=0.02, seed=turn)
        run.publish_halves(axis=axis, is_full=not turn)
        installed = follower.catch_up(timeout_s=PATIENCE_S)
        said = run.control.get_version(run.uid).description
        assert said is not None
        assert (installed.version_id, installed.root_digest) == (run.uid, said.root_digest)
        assert ask(llm) == fresh(llm, run, tmp_path / str(turn))
        assert worker(llm).weight_transfer_engine.prove() == said.root_digest


def test_every_way_is_used(llm: Any, run: SmallRun, follower: LlmFollower) -> None:
    """Norms and embeddings are written in place; what vLLM packs for the CPU is loaded again."""
    run.publish_full()
    follower.catch_up(timeout_s=PATIENCE_S)
    (ways,) = llm.collective_rpc("paceline_ways")
    assert set(ways.values()) == {"elements", "repack", "reload"}
    assert ways["model.norm.weight"] == "elements"
    assert ways["model.embed_tokens.weight"] == "repack"


Spoil = Callable[[dict[str, TensorBuffer]], None]


def without(name: str) -> Spoil:
    def remove(state: dict[str, TensorBuffer]) -> None:
        del state[name]

    return remove


def named(old: str, new: str) -> Spoil:
    def rename(state: dict[str, TensorBuffer]) -> None:
        state[new] = replace(state.pop(old), name=new)

    return rename


def extra(state: dict[str, TensorBuffer]) -> None:
    state["model.extra.weight"] = replace(state["model.norm.weight"], name="model.extra.weight")


def other_dtype(state: dict[str, TensorBuffer]) -> None:
    state["model.norm.weight"] = replace(state["model.norm.weight"], dtype="F16")


def other_shape(state: dict[str, TensorBuffer]) -> None:
    state["model.norm.weight"] = replace(state["model.norm.weight"], shape=(8, 8))


K_PROJ = "model.layers.0.self_attn.k_proj.weight"
SPOILS = {
    "missing": (without(K_PROJ), K_PROJ.replace("k_proj", "qkv_proj")),
    "extra": (extra, "model.extra.weight"),
    "renamed": (named(K_PROJ, "model.layers.0.self_attn.x_proj.weight"), "x_proj"),
    "dtype": (other_dtype, "model.norm.weight"),
    "shape": (other_shape, "model.norm.weight"),
}


@pytest.mark.parametrize("kind", SPOILS)
@pytest.mark.parametrize("is_first", [True, False])
def test_wrong_versions_are_refused_whole(
    llm: Any, run: SmallRun, follower: LlmFollower, kind: str, is_first: bool
) -> None:
    """What does not fit changes nothing, before and after something has been installed."""
    spoil, named_in_reason = SPOILS[kind]
    run.train(share=0.01, seed=0)
    before: Answer = []
    if not is_first:
        run.publish_full()
        follower.catch_up(timeout_s=PATIENCE_S)
        before = ask(llm)
    else:
        run.state = {}
        run._advance()
    run.publish_wrong(spoil)
    follower._receiver.step()
    (reason,) = [
        event.fields["reason"]
        for event in run.control.list_events()
        if event.name == "version.refused"
    ]
    if is_first:
        assert named_in_reason in str(reason)
        assert follower.health().state is EngineState.LOADING
    else:
        assert follower.health().state is EngineState.READY
        assert llm.get_weight_version() == "v0"
        assert ask(llm) == before
    run.sequence += 1
    run.train(share=0.02, seed=3)
    run.publish_full()
    assert follower.catch_up(timeout_s=PATIENCE_S).root_digest == run.root


def test_wrong_base_is_refused(llm: Any, run: SmallRun, follower: LlmFollower) -> None:
    """A delta that applies to other weights is refused by the worker, and the old version stays."""
    run.publish_full()
    follower.catch_up(timeout_s=PATIENCE_S)
    before = ask(llm)
    run.train(share=0.02, seed=1)
    run.publish_delta()  # and skipped
    run.train(share=0.02, seed=2)
    version = run.publish_delta()
    engine = worker(llm).weight_transfer_engine
    engine.stage(version.uid)
    with pytest.raises(Exception, match="applies to"):
        follower._driver.apply(version.uid)
    assert engine.status()["installed"]["version_id"] == "v0"
    assert ask(llm) == before


class Interrupted(BaseException):
    """As a signal would be."""


@pytest.mark.parametrize("error", [RuntimeError("planted"), Interrupted("planted")])
@pytest.mark.parametrize("place", ["_write", "initialize_layerwise_reload", "finalize"])
def test_failure_inside_the_write_is_undone(
    llm: Any,
    run: SmallRun,
    follower: LlmFollower,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: BaseException,
) -> None:
    """Wherever the write breaks, the old version is served with its own tokens; then it goes in."""
    run.publish_full()
    follower.catch_up(timeout_s=PATIENCE_S)
    before = ask(llm)
    run.train(share=0.05, seed=5)
    run.publish_delta()
    name = "finalize_layerwise_reload" if place == "finalize" else place
    real, calls = getattr(part, name), []

    def breaks_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        found = real(*args, **kwargs)
        if len(calls) == 2:
            raise error
        return found

    monkeypatch.setattr(part, name, breaks_once)
    engine = worker(llm).weight_transfer_engine
    engine.stage(run.uid)
    if place == "_write":
        # On the CPU every plain parameter lies in the mirror itself: pretend that none does.
        engine._parts[""]._aliased.clear()
    with pytest.raises(Exception, match="planted"):
        follower._driver.apply(run.uid)
    monkeypatch.undo()
    assert len(calls) >= 2
    assert engine.status()["installed"]["version_id"] == "v0"
    assert ask(llm) == before
    assert follower.catch_up(timeout_s=PATIENCE_S).root_digest == run.root
    assert ask(llm) != before


def test_undo_that_fails_stops_serving(
    llm: Any, run: SmallRun, follower: LlmFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are no version at all are never served; a full version heals."""
    run.publish_full()
    follower.catch_up(timeout_s=PATIENCE_S)
    run.train(share=0.05, seed=6)
    run.publish_delta()

    def always(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(part.ModelPart, "push", always)
    follower._receiver.step()
    assert follower.health().state is EngineState.FAILED
    assert follower.health().installed is None
    monkeypatch.undo()
    run.train(share=0.05, seed=7)
    run.publish_full()
    assert follower.catch_up(timeout_s=PATIENCE_S).root_digest == run.root


def test_other_workers_failure_is_undone_here(
    llm: Any, run: SmallRun, follower: LlmFollower
) -> None:
    """A worker that has written a version takes it back when another could not."""
    run.publish_full()
    follower.catch_up(timeout_s=PATIENCE_S)
    before = ask(llm)
    run.train(share=0.05, seed=8)
    run.publish_delta()
    follower._driver.stage(run.uid)
    follower._driver.apply(run.uid)
    assert worker(llm).weight_transfer_engine.status()["installed"]["version_id"] == run.uid
    worker(llm)._weight_update_active = False  # as after an exception in vLLM's own update
    follower._driver.undo()
    assert worker(llm).weight_transfer_engine.status()["installed"]["version_id"] == "v0"
    assert ask(llm) == before
    assert follower.catch_up(timeout_s=PATIENCE_S).root_digest == run.root


def test_prefix_cache_is_of_one_version(llm: Any, run: SmallRun, follower: LlmFollower) -> None:
    """A prompt whose blocks are cached is computed again after an update, and cached again."""
    run.publish_full()
    follower.catch_up(timeout_s=PATIENCE_S)
    ask(llm)
    params = SamplingParams(max_tokens=1, temperature=0)
    (again,) = llm.generate(PROMPTS[-1], params, use_tqdm=False)
    assert again.num_cached_tokens > 0
    run.train(share=0.05, seed=9)
    run.publish_delta()
    follower.catch_up(timeout_s=PATIENCE_S)
    (after,) = llm.generate(PROMPTS[-1], params, use_tqdm=False)
    assert after.num_cached_tokens == 0


def test_a_late_joiner_is_the_version_that_others_walked_to(
    llm: Any, run: SmallRun, tmp_path: Path
) -> None:
    """Whoever joins after two deltas takes the full version and both, in one go."""
    run.publish_full()
    for turn in range(2):
        run.train(share=0.05, seed=20 + turn)
        run.publish_delta()
    late = LlmFollower(llm, run.config)
    assert late.catch_up(timeout_s=PATIENCE_S).root_digest == run.root
    assert ask(llm) == fresh(llm, run, tmp_path / "whole")
    late.close()


def step(follower: LlmFollower) -> tuple[EngineState, str]:
    """Let the engine follow once, and return what it says then."""
    follower._receiver.step()
    health = follower.health()
    return health.state, "" if health.installed is None else health.installed.version_id


def await_step(follower: LlmFollower, wanted: tuple[EngineState, str]) -> None:
    wait_until(
        lambda: step(follower) == wanted,
        what=f"{wanted}",
        clock=system_clock(),
        timeout_s=PATIENCE_S,
        interval_s=0.05,
    )


def test_pins_lead_back_and_only_whom_they_name(llm: Any, run: SmallRun) -> None:
    """Pinned, this engine goes back over the full version; another's pin is nothing to it."""
    follower = LlmFollower(llm, replace(run.config, worker_id="a-0"))
    answers = {}
    for turn in range(3):
        if turn:
            run.train(share=0.05, seed=30 + turn)
            run.publish_delta()
        else:
            run.publish_full()
        follower.catch_up(timeout_s=PATIENCE_S)
        answers[run.uid] = ask(llm)
    run.control.set_pin(Pin(model_name="m", workers="b-*", version_id="v0"))
    for target in ("v1", ""):
        run.control.set_pin(Pin(model_name="m", workers="a-*", version_id=target))
        wanted = target or run.uid
        await_step(follower, (EngineState.READY, wanted))
        assert ask(llm) == answers[wanted]
    assert len(set(map(tuple, answers.values()))) == len(answers)
    follower.close()


def test_hand_driven(llm: Any, run: SmallRun, follower: LlmFollower) -> None:
    """VLLM's four calls are enough: what was not staged before is staged by the update."""
    run.publish_full()
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version_id": run.uid}})
    llm.finish_weight_update(weight_version=run.uid)
    assert worker(llm).weight_transfer_engine.prove() == run.root
    llm.start_weight_update()
    with pytest.raises(Exception, match="no version 'nowhere'"):
        llm.update_weights({"update_info": {"version_id": "nowhere"}})
    assert worker(llm).weight_transfer_engine.prove() == run.root


def test_bits_are_kept(llm: Any, run: SmallRun, follower: LlmFollower) -> None:
    """NaN payloads and signed zeros arrive as they are, in place and through a reload."""
    run.publish_full()
    follower.catch_up(timeout_s=PATIENCE_S)
    odd = torch.tensor([0x7F81, 0xFFA5 - 0x10000, -0x8000, 0x0001], dtype=torch.int16)
    with torch.no_grad():
        run.model.model.norm.weight.view(torch.int16)[:4] = odd
    run.publish_delta()
    follower.catch_up(timeout_s=PATIENCE_S)
    live = worker(llm).model_runner.get_model().model.norm.weight
    assert torch.equal(live.data.view(torch.int16)[:4], odd)
    assert worker(llm).weight_transfer_engine.prove() == run.root


def test_modelexpress_stops_at_the_device(llm: Any, run: SmallRun) -> None:
    """VLLM's own modelexpress backend is there, and joins no service from a CPU; ours does.

    Where a newer one gets further, this fails, and what it then installs can be tested.
    """
    theirs = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="modelexpress"),
        worker(llm).vllm_config,
        torch.device("cpu"),
        worker(llm).model_runner.get_model(),
    )
    info = {"server_url": run.config.control, "model_name": "m"}
    with pytest.raises(ValueError, match="supported device types: cuda"):
        theirs.init_transfer_engine(theirs.parse_init_info(info))
    theirs.shutdown()
