"""The SGLang engine against a stand-in that is built from the documented routes."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import PreflightError, UsageError
from paceline.core.waiting import wait_until
from paceline.refit.errors import (
    BadRequestError,
    EngineBusyError,
    EngineNotReadyError,
    UncertainStateError,
)
from paceline.refit.generators.protocol import EngineConfig, InstalledVersion, Sampling, proof_of
from paceline.refit.generators.sglang.engine import SglangEngine
from paceline.system import system_clock
from paceline.testing.fakes.sglang import FakeSglang
from paceline.testing.tiny_model import CHARACTERS, SPECIAL, tiny_model, write_tiny_qwen3

SIZE = len(CHARACTERS) + len(SPECIAL)
V1 = InstalledVersion(version_id="v1", sequence=1, root_digest="aa")
V2 = InstalledVersion(version_id="v2", sequence=2, root_digest="bb")


def write_checkpoint(directory: Path) -> Path:
    """Write a tiny model as a server is started with: tied, so that one name is left out."""
    model_dir = write_tiny_qwen3(directory)
    state = tiny_model(model_dir, seed=9).state_dict()
    del state["lm_head.weight"]
    save_file(
        {name: tensor.clone() for name, tensor in state.items()}, model_dir / "model.safetensors"
    )
    return model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[FakeSglang]:
    made = FakeSglang(model_dir, vocabulary_size=SIZE)
    yield made
    made.close()


@pytest.fixture
def server(running: FakeSglang) -> FakeSglang:
    running.restart()
    return running


@pytest.fixture
def engine(model_dir: Path, server: FakeSglang) -> Iterator[SglangEngine]:
    made = make_engine(model_dir, server.url)
    yield made
    made.close(timeout_s=10)


def make_engine(model_dir: Path, url: str, **changes: object) -> SglangEngine:
    config = EngineConfig(model_dir=model_dir, url=url, **changes)  # type: ignore[arg-type]
    return SglangEngine(config, clock=system_clock(), new_seed=lambda: 99)


def flip(engine: SglangEngine, name: str = "model.norm.weight") -> Callable[[], None]:
    def write() -> None:
        data = engine.live_tensors()[name].data
        data[0] ^= 1

    return write


def nothing() -> None:
    pass


def live(engine: SglangEngine) -> dict[str, bytes]:
    return {name: bytes(buffer.data) for name, buffer in engine.live_tensors().items()}


class TestInstall:
    def test_the_first_one_hands_everything_over(
        self, engine: SglangEngine, server: FakeSglang
    ) -> None:
        """What a server holds is not believed: the first version goes over whole."""
        before = live(engine)
        assert engine.at_safe_point(flip(engine), installed=V1, timeout_s=5) > 0
        assert server.tensors == live(engine) != before
        assert server.weight_version == "v1"
        assert engine.installed() == V1
        assert engine.tensor_aliases() == {"lm_head.weight": "model.embed_tokens.weight"}

    def test_then_only_what_changed(self, engine: SglangEngine, server: FakeSglang) -> None:
        """The next version hands over the tensors that differ; the cache goes with every one."""
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        loaded: list[set[str]] = []
        read = server.tensors

        class Watched(dict[str, bytes]):
            def __ior__(self, other: dict[str, bytes]) -> Self:  # type: ignore[override,misc]
                loaded.append(set(other))
                self.update(other)
                return self

        server.tensors = Watched(read)
        engine.at_safe_point(flip(engine), installed=V2, timeout_s=5)
        assert loaded == [{"model.norm.weight"}]
        assert dict(server.tensors) == live(engine)
        assert server.calls[-4:] == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
            "/model_info",
        ]

    def test_nothing_is_left_on_disk(self, engine: SglangEngine) -> None:
        """What was handed over is removed when the server has it."""
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        assert list(Path(engine._spool.name).iterdir()) == []

    def test_a_write_that_fails_reaches_nobody(
        self, engine: SglangEngine, server: FakeSglang
    ) -> None:
        """An error before the server is asked leaves it as it was."""
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)

        def fail() -> None:
            raise OSError("disk")

        calls = list(server.calls)
        with pytest.raises(OSError, match="disk"):
            engine.at_safe_point(fail, installed=V2, timeout_s=5)
        assert (server.calls, engine.installed()) == (calls, V1)

    @pytest.mark.parametrize("fault", ["refuse", "lost", "flush_refused", "half"])
    def test_one_failure_is_made_good(
        self, engine: SglangEngine, server: FakeSglang, fault: str
    ) -> None:
        """Loading again is harmless, so a load that failed in whatever way is repeated once."""
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        server.failures["/update_weights_from_disk"] = [fault]
        engine.at_safe_point(flip(engine), installed=V2, timeout_s=5)
        assert engine.installed() == V2
        assert server.tensors == live(engine)

    @pytest.mark.parametrize("fault", ["refuse", "flush_refused", "half"])
    def test_two_failures_leave_no_label(
        self, engine: SglangEngine, server: FakeSglang, fault: str
    ) -> None:
        """When nobody knows what the server holds, nothing is served until all of it went over."""
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        server.failures["/update_weights_from_disk"] = [fault, fault]
        with pytest.raises(UncertainStateError):
            engine.at_safe_point(flip(engine), installed=V2, timeout_s=5)
        assert engine.installed() is None
        assert not server._is_paused
        with pytest.raises(EngineNotReadyError):
            engine.submit([1], Sampling())
        server.tensors["model.norm.weight"] = b"something else"
        engine.at_safe_point(nothing, installed=V2, timeout_s=5)
        assert server.tensors == live(engine)

    def test_a_server_that_is_away(self, model_dir: Path) -> None:
        """A server that does not answer is uncertain, and the error says what was tried."""
        engine = make_engine(model_dir, "http://127.0.0.1:9")
        with pytest.raises(UncertainStateError, match="did not take version v1"):
            engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        engine.close(timeout_s=1)

    def test_somebody_else_sets_the_label(self, engine: SglangEngine, server: FakeSglang) -> None:
        """A server that says another version than was installed is not believed."""

        class Stubborn(FakeSglang):
            weight_version = property(lambda self: "theirs", lambda self, value: None)

        server.__class__ = Stubborn
        with pytest.raises(UncertainStateError, match="'theirs' instead of 'v1'"):
            engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        server.__class__ = FakeSglang

    def test_proof_is_called_what_it_is(self, engine: SglangEngine) -> None:
        """The report does not say that live bytes were read where they were not."""
        assert proof_of(engine) == "server-label"


class TestGenerate:
    def test_across_an_update(self, engine: SglangEngine, server: FakeSglang) -> None:
        """A sample that crosses an update says where, and was computed on with the new weights."""
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        server.hold_at = 40
        future = engine.submit([1], Sampling(max_tokens=100, ignore_eos=True))
        wait_for(lambda: server.num_tokens == 40)
        engine.at_safe_point(flip(engine), installed=V2, timeout_s=5)
        server.hold_at = None
        spans = future.result(30).choices[0].spans
        assert [span.installed for span in spans] == [V1, V2]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, 40, 100)

    def test_an_old_release_says_nothing_of_spans(
        self, engine: SglangEngine, server: FakeSglang
    ) -> None:
        """Without spans a sample of one version is good, one that crossed is asked for again."""
        server.tells_spans = False
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        whole = engine.submit([1], Sampling(max_tokens=3)).result(10).choices[0]
        assert [span.installed for span in whole.spans] == [V1]
        server.hold_at, drawn = 40, server.num_tokens
        future = engine.submit([1], Sampling(max_tokens=100))
        wait_for(lambda: server.num_tokens == drawn + 40)
        engine.at_safe_point(flip(engine), installed=V2, timeout_s=5)
        server.hold_at = None
        with pytest.raises(EngineNotReadyError, match="crossed an update"):
            future.result(30)

    def test_cancelling_frees_the_server(self, engine: SglangEngine, server: FakeSglang) -> None:
        """Whoever stops waiting ends the request there too."""
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        future = engine.submit([1], Sampling(max_tokens=120, n=2))
        wait_for(lambda: server.num_running == 2)
        assert future.cancel()
        wait_for(lambda: server.num_running == 0)
        assert engine.load().running == 0

    def test_bad_requests(self, engine: SglangEngine) -> None:
        """What the server would refuse is refused here, with the field's name."""
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        for prompt, sampling in (
            ([], Sampling()),
            ([10**6], Sampling()),
            ([1], Sampling(max_tokens=128)),
            ([1], Sampling(n=33)),
        ):
            with pytest.raises(BadRequestError):
                engine.submit(prompt, sampling)

    def test_a_full_queue(self, model_dir: Path, server: FakeSglang) -> None:
        """Beyond batch and queue nothing is taken."""
        engine = make_engine(model_dir, server.url, max_batch=1, max_waiting=1)
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        futures = [engine.submit([1], Sampling(max_tokens=100)) for _ in range(2)]
        with pytest.raises(EngineBusyError):
            engine.submit([1], Sampling())
        assert engine.load().running + engine.load().waiting == 2
        for future in futures:
            future.cancel()
        engine.close(timeout_s=10)

    def test_closing_fails_what_runs(self, engine: SglangEngine, server: FakeSglang) -> None:
        """Nobody waits for an engine that is closed; the server lives on."""
        engine.at_safe_point(nothing, installed=V1, timeout_s=5)
        future = engine.submit([1], Sampling(max_tokens=120))
        wait_for(lambda: server.num_running == 1)
        engine.close(timeout_s=10)
        with pytest.raises(EngineNotReadyError):
            future.result(0)
        wait_for(lambda: server.num_running == 0)


