"""The reference store: a dict behind a lock, gone with the process."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

from paceline.core.clock import Clock
from paceline.store.protocol import ABSENT, ConflictError, Record, StoreError


class MemoryStore:
    """Records in memory, with the same answers as every other store."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._records: dict[str, Record] = {}
        self._last_revision = 0
        self._closed = False
        self._undo: dict[str, Record | None] | None = None
        """Inside a group: what was there before it."""

    def now_ms(self) -> int:
        """Return Unix milliseconds of the clock that was handed in."""
        return int(self._clock.time() * 1000)

    def get(self, key: str) -> Record | None:
        """Return the record, or None."""
        with self._lock:
            self._refuse_closed()
            return self._records.get(key)

    def list(self, prefix: str) -> Sequence[Record]:
        """Return all records under ``prefix``, sorted by key, as one snapshot."""
        with self._lock:
            self._refuse_closed()
            return [self._records[key] for key in sorted(self._records) if key.startswith(prefix)]

    def commit(self, *, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        """Write everything or nothing."""
        with self._lock:
            self._refuse_closed()
            for key, revision in expect.items():
                found = self._records.get(key)
                _refuse_moved(key, expected=revision, found=found.revision if found else ABSENT)
            # One counter for all keys: a key that was deleted can never get an old revision back.
            self._last_revision += 1
            for key, value in writes.items():
                if self._undo is not None:
                    self._undo.setdefault(key, self._records.get(key))
                self._put(
                    key,
                    None
                    if value is None
                    else Record(key=key, value=bytes(value), revision=self._last_revision),
                )

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Let commits inside take effect together, or not at all if the body raises."""
        with self._lock:
            self._undo = {}
            try:
                yield
            except BaseException:
                for key, record in self._undo.items():
                    self._put(key, record)
                raise
            finally:
                self._undo = None

    def close(self) -> None:
        """Refuse further use; idempotent."""
        with self._lock:
            self._closed = True

    def _put(self, key: str, record: Record | None) -> None:
        if record is None:
            self._records.pop(key, None)
        else:
            self._records[key] = record

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreError("the store is closed; open it again before using it")


def _refuse_moved(key: str, *, expected: int, found: int) -> None:
    """Raise ConflictError unless ``key`` is still at the expected revision."""
    if expected != found:
        raise ConflictError(f"{key}: expected revision {expected}, found {found}; read it again")
