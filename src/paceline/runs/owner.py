"""Who drives a run: a lock on a file that the kernel gives back however its holder ends.

A recorded pid with a start time says the same less surely: pids are used again, and a start time
is read differently on every platform. A lock cannot outlive its holder, kill -9 or not.

The file also says who that is, and its time is kept fresh: where the state directory is shared by
computers whose file system keeps locks to itself, an owner elsewhere is believed as long as it is
fresh, and is proven dead when it is not.
"""

import fcntl
import json
import os
import platform
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.core.clock import Clock
from paceline.core.errors import PreflightError

LOCK_NAME = "owner.lock"
BEAT_S = 10.0
STALE_S = 60.0
_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who drives a run."""

    pid: int
    """0 while it is not known."""
    host: str
    token: str
    """Tells this driver from all others, whatever pids and hosts are called."""

    @property
    def is_here(self) -> bool:
        """Return whether it is a process of this computer."""
        return self.host == platform.node()

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.is_here else f" on {self.host}")


class OwnerLock:
    """Held from before a run is on record until after its end is; a context manager."""

    def __init__(self, run_dir: Path, *, clock: Clock, token: str) -> None:
        self._path = run_dir / LOCK_NAME
        self._clock = clock
        self._owner = Owner(pid=os.getpid(), host=platform.node(), token=token)
        self._fd: int | None = None
        self._left = threading.Event()
        self._beat = threading.Thread(target=self._keep_fresh, name="owner", daemon=True)

    def __enter__(self) -> Self:
        """Take it. Raises PreflightError when somebody drives this run already."""
        self._fd = self._take()
        self._beat.start()
        return self

    def _take(self) -> int:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise self._unusable(exc) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _refuse_fresh_elsewhere(fd, now_s=self._clock.time())
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(asdict(self._owner)).encode(), 0)
        except BlockingIOError as exc:
            owner = _read(fd)
            os.close(fd)
            raise self._taken(owner) from exc
        except OSError as exc:
            os.close(fd)
            raise self._unusable(exc) from exc
        return fd

    def _taken(self, owner: Owner | None) -> PreflightError:
        who = "another paceline" if owner is None else f"another paceline, {owner}"
        wait = f", which is believed for {STALE_S:g} s" if owner and not owner.is_here else ""
        return PreflightError(
            f"run {self._path.parent.name} is driven by {who} already{wait}; look with paceline "
            "status, end it with paceline down, or start another under another --run-id"
        )

    def _unusable(self, exc: OSError) -> PreflightError:
        return PreflightError(
            f"cannot write {self._path}: {exc.strerror}; free the disk, mend the permissions or "
            "point PACELINE_STATE_DIR elsewhere"
        )

    def _keep_fresh(self) -> None:
        while self._fd is not None and not self._left.wait(BEAT_S):
            try:
                os.utime(self._path)
            except FileNotFoundError:
                return  # somebody removed the run's directory

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give it back, and leave no owner's name behind."""
        self._left.set()
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None


def owner_of(run_dir: Path, *, clock: Clock) -> Owner | None:
    """Return who drives a run now, None when nobody does."""
    try:
        fd = os.open(run_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        # Whoever has just taken it, or is giving it back, has no name there.
        return _read(fd) or Owner(pid=0, host=platform.node(), token="")
    else:
        return _fresh_elsewhere(fd, now_s=clock.time())
    finally:
        os.close(fd)


def _read(fd: int) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(fd, _BYTES_MAX, 0)))
    except (ValueError, TypeError):  # being written, or given back in this moment
        return None


def _fresh_elsewhere(fd: int, *, now_s: float) -> Owner | None:
    """Return the owner on another computer whose lock this file system does not show."""
    owner = _read(fd)
    if owner is None or owner.is_here:
        return None
    return owner if now_s - os.fstat(fd).st_mtime < STALE_S else None


def _refuse_fresh_elsewhere(fd: int, *, now_s: float) -> None:
    if _fresh_elsewhere(fd, now_s=now_s) is not None:
        raise BlockingIOError
