"""A real model that is updated while it generates: tokens equal a fresh engine's, or nothing."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors

from paceline.core.waiting import wait_until
from paceline.refit.errors import ApplyError, EngineNotReadyError, UncertainStateError
from paceline.refit.generators.protocol import EngineState, Sampling
from paceline.refit.generators.transformers.sets import view_named
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import TensorBuffer
from paceline.refit.receiver.policy import UpdatePolicy
from paceline.system import environ, system_clock
from paceline.testing.fakes.trainer import State, root_of
from paceline.testing.payloads import delta_payload, full_payload
from paceline.testing.tiny_model import tiny_model, write_tiny_moe, write_tiny_qwen3
from refit.generators.refitting import Follower, MemoryRun

PROMPTS = [[10, 20, 30], [5], [7, 8, 9, 10, 11, 12, 13]]
GREEDY = Sampling(max_tokens=16, temperature=0)
IS_NIGHT = environ().get("HYPOTHESIS_PROFILE") == "nightly"
VERSIONS = 50 if IS_NIGHT else 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(model_dir: Path) -> MemoryRun:
    return MemoryRun(model_dir)


@pytest.fixture(params=["once", "twice"])
def follower(run: MemoryRun, request: pytest.FixtureRequest) -> Iterator[Follower]:
    made = Follower(run, "g-0", weights=request.param)
    yield made
    made.close()


def test_tokens_equal_a_fresh_engine(run: MemoryRun, follower: Follower) -> None:
    """After every refit greedy output is that of a model that loaded the whole version anew."""
    for _ in range(VERSIONS):
        uid = run.publish()
        follower.settle()
        for prompt in PROMPTS:
            choice = follower.generate(prompt, GREEDY).choices[0]
            assert list(choice.token_ids) == run.model.greedy(prompt, 16)
            assert [span.installed.version_id for span in choice.spans] == [uid]
        run.model.step()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("names", ["memory", "checkpoint"])
def test_a_mixture_of_experts(tmp_path: Path, names: str, family: str) -> None:
    """Experts are named as the trainer holds them or as files do; tokens are a fresh engine's."""
    run = MemoryRun(write_tiny_moe(tmp_path, family=family), names=names)
    follower = Follower(run, "g-moe", names=names, weights="twice")
    run.publish()
    follower.settle()
    run.model.step()
    run.publish()
    follower.settle()
    choice = follower.generate(PROMPTS[0], GREEDY).choices[0]
    assert list(choice.token_ids) == run.model.greedy(PROMPTS[0], 16)
    assert choice.spans[0].installed.sequence == 1
    follower.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3"])
def test_checkpoint_names_are_the_librarys(tmp_path: Path, family: str) -> None:
    """Names and bytes under ``checkpoint`` are those of the files that the library writes."""
    write = write_tiny_qwen3 if family == "qwen3" else partial(write_tiny_moe, family=family)
    model = tiny_model(write(tmp_path), seed=1)
    model.save_pretrained(tmp_path / "saved")
    saved = {
        name: (tuple(spec["shape"]), bytes(spec["data"]))
        for name, spec in safetensors.deserialize(  # type: ignore[no-untyped-call]
            (tmp_path / "saved" / "model.safetensors").read_bytes()
        )
    }
    live = view_named(model, "checkpoint").buffers
    assert {name: (each.shape, bytes(each.data)) for name, each in live.items()} == saved


def test_two_engines_one_digest_one_output(run: MemoryRun, follower: Follower) -> None:
    """Whatever company a request has, engines that report one digest give one output."""
    late = Follower(run, "g-1")
    sampling = Sampling(max_tokens=20, n=2, seed=3, ignore_eos=True)
    for version in range(3):
        run.publish()
        run.model.step()
        follower.settle()
        if version:
            late.settle()  # the first time over a chain, then step by step
        if version == 0:
            continue
        company = [follower.gate.submit(prompt, Sampling(max_tokens=30)) for prompt in PROMPTS]
        first, second = (each.generate(PROMPTS[0], sampling) for each in (follower, late))
        assert first == second
        roots = {r.root_digest for r in run.ledger.list_installed("m")}
        assert len(roots) == 1
        for future in company:
            assert future.result(30).choices
    late.close()


