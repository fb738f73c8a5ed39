"""Who drives a run: a lock on a file that the kernel gives back however its holder ends.

A recorded pid with a start time says the same less surely: pids are used again, and a start time
is read differently on every platform. A lock cannot outlive its holder, kill -9 or not.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.core.errors import PreflightError

LOCK_NAME = "owner.lock"


class OwnerLock:
    """Held from before a run is on record until after its end is; a context manager."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK_NAME
        self._fd: int | None = None

    def __enter__(self) -> Self:
        """Take it. Raises PreflightError when somebody drives this run already."""
        self._fd = self._take()
        return self

    def _take(self) -> int:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise self._unusable(exc) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.write(fd, str(os.getpid()).encode())
        except BlockingIOError as exc:
            os.close(fd)
            raise PreflightError(
                f"run {self._path.parent.name} is driven by another paceline already; "
                "leave --run-id away, or end the other one with paceline down"
            ) from exc
        except OSError as exc:
            os.close(fd)
            raise self._unusable(exc) from exc
        return fd

    def _unusable(self, exc: OSError) -> PreflightError:
        return PreflightError(
            f"cannot write {self._path}: {exc.strerror}; free the disk, mend the permissions or "
            "point PACELINE_STATE_DIR elsewhere"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give it back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def owner_pid(run_dir: Path) -> int | None:
    """Return the process that drives a run now, None when nobody does."""
    try:
        fd = os.open(run_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(fd, 32)
        return int(text) if text.isdigit() else None
    else:
        return None
    finally:
        os.close(fd)
