"""Bytes that are readable now, and who is inside them: shared by every transport that serves.

Withdrawing waits for readers, so that a buffer is never reused under one; a reader that does
not get on is cut off, so that the wait has an end.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from paceline.refit.errors import PublishError, StagingError
from paceline.refit.model import WeightVersionShardManifest


class HeldObject:
    """One immutable byte string in several pieces of memory."""

    def __init__(self, object_id: str, parts: Sequence[memoryview]) -> None:
        self.object_id = object_id
        self._parts = [part.cast("B") for part in parts if part.nbytes]
        self._stops = list(accumulate(len(part) for part in self._parts))

    @property
    def num_bytes(self) -> int:
        """Length of the whole."""
        return self._stops[-1] if self._stops else 0

    def pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yield the bytes of a range that lies inside, without copying."""
        index = bisect_right(self._stops, offset)
        while size > 0:
            part = self._parts[index]
            start = len(part) - (self._stops[index] - offset)
            piece = part[start : start + size]
            yield piece
            offset += len(piece)
            size -= len(piece)
            index += 1


class _Entry:
    def __init__(self, held: HeldObject) -> None:
        self.held = held
        self.cancels: dict[object, Callable[[], None]] = {}
        """How to cut each reader that is inside."""
        self.before: list[_Entry] = []
        """The same bytes in other memory, where readers may still be inside."""

    def inside(self) -> list[Callable[[], None]]:
        """Return how to cut each reader, of the memory before too."""
        return [cut for entry in (self, *self.before) for cut in entry.cancels.values()]


class ObjectShelf:
    """Objects by id; safe from several threads."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._inside = 0
        self._changed = threading.Condition()

    def put(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Make an object readable; a second put of the same id changes nothing."""
        with self._changed:
            if object_id not in self._entries:
                self._entries[object_id] = _Entry(HeldObject(object_id, parts))

    @contextmanager
    def reading(
        self, object_id: str, *, cancel: Callable[[], None] = lambda: None
    ) -> Iterator[HeldObject | None]:
        """Hold an object while inside; None if there is no such object.

        Args:
            object_id: which.
            cancel: makes this reader fail soon; called if it stands in the way of a withdrawal.
        """
        reader = object()
        with self._changed:
            entry = self._entries.get(object_id)
            if entry is not None:
                entry.cancels[reader] = cancel
                self._inside += 1
        if entry is None:
            yield None
            return
        try:
            yield entry.held
        finally:
            with self._changed:
                del entry.cancels[reader]
                self._inside -= 1
                self._changed.notify_all()

    @property
    def num_readers(self) -> int:
        """How many readers are inside any object, also one that is being withdrawn.

        Asked many times in a fetch, of a shelf that may hold thousands of chunks: never counted.
        """
        return self._inside

    def withdraw(self, object_id: str, *, patience_s: float) -> None:
        """Take an object away and return when no reader is inside; idempotent.

        New readers are refused at once. Those inside get ``patience_s`` to finish, then they are
        cancelled and get as long again.

        Raises:
            StagingError: a reader is inside even then; the buffers must not be reused.
        """
        with self._changed:
            entry = self._entries.pop(object_id, None)
            if entry is None:
                return
        if not self._empties(entry, patience_s):
            with self._changed:
                self._entries.setdefault(object_id, entry)
            raise _stays(object_id, patience_s)

    def replace(self, object_id: str, parts: Sequence[memoryview], *, patience_s: float) -> None:
        """Serve the same bytes from other memory; return when no reader is inside the old one.

        Raises:
            StagingError: a reader is inside even after it was cut; ask again.
        """
        with self._changed:
            old = self._entries.get(object_id)
            if old is None:
                return
            new = self._entries[object_id] = _Entry(HeldObject(object_id, parts))
            new.before = [old, *old.before]
        moved = _Entry(old.held)
        moved.before = new.before
        if not self._empties(moved, patience_s):
            raise _stays(object_id, patience_s)
        with self._changed:
            new.before = []

    def _empties(self, entry: _Entry, patience_s: float) -> bool:
        """Wait until nobody is inside; half way through, those who are are cut."""
        with self._changed:
            if self._changed.wait_for(lambda: not entry.inside(), patience_s):
                return True
            cancels = entry.inside()
        for cancel in cancels:
            cancel()
        with self._changed:
            return self._changed.wait_for(lambda: not entry.inside(), patience_s)


def _stays(object_id: str, patience_s: float) -> StagingError:
    return StagingError(
        f"object {object_id[:12]}: a reader did not leave in {2 * patience_s:g} s; "
        "its buffers stay in use, withdraw it again later"
    )


class ManifestShelf:
    """Manifests by version and slot; safe from several threads."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], WeightVersionShardManifest] = {}
        self._lock = threading.Lock()

    def put(self, key: tuple[str, str], manifest: WeightVersionShardManifest) -> None:
        """Serve a manifest; the same one again is fine. Raises PublishError for another."""
        with self._lock:
            known = self._found.setdefault(key, manifest)
        if known.data != manifest.data:
            raise PublishError(
                f"version {key[0]} slot {key[1]} already serves manifest {known.digest[:12]}; "
                "a published version never changes, publish a new one"
            )

    def get(self, key: tuple[str, str]) -> WeightVersionShardManifest | None:
        """Return a manifest, or None."""
        with self._lock:
            return self._found.get(key)

    def remove(self, key: tuple[str, str]) -> None:
        """Stop serving it; idempotent."""
        with self._lock:
            self._found.pop(key, None)
