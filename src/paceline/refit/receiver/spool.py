"""Where fetched bytes wait until all of them are proven: memory, or a file without a name.

A large payload in anonymous memory would double what an engine needs. A file that was unlinked
before its first byte is never seen by anybody, and goes with the process.
"""

import errno
import mmap
import os
import tempfile
from pathlib import Path

from paceline.refit.errors import FetchError


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

    def open(self, num_bytes: int) -> memoryview:
        """Return a writable buffer; it goes away with the last reference to it.

        Raises:
            FetchError: there is no room for it.
        """
        if num_bytes <= self._memory_bytes_max:
            return memoryview(bytearray(num_bytes))
        where = self._directory or Path(tempfile.gettempdir())
        try:
            with tempfile.TemporaryFile(dir=where) as file:
                # Room is taken now: a write to mapped memory that finds none would kill us.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return memoryview(mmap.mmap(file.fileno(), num_bytes))
        except OSError as exc:
            full = exc.errno in {errno.ENOSPC, errno.EDQUOT}
            why = "is full" if full else f"cannot be used ({exc.strerror})"
            raise FetchError(
                f"{where} {why}: {num_bytes} bytes of weights must wait there until they are "
                "proven; make room, or point TMPDIR elsewhere"
            ) from exc
