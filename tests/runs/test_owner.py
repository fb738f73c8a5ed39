"""The lock that says who drives a run, where it cannot be taken."""

from pathlib import Path

import pytest

from paceline.core.errors import PreflightError
from paceline.runs.owner import OwnerLock, owner_pid


def test_a_lock_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    """What stands in the way is named with what to do, and nobody drives the run."""
    (tmp_path / "runs").write_text("a file")
    with (
        pytest.raises(PreflightError, match="PACELINE_STATE_DIR elsewhere"),
        OwnerLock(tmp_path / "runs" / "one"),
    ):
        pass


def test_a_run_has_one_driver(tmp_path: Path) -> None:
    """Whoever comes second is told, and the first one keeps it."""
    with OwnerLock(tmp_path):
        with pytest.raises(PreflightError, match="driven by another"), OwnerLock(tmp_path):
            pass
        assert owner_pid(tmp_path) is not None
    assert owner_pid(tmp_path) is None