class TestWhen:
    """An update at any moment of a request: the tokens before are the old version's, exactly."""

    def test_idle(self, run: MemoryRun, follower: Follower) -> None:
        """Between requests: the next one is of the new version from its first token on."""
        run.publish()
        follower.settle()
        run.model.step()
        run.publish()
        follower.settle()
        spans = follower.generate(PROMPTS[0], GREEDY).choices[0].spans
        assert [span.installed.sequence for span in spans] == [1]

    def test_decode(self, run: MemoryRun, follower: Follower) -> None:
        """In the middle: tokens up to the seam are what the old version alone would have given."""
        run.publish()
        follower.settle()
        long = replace(GREEDY, max_tokens=60, ignore_eos=True)
        alone = follower.generate(PROMPTS[0], long).choices[0].token_ids
        run.model.step(share=0.5)
        started, go_on = threading.Event(), threading.Event()

        def on_piece(piece: object) -> None:
            started.set()
            go_on.wait(30)  # the engine stands between two passes

        future = follower.gate.submit_stream(PROMPTS[0], long, on_piece)
        assert started.wait(30)
        run.publish()
        follower.settle()
        go_on.set()
        choice = future.result(60).choices[0]
        assert [span.installed.sequence for span in choice.spans] == [0, 1]
        seam = choice.spans[0].end
        assert choice.token_ids[:seam] == alone[:seam]

    def test_prefill(self, run: MemoryRun, follower: Follower) -> None:
        """While prompts are read: the write waits for the pass, and no token lacks its version."""
        run.publish()
        follower.settle()
        run.model.step()
        run.publish()
        inside, leave = threading.Event(), threading.Event()

        def hold(module: Any, args: Any) -> None:
            inside.set()
            leave.wait(30)

        handle = follower.models.main.register_forward_pre_hook(hold)
        future = follower.gate.submit(PROMPTS[2], GREEDY)
        assert inside.wait(30)
        updating = threading.Thread(target=follower.settle)
        updating.start()
        wait_until(
            lambda: follower.engine._gate._num_writers == 1,
            what="the writer",
            clock=system_clock(),
            timeout_s=30,
            interval_s=0.005,
        )
        assert follower.gate.installed().sequence == 0  # type: ignore[union-attr]
        handle.remove()
        leave.set()
        updating.join(30)
        spans = future.result(30).choices[0].spans
        assert (spans[0].installed.sequence, spans[0].end) == (0, 1)
        assert spans[-1].installed.sequence == 1

    def test_shutdown(self, run: MemoryRun) -> None:
        """A close in the middle fails what runs; the bytes are one version whole."""
        follower = Follower(run, "g-2")
        run.publish()
        follower.settle()
        future = follower.gate.submit(PROMPTS[0], Sampling(max_tokens=100, ignore_eos=True))
        run.model.step()
        run.publish()
        updating = threading.Thread(target=follower.settle)
        updating.start()
        follower.close()
        updating.join(30)
        with pytest.raises((EngineNotReadyError, CancelledError)):
            future.result(30)
        installed = follower.gate.installed()
        assert installed is not None
        assert installed.root_digest == root_of(state_of(follower))

    @pytest.mark.parametrize("policy", [UpdatePolicy.DRAIN, UpdatePolicy.ABORT])
    def test_policies(self, run: MemoryRun, policy: UpdatePolicy) -> None:
        """Under both, no sample has two versions: it is whole, or asked for again."""
        follower = Follower(run, "g-3", policy=policy)
        run.publish()
        follower.settle()
        started, go_on = threading.Event(), threading.Event()

        def on_piece(piece: object) -> None:
            started.set()
            if policy is UpdatePolicy.ABORT:
                go_on.wait(30)

        future = follower.gate.submit_stream(
            PROMPTS[0], Sampling(max_tokens=60, ignore_eos=True), on_piece
        )
        assert started.wait(30)
        run.model.step()
        run.publish()
        follower.settle()
        go_on.set()
        if policy is UpdatePolicy.DRAIN:
            assert len(future.result(30).choices[0].spans) == 1
        else:
            with pytest.raises(EngineNotReadyError):
                future.result(30)
        assert follower.generate(PROMPTS[0], GREEDY).choices[0].spans[0].installed.sequence == 1
        follower.close()


def without(state: State, name: str) -> State:
    return {key: each for key, each in state.items() if key != name}


def extra(state: State) -> State:
    made = TensorBuffer(name="model.extra", dtype="U8", shape=(2,), data=memoryview(b"ab"))
    return {**state, "model.extra": made}


def renamed(state: State) -> State:
    found = state["model.norm.weight"]
    return {
        **without(state, found.name),
        "model.norm.scale": replace(found, name="model.norm.scale"),
    }


def recast(state: State) -> State:
    found = state["model.norm.weight"]
    return {**state, found.name: replace(found, dtype="F16")}