class TestStart:
    def test_what_is_missing_is_said(self, model_dir: Path, tmp_path: Path) -> None:
        """No address, no checkpoint, no tokenizer, no key: each with what to do."""
        with pytest.raises(UsageError, match="--engine-url"):
            make_engine(model_dir, "")
        with pytest.raises(PreflightError, match="config\\.json"):
            make_engine(tmp_path, "http://x")
        with pytest.raises(PreflightError, match="safetensors"):
            make_engine(write_tiny_qwen3(tmp_path / "bare"), "http://x")
        with pytest.raises(PreflightError, match="key"):
            make_engine(model_dir, "http://x", key_file=tmp_path / "none")

    def test_a_key(self, model_dir: Path, tmp_path: Path) -> None:
        """A server that wants a key gets it from the file; without it nothing is installed."""
        server = FakeSglang(model_dir, vocabulary_size=SIZE, key="sesame")
        (tmp_path / "key").write_text("sesame\n")
        good = make_engine(model_dir, server.url, key_file=tmp_path / "key")
        good.at_safe_point(nothing, installed=V1, timeout_s=5)
        bad = make_engine(model_dir, server.url)
        with pytest.raises(UncertainStateError, match="401") as caught:
            bad.at_safe_point(nothing, installed=V1, timeout_s=5)
        assert "sesame" not in str(caught.value)
        for engine in (good, bad):
            engine.close(timeout_s=10)
        server.close()


def wait_for(ready: Callable[[], bool]) -> None:
    wait_until(ready, what="the server", clock=system_clock(), timeout_s=10, interval_s=0.005)


def test_the_server_reads_no_half_files(engine: SglangEngine, server: FakeSglang) -> None:
    """Two writers take turns, so that a folder belongs to one update."""
    threads = [
        threading.Thread(
            target=engine.at_safe_point,
            args=(flip(engine),),
            kwargs={"installed": label, "timeout_s": 10},
        )
        for label in (V1, V2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert server.tensors == live(engine)
    assert engine.installed() in (V1, V2)
    assert server.weight_version == engine.installed().version_id  # type: ignore[union-attr]
    assert torch.get_num_threads() >= 1
