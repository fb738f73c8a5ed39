"""The shared kernel: waits end, retries are bounded, names load late, errors carry a status."""

import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import errors
from paceline.core.errors import (
    DeadlineExceededError,
    ExitStatus,
    MissingExtraError,
    PacelineError,
    UsageError,
)
from paceline.core.registry import LazyEntry, load_entry
from paceline.core.retry import RetryPolicy
from paceline.core.waiting import wait_until
from paceline.testing.clock import FakeClock

_seconds = st.floats(0.0, 1e6)


@given(ready_after_s=_seconds, timeout_s=_seconds, interval_s=st.floats(0.5, 1e6))
def test_a_wait_ends_by_its_deadline_and_not_before(
    ready_after_s: float, timeout_s: float, interval_s: float
) -> None:
    """It succeeds if and only if the condition holds by the deadline, and never sleeps past it."""
    interval_s = max(interval_s, timeout_s / 100)
    clock = FakeClock()

    def is_ready() -> bool:
        return clock.monotonic() >= ready_after_s

    def wait() -> None:
        wait_until(is_ready, what="x", clock=clock, timeout_s=timeout_s, interval_s=interval_s)

    if ready_after_s > timeout_s:
        with pytest.raises(DeadlineExceededError, match="x: not done after"):
            wait()
        assert not is_ready()
    else:
        wait()
        assert is_ready()
    assert clock.monotonic() <= timeout_s * (1 + 1e-9)


def test_a_wait_asks_once_even_without_time() -> None:
    """A timeout of zero still finds what is ready."""
    answers = iter([True])
    wait_until(lambda: next(answers), what="x", clock=FakeClock(), timeout_s=0)
    assert next(answers, None) is None


def test_what_the_condition_raises_passes_through() -> None:
    """Only the caller knows which failures are worth a next try."""

    def fail() -> bool:
        raise UsageError("mine")

    with pytest.raises(UsageError, match="mine"):
        wait_until(fail, what="x", clock=FakeClock(), timeout_s=10)


_policies = st.builds(
    RetryPolicy,
    attempts=st.integers(1, 50),
    first_delay_s=st.floats(0.001, 100),
    factor=st.floats(1.0, 10.0),
    delay_s_max=st.floats(0.001, 1000),
    jitter=st.floats(0.0, 1.0),
)


@given(_policies, st.floats(0.0, 1.0, exclude_max=True))
def test_retries_stop_and_stay_under_the_cap(policy: RetryPolicy, chance: float) -> None:
    """There are attempts - 1 delays, each at least the one before and within cap and jitter."""
    delays = [policy.delay_s(tries, chance=chance) for tries in range(1, policy.attempts + 5)]
    waits = [delay for delay in delays if delay is not None]
    assert delays == waits + [None] * 5
    assert len(waits) == policy.attempts - 1
    assert waits == sorted(waits)
    assert all(0 < delay <= policy.delay_s_max * (1 + policy.jitter) for delay in waits)


ENTRIES = {
    "json": LazyEntry("json", "loads"),
    "absent": LazyEntry("no_such_library_here", "x", extra="hf"),
    "ours": LazyEntry("paceline.no_such_module", "x", extra="hf"),
    "plain": LazyEntry("no_such_library_here", "x"),
}


def test_a_name_becomes_what_it_stands_for() -> None:
    """The attribute of the module is returned."""
    import json

    assert load_entry(ENTRIES, "json", port="thing") is json.loads


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The message holds every name that would have worked."""
    with pytest.raises(UsageError, match="unknown thing 'x'; known: absent, json, ours, plain"):
        load_entry(ENTRIES, "x", port="thing")
    with pytest.raises(UsageError, match="known: none"):
        load_entry({}, "x", port="thing")


def test_a_missing_library_names_the_command_that_installs_it() -> None:
    """Only where an extra is the reason; a hole in our own code stays an import error."""
    with pytest.raises(MissingExtraError, match=r"pip install 'paceline\[hf\]'"):
        load_entry(ENTRIES, "absent", port="thing")
    for name in ("ours", "plain"):
        with pytest.raises(ModuleNotFoundError) as caught:
            load_entry(ENTRIES, name, port="thing")
        assert not isinstance(caught.value, PacelineError)


def test_a_module_that_breaks_while_it_loads_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An implementation that raises on import shows its own error."""
    (tmp_path / "broken_port_module.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = {"broken": LazyEntry("broken_port_module", "x", extra="hf")}
    with pytest.raises(RuntimeError, match="broken"):
        load_entry(entries, "broken", port="thing")
    sys.modules.pop("broken_port_module", None)


def test_every_error_of_ours_has_an_exit_status() -> None:
    """Each class under PacelineError says what the command line exits with, and never OK."""
    classes = [PacelineError]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub.__module__.startswith("paceline.")]
    assert len(classes) > 5
    for cls in classes:
        assert cls.exit_status in set(ExitStatus) - {ExitStatus.OK}, cls


def test_errors_can_be_caught_as_what_they_also_are() -> None:
    """A bad argument is a ValueError, an ended wait a TimeoutError."""
    assert issubclass(UsageError, ValueError)
    assert issubclass(DeadlineExceededError, TimeoutError)
    assert issubclass(errors.PreflightError, PacelineError)


def test_fake_time_moves_only_when_told() -> None:
    """Sleeping jumps, setting the wall clock does not touch monotonic time, back is refused."""
    clock = FakeClock(time_s=100.0)
    clock.sleep(5)
    clock.sleep(-1)
    assert (clock.time(), clock.monotonic()) == (105.0, 5.0)
    clock.set_time(50.0)
    assert (clock.time(), clock.monotonic()) == (50.0, 5.0)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)


def test_fake_time_adds_up_over_threads() -> None:
    """No sleep is lost when several threads sleep at once."""
    clock = FakeClock()

    def doze() -> None:
        for _ in range(500):
            clock.sleep(1.0)

    threads = [threading.Thread(target=doze) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.monotonic() == 2000.0
