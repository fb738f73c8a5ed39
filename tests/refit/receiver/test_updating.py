"""What becomes of requests in flight when a version goes in, on an engine that follows a rule."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.errors import EngineNotReadyError, UncertainStateError
from paceline.refit.generators.protocol import (
    ChoicePiece,
    Generation,
    InstalledVersion,
    RolloutEngine,
    Sampling,
)
from paceline.refit.model import TensorBuffer
from paceline.refit.receiver.policy import Step, UpdatePolicy, next_step
from paceline.refit.receiver.updating import UpdateGate
from paceline.system import system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.generator import RolloutEngineContract
from paceline.testing.fakes.generator import FakeGenerator

V1 = InstalledVersion(version_id="v1", sequence=1, root_digest="aa")
V2 = InstalledVersion(version_id="v2", sequence=2, root_digest="bb")
SAMPLING = Sampling(max_tokens=2)


def nothing() -> None:
    pass


def gate_of(engine: FakeGenerator, policy: UpdatePolicy, *, drain_s: float = 1.0) -> UpdateGate:
    gate = UpdateGate(engine, policy=policy, drain_s=drain_s, clock=FakeClock())
    gate.at_safe_point(nothing, installed=V1, timeout_s=1)
    engine.is_held = True
    return gate


@given(
    policy=st.sampled_from(UpdatePolicy),
    in_flight=st.integers(0, 3),
    waited_s=st.floats(0, 9),
    drain_s=st.floats(0, 9),
)
def test_table(policy: UpdatePolicy, in_flight: int, waited_s: float, drain_s: float) -> None:
    """With nothing in flight every policy writes; only one waits, and never beyond its time."""
    step = next_step(policy, in_flight=in_flight, waited_s=waited_s, drain_s=drain_s)
    if in_flight == 0 or policy is UpdatePolicy.IMMEDIATE:
        assert step is Step.WRITE
    elif policy is UpdatePolicy.DRAIN and waited_s < drain_s:
        assert step is Step.WAIT
    else:
        assert step is Step.ABORT


def test_immediate_lets_go_on() -> None:
    """What is in flight is untouched, and new requests are taken."""
    engine = FakeGenerator()
    gate = gate_of(engine, UpdatePolicy.IMMEDIATE)
    future = gate.submit([1], SAMPLING)
    gate.at_safe_point(nothing, installed=V2, timeout_s=1)
    assert not future.done()
    assert gate.figures()["drain_seconds"] == 0
    gate.submit([2], SAMPLING)
    assert len(engine.held) == 2


def test_abort_frees_the_places() -> None:
    """Whoever waits hears at once that it is to ask again; the engine is asked to drop the work."""
    engine = FakeGenerator()
    gate = gate_of(engine, UpdatePolicy.ABORT)
    futures = [gate.submit([1], SAMPLING) for _ in range(3)]
    gate.at_safe_point(nothing, installed=V2, timeout_s=1)
    for future, inner in zip(futures, engine.held, strict=True):
        with pytest.raises(EngineNotReadyError, match="version v2"):
            future.result(0)
        assert inner.cancelled()
    assert gate.figures()["aborted_requests"] == 3
    assert gate.installed() == V2
    engine.is_held = False
    assert gate.submit([1], SAMPLING).result(1).choices


def test_drain_waits_then_aborts() -> None:
    """What finishes in time is answered, the rest is aborted, and nothing is taken meanwhile."""
    engine = FakeGenerator()
    gate = gate_of(engine, UpdatePolicy.DRAIN)
    quick, slow = gate.submit([1], SAMPLING), gate.submit([2], SAMPLING)
    answer = engine.generate([1], SAMPLING, V1)
    engine.held[0].set_result(answer)
    seen: list[str] = []

    def write() -> None:
        seen.append(gate.updating)
        with pytest.raises(EngineNotReadyError, match="v2 is going in"):
            gate.submit([3], SAMPLING)

    gate.at_safe_point(write, installed=V2, timeout_s=1)
    assert seen == ["version v2 is going in"]
    assert quick.result(0) == answer
    with pytest.raises(EngineNotReadyError, match="aborted"):
        slow.result(0)
    assert gate.figures()["drain_seconds"] == pytest.approx(1.0, abs=0.01)
    assert gate.updating == ""


def test_drain_that_comes_to_an_end() -> None:
    """When the last request finishes, the write follows; its answer has one version."""
    engine = FakeGenerator()
    gate = UpdateGate(engine, policy=UpdatePolicy.DRAIN, drain_s=30, clock=system_clock())
    gate.at_safe_point(nothing, installed=V1, timeout_s=1)
    engine.is_held = True
    future = gate.submit([1], SAMPLING)
    thread = threading.Thread(
        target=gate.at_safe_point, args=(nothing,), kwargs={"installed": V2, "timeout_s": 1}
    )
    thread.start()
    while not gate.updating:
        thread.join(0.001)
    assert gate.installed() == V1
    engine.held[0].set_result(engine.generate([1], SAMPLING, V1))
    thread.join(20)
    assert future.result(0).choices[0].spans[0].installed == V1
    assert gate.installed() == V2


def test_taking_a_label_away_never_waits() -> None:
    """An engine whose weights have no name stops at once, whatever the policy."""
    engine = FakeGenerator()
    gate = gate_of(engine, UpdatePolicy.DRAIN, drain_s=1e9)
    gate.submit([1], SAMPLING)
    gate.at_safe_point(nothing, installed=None, timeout_s=1)
    with pytest.raises(EngineNotReadyError):
        gate.submit([2], SAMPLING)


def test_a_failed_write_opens_the_gate() -> None:
    """After an update that failed requests are taken again, or refused for the right reason."""
    gate = gate_of(FakeGenerator(), UpdatePolicy.DRAIN)

    def fail() -> None:
        raise UncertainStateError("half written")

    with pytest.raises(UncertainStateError):
        gate.at_safe_point(fail, installed=V2, timeout_s=1)
    assert gate.updating == ""
    assert gate.installed() is None


def test_cancelling_reaches_the_engine() -> None:
    """Whoever stops waiting frees the engine's place."""
    engine = FakeGenerator()
    gate = gate_of(engine, UpdatePolicy.ABORT)
    assert gate.submit([1], SAMPLING).cancel()
    assert engine.held[0].cancelled()