def reshaped(state: State) -> State:
    found = state["model.norm.weight"]
    shape = (2, found.shape[0] // 2)
    return {**state, found.name: replace(found, shape=shape)}


MUTATIONS: dict[str, Callable[[State], State]] = {
    "missing": lambda state: without(state, "model.norm.weight"),
    "extra": extra,
    "renamed": renamed,
    "dtype": recast,
    "shape": reshaped,
}


class TestRefused:
    @pytest.mark.parametrize("mutation", MUTATIONS)
    def test_whole(self, run: MemoryRun, follower: Follower, mutation: str) -> None:
        """A version that is not of this model is refused whole; the old one is served on."""
        run.publish()
        follower.settle()
        before = follower.generate(PROMPTS[0], GREEDY)
        run.model.step()
        manifest, data = full_payload(
            MUTATIONS[mutation](run.model.state()).values(), aliases=run.model.aliases
        )
        self.refuse(run, follower, manifest, data, None)
        assert follower.generate(PROMPTS[0], GREEDY) == before

    def test_wrong_base(self, run: MemoryRun, follower: Follower) -> None:
        """A delta for other weights is refused whole."""
        run.publish()
        follower.settle()
        before, held = follower.generate(PROMPTS[0], GREEDY), run.model.state()
        run.model.step()
        other = run.model.state()
        run.model.step()
        manifest, data = delta_payload(other, run.model.state(), aliases=run.model.aliases)
        self.refuse(run, follower, manifest, data, root_of(held))
        assert follower.generate(PROMPTS[0], GREEDY) == before

    def refuse(
        self,
        run: MemoryRun,
        follower: Follower,
        manifest: Manifest,
        data: bytes,
        parent_root: str | None,
    ) -> None:
        base_uid = None if parent_root is None else "v0"
        run.trainer.publish("v1", 1, manifest, data, parent_root=parent_root, base_uid=base_uid)
        old = root_of(state_of(follower))
        follower.settle()
        assert follower.receiver.figures()["refusals"] == 1
        assert root_of(state_of(follower)) == old
        health = follower.receiver.health()
        assert health.state is EngineState.READY
        assert health.installed is not None
        assert health.installed.version_id == "v0"


class TestBroken:
    @pytest.mark.parametrize("at", range(4))
    def test_a_write_that_breaks_off(self, run: MemoryRun, follower: Follower, at: int) -> None:
        """An install that fails at any stage leaves the old version whole, and goes in later."""
        run.publish()
        follower.settle()
        run.model.step()
        run.publish()
        old = root_of(state_of(follower))
        stages = ["live_tensors", "at_safe_point", "tensor_aliases", "installed"]
        broken = _BreaksOnce(follower.gate, stages[at])
        follower.receiver._installer._engine = broken  # type: ignore[attr-defined]
        follower.settle()
        found = root_of(state_of(follower))
        installed = follower.gate.installed()
        assert installed is not None
        assert found == installed.root_digest
        if broken.has_broken:
            assert found == old
        follower.receiver._refusals.keep_only(frozenset())
        follower.settle()
        assert root_of(state_of(follower)) == root_of(run.model.state())

    def test_uncertain_until_a_full_one(self, run: MemoryRun, follower: Follower) -> None:
        """Weights without a name are not served; a full version makes them one again."""
        run.publish()
        follower.settle()

        def fail() -> None:
            raise UncertainStateError("half written")

        label = follower.gate.installed()
        with pytest.raises(UncertainStateError):
            follower.gate.at_safe_point(fail, installed=label, timeout_s=5)
        with pytest.raises(EngineNotReadyError):
            follower.gate.submit(PROMPTS[0], GREEDY)
        follower.receiver._base = None
        run.model.step()
        run.publish(is_full=True)
        follower.settle()
        choice = follower.generate(PROMPTS[0], GREEDY).choices[0]
        assert list(choice.token_ids) == run.model.greedy(PROMPTS[0], 16)


class _BreaksOnce:
    """An engine whose one method fails the first time it is called."""

    def __init__(self, engine: object, method: str) -> None:
        self._engine = engine
        self._method = method
        self.has_broken = False

    def __getattr__(self, name: str) -> Any:
        if name == self._method and not self.has_broken:
            self.has_broken = True

            def fail(*args: object, **kwargs: object) -> None:
                raise ApplyError("killed here")

            return fail
        return getattr(self._engine, name)


def state_of(follower: Follower) -> State:
    return dict(follower.gate.live_tensors())
