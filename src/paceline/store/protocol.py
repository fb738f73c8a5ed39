"""Records of both halves: get, list, and one optimistic commit over several keys.

A caller reads what it needs, decides without I/O, and commits all its writes at once,
naming the revisions that its decision rests on. If any of them moved meanwhile the commit
changes nothing and raises ConflictError: read again, decide again. That is enough for every
rule in the control plane and the run ledger, and each implementation stays small.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from paceline.core.errors import PacelineError, PreflightError


class StoreError(PreflightError):
    """The store cannot be used: disk full, locked, unreachable, damaged. Nothing was changed."""


class ConflictError(PacelineError):
    """A record moved between reading and committing; nothing was changed. Read and decide again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One value under one key."""

    key: str
    value: bytes
    revision: int
    """Positive; changes with every write of this key and is never used again for it."""


ABSENT = 0
"""As an expected revision: the key must not exist."""


class Store(Protocol):
    """A small ordered map with optimistic multi-key commits; safe to use from several threads."""

    def now_ms(self) -> int:
        """Return the store's own clock, Unix milliseconds: it alone decides expiry."""
        ...

    def get(self, key: str) -> Record | None:
        """Return the record, or None. Raises StoreError."""
        ...

    def list(self, prefix: str) -> Sequence[Record]:
        """Return all records whose key starts with ``prefix``, sorted by key, as one snapshot."""
        ...

    def commit(self, *, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        """Write everything or nothing; None deletes (deleting an absent key is fine).

        Args:
            expect: key -> revision it must still have; ABSENT means it must not exist. Keys
                that are only read may be named too.
            writes: key -> new value.

        Durable when it returns. Raises ConflictError if an expectation fails, StoreError if
        the store cannot be written; in both cases nothing has changed.
        """
        ...

    def close(self) -> None:
        """Give back files and connections; idempotent."""
        ...


@runtime_checkable
class SupportsGroups(Protocol):
    """A store to which many commits at once cost little more than one."""

    def group(self) -> AbstractContextManager[None]:
        """Make the commits inside durable together, when it is left.

        Calls of other threads wait. Inside, every commit is seen by what comes after it; none
        may be told to anybody before the group is left. Groups do not nest. If leaving raises
        StoreError or ConflictError, or the body raises, nothing inside took effect.
        """
        ...


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A store that is far enough away to be asked for many records at once."""

    def prefetch(self, keys: Sequence[str]) -> None:
        """Read these for the group that is open; ``get`` then has them. Raises StoreError."""
        ...
