"""Where fetched bytes wait until all of them are proven: memory, or a file without a name.

A large payload in anonymous memory would double what an engine needs. A file that was unlinked
before its first byte is never seen by anybody, and goes with the process. It is kept for the next
payload: pages that are there are overwritten several times faster than new ones are made.
"""

import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.core.clock import Clock
from paceline.refit.errors import NoRoomError

SPARE_MAX = 4
"""A file so many times larger than a payload is left for those that need it, or goes in time."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Spooled:
    """One whole object on its way in; its memory or file is its own until the last reference."""

    def __init__(self, view: memoryview, *, fd: int | None = None) -> None:
        """Take writable memory; with ``fd`` it is that file's, which stays open as long."""
        self.view = view
        """All of it, writable."""
        self._fd = fd

    def write(self, offset: int, data: memoryview) -> None:
        """Put proven bytes in their place.

        A file is written to, not stored into: a page at a time is what mapped memory takes.

        Raises:
            NoRoomError: the disk did not take them.
        """
        if self._fd is None:
            self.view[offset : offset + data.nbytes] = data
            return
        while data.nbytes:
            try:
                done = os.pwrite(self._fd, data, offset)
            except OSError as exc:
                raise NoRoomError(f"fetched weights cannot be kept: {exc.strerror}") from exc
            data, offset = data[done:], offset + done


class Spool:
    """Gives out buffers for whole objects; safe from several threads."""

    def __init__(
        self,
        *,
        memory_bytes_max: int,
        clock: Clock,
        directory: Path | None = None,
        keep_s: float = 0.0,
    ) -> None:
        """Set up without I/O.

        Args:
            memory_bytes_max: larger buffers are files.
            clock: for how long files are idle.
            directory: where those are; None is the system's place for temporary files.
            keep_s: how long one may wait for its next payload; 0: it goes with its payload.
        """
        self._memory_bytes_max = memory_bytes_max
        self._clock = clock
        self._directory = directory
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._idle: list[tuple[_File, float]] = []
        """Files that nobody has a view of, and since when."""
        self._returned: deque[_File] = deque()
        """Not counted as idle yet: whoever drops a last view must wait for no lock."""

    def open(self, num_bytes: int) -> Spooled:
        """Return a buffer of so many bytes, of any content.

        Raises:
            NoRoomError: there is no room for it.
        """
        if num_bytes <= self._memory_bytes_max:
            return Spooled(memoryview(bytearray(num_bytes)))
        where = self._directory or Path(tempfile.gettempdir())
        try:
            file = self._take(where, num_bytes)
        except OSError as exc:
            why = "is full" if exc.errno in _FULL else f"cannot be used ({exc.strerror})"
            raise NoRoomError(
                f"{where} {why}: {num_bytes} bytes of weights must wait there until they are "
                "proven; make room, or point TMPDIR elsewhere"
            ) from exc
        assert file.mapping is not None  # noqa: S101 - it is as long as the file is
        lent = np.frombuffer(file.mapping, dtype=np.uint8, count=num_bytes)
        # Every view of it holds ``lent``.
        weakref.finalize(lent, _give_back, weakref.ref(self), file).atexit = False
        return Spooled(lent.data, fd=file.fd)

    def take_back(self, file: "_File") -> None:
        """Keep a file that nobody has a view of any more; takes no lock."""
        if self._keep_s > 0:
            self._returned.append(file)

    def trim(self) -> None:
        """Let files go that were idle for too long; cheap, to be called now and then."""
        now_s = self._clock.monotonic()
        with self._lock:
            while self._returned:
                self._idle.append((self._returned.popleft(), now_s))
            self._idle = [each for each in self._idle if now_s - each[1] < self._keep_s]

    def _take(self, where: Path, num_bytes: int) -> "_File":
        """Return a file that nobody uses; what others are kept for must not stand in its way."""
        self.trim()
        with self._lock:
            kept = _best_of([file for file, _ in self._idle], num_bytes)
            self._idle = [each for each in self._idle if each[0] is not kept]
        try:
            return _fitted(kept, where, num_bytes)
        except OSError as exc:
            if exc.errno not in _FULL:
                raise
        with self._lock:
            self._idle.clear()
        return _fitted(kept, where, num_bytes)


class _File:
    """A file without a name, all of it mapped; it goes with the last reference."""

    def __init__(self, where: Path, num_bytes: int) -> None:
        self.fd = -1
        self.mapping: mmap.mmap | None = None
        with tempfile.TemporaryFile(dir=where) as file:
            # Room is taken now: a write to mapped memory that finds none would kill us.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            self.fd = os.dup(file.fileno())
        self._map(num_bytes)

    def __del__(self) -> None:
        """Unmap, then close: the last of them frees all pages, and closing lets others run."""
        self.mapping = None
        if self.fd >= 0:
            os.close(self.fd)

    def grow(self, num_bytes: int) -> None:
        """Take room for so many bytes, unless it has that. Raises OSError."""
        if num_bytes > self.num_bytes:
            os.posix_fallocate(self.fd, 0, num_bytes)
            self._map(num_bytes)

    def _map(self, num_bytes: int) -> None:
        self.mapping = mmap.mmap(self.fd, num_bytes)
        self.num_bytes = num_bytes


def _fitted(kept: _File | None, where: Path, num_bytes: int) -> _File:
    """Return a file of that size, the kept one if there is one. Raises OSError."""
    if kept is None:
        return _File(where, num_bytes)
    kept.grow(num_bytes)
    return kept


def _best_of(files: Sequence[_File], num_bytes: int) -> _File | None:
    """Return the smallest file that is large enough, else the largest one, to be grown."""
    near = [each for each in files if each.num_bytes <= SPARE_MAX * num_bytes]
    enough = [each for each in near if each.num_bytes >= num_bytes]
    if enough:
        return min(enough, key=lambda each: each.num_bytes)
    return max(near, key=lambda each: each.num_bytes, default=None)


def _give_back(spool: "weakref.ref[Spool]", file: _File) -> None:
    """Leave a file to the next payload; it has been held until now for this one."""
    found = spool()
    if found is not None:
        found.take_back(file)
