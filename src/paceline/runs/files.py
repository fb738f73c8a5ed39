"""Local files of a run: logs are read from their end, reports are written whole."""

import os
from pathlib import Path

from paceline.core.errors import PreflightError

TAIL_LINES = 20
TAIL_BYTES = 16 * 1024


def tail_of(log: Path, *, count: int = TAIL_LINES) -> list[str]:
    """Return the last ``count`` lines of a log; none when there is no such file."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES)
    except FileNotFoundError:
        return []
    return text.decode("utf-8", "replace").splitlines()[-count:]


def make_private(folder: Path) -> Path:
    """Make a folder that nobody else may enter, and return it; raises PreflightError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise PreflightError(
            f"cannot make {folder}: {exc.strerror}; free the disk or point PACELINE_STATE_DIR "
            "elsewhere"
        ) from exc
    return folder


def scratch_of(path: Path) -> Path:
    """Return where a file's next content is written before it takes the file's name."""
    return path.with_name(path.name + ".new")


def write_private(path: Path, text: str) -> None:
    """Write a whole file that nobody else can ever read. Raises PreflightError."""
    scratch = scratch_of(path)
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        scratch.replace(path)
    except OSError as exc:
        raise PreflightError(
            f"cannot write {path}: {exc.strerror}; free the disk or point PACELINE_STATE_DIR "
            "elsewhere"
        ) from exc


def write_atomic(path: Path, text: str) -> None:
    """Write a whole file or leave the old one. Raises PreflightError when it cannot be written."""
    scratch = scratch_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as exc:
        raise PreflightError(
            f"cannot write {path}: {exc.strerror}; free space or choose another --out"
        ) from exc
