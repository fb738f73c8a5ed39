"""Where fetched bytes wait until all of them are proven: memory, or a file without a name.

A large payload in anonymous memory would double what an engine needs. A file that was unlinked
before its first byte is never seen by anybody, and goes with the process.
"""

import errno
import mmap
import os
import tempfile
import weakref
from pathlib import Path

from paceline.refit.errors import NoRoomError


class Spooled:
    """One whole object on its way in; its memory or file goes with the last reference."""

    def __init__(self, view: memoryview, *, fd: int | None = None) -> None:
        self.view = view
        """All of it, writable."""
        self._fd = fd
        if fd is not None:
            weakref.finalize(self, os.close, fd)

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
    """Gives out buffers for whole objects."""

    def __init__(self, *, memory_bytes_max: int, directory: Path | None = None) -> None:
        """Set up without I/O.

        Args:
            memory_bytes_max: larger buffers are files.
            directory: where those are; None is the system's place for temporary files.
        """
        self._memory_bytes_max = memory_bytes_max
        self._directory = directory

    def open(self, num_bytes: int) -> Spooled:
        """Return a buffer of so many bytes. Raises NoRoomError: there is no room for it."""
        if num_bytes <= self._memory_bytes_max:
            return Spooled(memoryview(bytearray(num_bytes)))
        where = self._directory or Path(tempfile.gettempdir())
        try:
            with tempfile.TemporaryFile(dir=where) as file:
                # Room is taken now: a write to mapped memory that finds none would kill us.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                view = memoryview(mmap.mmap(file.fileno(), num_bytes))
                return Spooled(view, fd=os.dup(file.fileno()))
        except OSError as exc:
            full = exc.errno in {errno.ENOSPC, errno.EDQUOT}
            why = "is full" if full else f"cannot be used ({exc.strerror})"
            raise NoRoomError(
                f"{where} {why}: {num_bytes} bytes of weights must wait there until they are "
                "proven; make room, or point TMPDIR elsewhere"
            ) from exc
