"""Small files that are there, whole, after a crash or a power loss."""

import os
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``: readers and crashes see the old file or the new one.

    Raises OSError, and then nothing has changed.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with draft.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable: what was created, renamed or removed there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
