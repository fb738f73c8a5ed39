"""Read, decide, commit - and again if somebody else was quicker."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.refit.errors import ControlUnavailableError
from paceline.store.protocol import ABSENT, ConflictError, Record, Store

T = TypeVar("T")

TRIES_MAX = 32
"""Each failed try means that another writer's commit went through, so this is never near."""


class Transaction:
    """One try: what was read is what the commit will insist on, what was put is what it writes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._expect: dict[str, int] = {}
        self._values: dict[str, bytes | None] = {}
        self._writes: dict[str, bytes | None] = {}
        self.now_ms = store.now_ms()
        """The store's clock when this try began."""

    def get(self, key: str) -> bytes | None:
        """Return the value under ``key`` as this try saw it first; the decision rests on it."""
        if key not in self._expect:
            record = self._store.get(key)
            self._expect[key] = ABSENT if record is None else record.revision
            self._values[key] = None if record is None else record.value
        return self._values[key]

    def list(self, prefix: str) -> Sequence[Record]:
        """Return the records under ``prefix``; the decision rests on each of them.

        Not on there being no more: whoever must exclude newcomers first reads a record that
        every newcomer has to find unchanged.
        """
        records = self._store.list(prefix)
        for record in records:
            self._expect.setdefault(record.key, record.revision)
            self._values.setdefault(record.key, record.value)
        return records

    def put(self, key: str, value: bytes) -> None:
        """Write ``value`` at the commit, over what was read under ``key`` or is there now."""
        self.get(key)
        self._writes[key] = value

    def delete(self, key: str) -> None:
        """Remove ``key`` at the commit, on the same terms."""
        self.get(key)
        self._writes[key] = None

    def commit(self) -> None:
        """Do all of it or nothing. Raises ConflictError, StoreError."""
        if self._writes:
            self._store.commit(expect=self._expect, writes=self._writes)


def transact(store: Store, decide: Callable[[Transaction], T]) -> T:
    """Run ``decide`` on a fresh transaction until its commit goes through.

    ``decide`` may run several times and must have no effect but on its transaction. What it
    raises passes through and nothing is written.

    Raises:
        ControlUnavailableError: TRIES_MAX commits in a row met another writer.
    """
    for _ in range(TRIES_MAX):
        transaction = Transaction(store)
        result = decide(transaction)
        try:
            transaction.commit()
        except ConflictError:
            continue
        return result
    raise ControlUnavailableError(
        f"the control service's store is too busy: {TRIES_MAX} writes met other writers; try again"
    )
