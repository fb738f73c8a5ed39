"""A model's versions, read again only when its count of changes has moved."""

import threading
from collections.abc import Sequence

from paceline.refit.control import records
from paceline.refit.control.lookup import read_model_head
from paceline.refit.control.records import VersionRecord
from paceline.refit.control.transaction import Transaction
from paceline.refit.model import VersionChanges, WeightVersion
from paceline.store.protocol import Store

MODELS_CACHED = 64


class Catalog:
    """Lists versions; remembers what it decoded. Safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._lists: dict[str, tuple[int, tuple[VersionRecord, ...]]] = {}
        self._decoded: dict[str, tuple[int, VersionRecord]] = {}

    def records_of(self, model_name: str) -> Sequence[VersionRecord]:
        """Return all records of a model in the order of creation."""
        return self._read(model_name, Transaction(self._store))[1]

    def changes(self, model_name: str, *, run_id: str | None, after: int) -> VersionChanges:
        """Return what a reader that knows everything up to ``after`` does not know yet.

        A change that happens meanwhile may be in this answer and in the next one.
        """
        tx = Transaction(self._store)
        head = read_model_head(tx, model_name)
        if after == head.changes:
            return VersionChanges(revision=after)
        # A reader of the future has seen a store that is not there any more.
        is_reset = after < max(head.forgotten, 1) or after > head.changes
        since = 0 if is_reset else after
        found = self._read(model_name, tx)[1]
        return VersionChanges(
            revision=head.changes,
            versions=tuple(
                r.version
                for r in found
                if (is_reset or r.changed > since) and is_of_run(r.version, run_id)
            ),
            removed=() if is_reset else tuple(u for at, u in head.removed if at > since),
            reset=is_reset,
        )

    def forget(self) -> None:
        """Read everything again: what was seen last may not have been written after all."""
        with self._lock:
            self._lists.clear()
            self._decoded.clear()

    def _read(self, model_name: str, tx: Transaction) -> tuple[int, tuple[VersionRecord, ...]]:
        # The count first: what is listed after it is at least as new.
        changes = read_model_head(tx, model_name).changes
        with self._lock:
            cached = self._lists.get(model_name)
        if cached is not None and cached[0] == changes and changes:
            return cached
        read = changes, self._list(model_name)
        with self._lock:
            if len(self._lists) >= MODELS_CACHED:
                self._lists.clear()
            self._lists[model_name] = read
        return read

    def _list(self, model_name: str) -> tuple[VersionRecord, ...]:
        with self._lock:
            before = self._decoded
        decoded = {}
        for record in self._store.list(records.VERSIONS):
            known = before.get(record.key)
            if known is None or known[0] != record.revision:
                known = record.revision, records.decode_version(record.value)
            decoded[record.key] = known
        with self._lock:
            self._decoded = decoded
        ordered = sorted((r for _, r in decoded.values()), key=lambda r: r.ordinal)
        return tuple(r for r in ordered if r.version.model_name == model_name)


def is_of_run(version: WeightVersion, run_id: str | None) -> bool:
    """Return whether a version was described as that run's; None is any."""
    described = version.description
    return run_id is None or (described is not None and described.run_id == run_id)
