"""Folders for secrets are ours alone, or an error that says what to do."""

from pathlib import Path

import pytest

from paceline.core.errors import PreflightError
from paceline.runs.files import make_private


def test_a_private_folder_is_made_once_and_closed_to_others(tmp_path: Path) -> None:
    """Making it again is fine."""
    folder = make_private(make_private(tmp_path / "control"))
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """The place is in the error, with what to do."""
    with pytest.raises(PreflightError, match=r"missing/control.*PACELINE_STATE_DIR"):
        make_private(tmp_path / "missing" / "control")