def test_engines_that_cannot_stream_tell_at_the_end() -> None:
    """Each choice comes as one piece before the answer, and nothing after an abort."""
    engine = FakeGenerator()
    gate = gate_of(engine, UpdatePolicy.ABORT)
    pieces: list[ChoicePiece] = []
    sampling = Sampling(max_tokens=2, n=2)
    future = gate.submit_stream([1], sampling, pieces.append)
    engine.held[0].set_result(engine.generate([1], sampling, V1))
    assert [piece.index for piece in pieces] == [0, 1]
    assert [piece.token_ids for piece in pieces] == [c.token_ids for c in future.result(0).choices]
    late = gate.submit_stream([1], sampling, pieces.append)
    gate.at_safe_point(nothing, installed=V2, timeout_s=1)
    with pytest.raises(EngineNotReadyError):
        late.result(0)
    assert len(pieces) == 2


class TestGateIsAnEngine(RolloutEngineContract):
    """What stands in front of an engine keeps every claim of one."""

    prompt = (10, 11, 12)

    def make(self) -> RolloutEngine:
        data = memoryview(b"old!")
        engine = FakeGenerator([TensorBuffer(name="w", dtype="U8", shape=(4,), data=data)])
        return UpdateGate(engine, policy=UpdatePolicy.DRAIN, drain_s=1, clock=system_clock())

    def weights(self) -> dict[str, bytes]:
        return {"w": b"new!"}


def test_two_threads_answer_once() -> None:
    """An abort and an answer at the same moment: one of them wins, nobody fails."""
    for _ in range(50):
        engine = FakeGenerator()
        gate = gate_of(engine, UpdatePolicy.ABORT)
        future = gate.submit([1], SAMPLING)
        answer = engine.generate([1], SAMPLING, V1)
        problems: list[BaseException] = []

        def run(act: Callable[[], object], into: list[BaseException] = problems) -> None:
            try:
                act()
            except BaseException as exc:  # noqa: BLE001 - whatever it is
                into.append(exc)

        inner = engine.held[0]

        def finish(inner: "object" = inner, answer: Generation = answer) -> None:
            if inner.set_running_or_notify_cancel():  # type: ignore[attr-defined]
                inner.set_result(answer)  # type: ignore[attr-defined]

        threads = [
            threading.Thread(target=run, args=(finish,)),
            threading.Thread(
                target=run,
                args=(lambda g=gate: g.at_safe_point(nothing, installed=V2, timeout_s=1),),
            ),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert problems == []
        assert future.done()
