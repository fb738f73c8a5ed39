"""An engine whose weights are in workers: what it says while it is led from version to version."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import DeadlineExceededError
from paceline.refit.errors import ApplyError, EngineNotReadyError, GenerationError
from paceline.refit.errors import UncertainStateError as Uncertain
from paceline.refit.generators.protocol import ChoicePiece, InstalledVersion
from paceline.refit.generators.vllm.growing import GrowingAnswer
from paceline.refit.generators.workers import LinkConfig, WorkersEngine, WorkerStatus
from paceline.testing.clock import FakeClock

V1 = InstalledVersion(version_id="v1", sequence=1, root_digest="aa")
V2 = InstalledVersion(version_id="v2", sequence=2, root_digest="bb")


class Driver:
    """Signs EngineDriver; takes down whether the engine runs."""

    def __init__(self) -> None:
        self.is_paused = False
        self.pause_fails = False

    def init(self, config: LinkConfig) -> None: ...

    def stage(self, version_id: str, *, known: frozenset[str] | None = None) -> None: ...

    def status(self) -> Sequence[WorkerStatus]:
        return []

    def pause(self) -> None:
        self.is_paused = True
        if self.pause_fails:
            raise DeadlineExceededError("no answer")

    def apply(self, version_id: str) -> Sequence[WorkerStatus]:
        return []

    def finish(self, version_id: str) -> None: ...

    def undo(self) -> None: ...

    def resume(self) -> None:
        self.is_paused = False

    def prove(self) -> Sequence[str]:
        return []


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def workers(driver: Driver) -> WorkersEngine:
    workers = WorkersEngine(driver, clock=FakeClock())
    install(workers, V1)
    return workers


def install(workers: WorkersEngine, label: InstalledVersion | None, *, error: Any = None) -> None:
    def write() -> None:
        if error is not None:
            raise error

    workers.at_safe_point(write, installed=label, timeout_s=1)


def test_a_write_that_fails_leaves_the_old_version_running(
    workers: WorkersEngine, driver: Driver
) -> None:
    """The engine goes on with what it had; only weights that are no version stop it."""
    with pytest.raises(ApplyError):
        install(workers, V2, error=ApplyError("undone"))
    assert (workers.installed(), driver.is_paused) == (V1, False)
    with pytest.raises(Uncertain):
        install(workers, V2, error=Uncertain("half"))
    assert (workers.installed(), driver.is_paused) == (None, True)
    install(workers, V2)
    assert (workers.installed(), driver.is_paused) == (V2, False)


def test_an_engine_that_does_not_pause_goes_on_unless_its_label_is_taken(
    workers: WorkersEngine, driver: Driver
) -> None:
    """A label is taken away whatever becomes of the pause."""
    driver.pause_fails = True
    with pytest.raises(DeadlineExceededError):
        install(workers, V2)
    assert (workers.installed(), driver.is_paused) == (V1, False)
    with pytest.raises(DeadlineExceededError):
        install(workers, None)
    assert (workers.installed(), driver.is_paused) == (None, True)


def output(tokens: Sequence[int], *, ends: str | None = None, spans: Any = None) -> Any:
    """Return what vLLM says of a choice's new tokens."""
    return SimpleNamespace(
        index=0,
        token_ids=list(tokens),
        logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in tokens],
        text="".join(map(str, tokens)),
        finish_reason=ends,
        weight_versions=spans,
    )


def named(version: str, start: int, end: int) -> Any:
    return SimpleNamespace(version=version, start=start, end=end)


def test_tokens_are_told_until_an_update_begins(workers: WorkersEngine) -> None:
    """Later ones wait for vLLM's word, which is also checked against what was told."""
    told: list[ChoicePiece] = []
    answer = GrowingAnswer(workers, told.append)
    answer.add(output([1, 2]))
    assert [piece.token_ids for piece in told] == [(1, 2)]
    assert told[0].spans[0].installed == V1
    install(workers, V2)
    answer.add(output([3]))
    assert len(told) == 1
    ends = output([4], ends="length", spans=[named("v1", 0, 2), named("v2", 2, 4)])
    answer.add(ends)
    first, second = answer.choices(2)
    assert first == second
    assert (first.token_ids, first.text) == ((1, 2, 3, 4), "1234")
    assert [(piece.index, piece.token_ids, piece.text) for piece in told[1:]] == [
        (0, (3, 4), "34"),
        (1, (1, 2, 3, 4), "1234"),
    ]
    assert [(span.installed, span.start, span.end) for span in told[1].spans] == [(V2, 2, 4)]


@pytest.mark.parametrize(
    "spans",
    [
        [named("v2", 0, 2)],
        [named("v1", 0, 1), named("v2", 1, 2)],
        [named("v1", 1, 2)],
        [named("v1", 0, 1)],
        [named("v9", 0, 2)],
        None,
    ],
    ids=["other", "too-early", "no-start", "no-end", "unknown", "unnamed"],
)
def test_what_vllm_does_not_bear_out_fails_the_request(workers: WorkersEngine, spans: Any) -> None:
    """A token that was told under a version that did not make it is never passed over."""
    install(workers, V2)
    install(workers, V1)
    answer = GrowingAnswer(workers, lambda piece: None)
    answer.add(output([1, 2]))
    answer.add(output([], ends="stop", spans=spans))
    with pytest.raises(GenerationError):
        answer.choices(1)


def test_an_aborted_request_is_to_be_asked_again(workers: WorkersEngine) -> None:
    """Nothing at all, or a choice that an update cut off, is no answer."""
    answer = GrowingAnswer(workers, None)
    with pytest.raises(EngineNotReadyError):
        answer.choices(1)
    answer.add(output([1], ends="abort"))
    with pytest.raises(EngineNotReadyError):
        answer.choices(1)
