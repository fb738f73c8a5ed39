"""The lock that says who drives a run: one at a time, and who it is."""

import json
import os
from pathlib import Path

import pytest

from paceline.core.clock import Clock
from paceline.core.errors import PreflightError
from paceline.runs.owner import STALE_S, OwnerLock, owner_of
from paceline.system import system_clock
from paceline.testing.clock import FakeClock


def lock(run_dir: Path, clock: Clock) -> OwnerLock:
    return OwnerLock(run_dir, clock=clock, token="t")  # noqa: S106 - no secret


def test_a_lock_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    """What stands in the way is named with what to do, and nobody drives the run."""
    (tmp_path / "runs").write_text("a file")
    with (
        pytest.raises(PreflightError, match="PACELINE_STATE_DIR elsewhere"),
        lock(tmp_path / "runs" / "one", system_clock()),
    ):
        pass


def test_a_run_has_one_driver(tmp_path: Path) -> None:
    """Whoever comes second is told who it is, and the first one keeps it."""
    clock = system_clock()
    with lock(tmp_path, clock):
        with pytest.raises(PreflightError, match=f"process {os.getpid()}"), lock(tmp_path, clock):
            pass
        owner = owner_of(tmp_path, clock=clock)
        assert owner is not None
        assert (owner.pid, owner.is_here) == (os.getpid(), True)
    assert owner_of(tmp_path, clock=clock) is None


def write_owner_elsewhere(run_dir: Path, *, seen_at: float) -> None:
    """Leave what a driver on another computer wrote, whose lock does not show here."""
    path = run_dir / "owner.lock"
    path.write_text(json.dumps({"pid": 7, "host": "other-computer", "token": "x"}))
    os.utime(path, (seen_at, seen_at))


def test_a_driver_elsewhere_is_believed_while_it_is_fresh(tmp_path: Path) -> None:
    """A state directory that computers share: refused with the name, until it is proven dead."""
    clock = FakeClock()
    write_owner_elsewhere(tmp_path, seen_at=clock.time() - STALE_S + 1)
    with pytest.raises(PreflightError, match="on other-computer"), lock(tmp_path, clock):
        pass
    found = owner_of(tmp_path, clock=clock)
    assert found is not None
    assert not found.is_here
    clock.advance(2.0)
    assert owner_of(tmp_path, clock=clock) is None
    with lock(tmp_path, clock):
        assert owner_of(tmp_path, clock=clock) is not None


def test_a_driver_without_a_name_yet_is_a_driver(tmp_path: Path) -> None:
    """Between taking the lock and writing its name nobody may take a driver for dead."""
    with lock(tmp_path, FakeClock()):
        (tmp_path / "owner.lock").write_text("")
        found = owner_of(tmp_path, clock=FakeClock())
        assert found is not None
        assert found.pid == 0
