"""Reading and moving single records inside a transaction; shared by ledger, history and reaper."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.refit import lifecycle
from paceline.refit.control import records, rules
from paceline.refit.control.records import ModelHead, VersionRecord, VersionsHead
from paceline.refit.control.transaction import Transaction
from paceline.refit.model import Lease, VersionState, WeightVersion, WorkerRegistration


def read_worker(tx: Transaction, worker_id: str) -> WorkerRegistration | None:
    """Return a registration, expired or not."""
    value = tx.get(records.worker_key(worker_id))
    return None if value is None else records.decode_worker(value)


def read_version(tx: Transaction, uid: str) -> VersionRecord | None:
    """Return a version's record."""
    value = tx.get(records.version_key(uid))
    return None if value is None else records.decode_version(value)


def require_version(tx: Transaction, uid: str) -> VersionRecord:
    """Return a version's record. Raises NotFoundError."""
    record = read_version(tx, uid)
    if record is None:
        raise rules.not_found("version", uid)
    return record


def read_versions_head(tx: Transaction) -> VersionsHead:
    """Return the counts over all versions."""
    value = tx.get(records.VERSIONS_HEAD)
    return VersionsHead() if value is None else records.decode_versions_head(value)


REMOVALS_LISTED = 256
"""Whoever missed more removals than these gets everything again."""


def read_model_head(tx: Transaction, model_name: str) -> ModelHead:
    """Return the count of changes to a model's versions, and its latest removals."""
    value = tx.get(records.model_head_key(model_name))
    return ModelHead() if value is None else records.decode_model_head(value)


def put_version(tx: Transaction, record: VersionRecord) -> None:
    """Write a version's record as news to its readers; at most once per transaction and model."""
    version = record.version
    head = read_model_head(tx, version.model_name)
    head = replace(head, changes=head.changes + 1)
    tx.put(records.model_head_key(version.model_name), records.encode(head))
    tx.put(records.version_key(version.uid), records.encode(replace(record, changed=head.changes)))


def drop_version(tx: Transaction, version: WeightVersion) -> None:
    """Remove a version's record as news to its readers."""
    head = read_model_head(tx, version.model_name)
    changes = head.changes + 1
    removed = (*head.removed, (changes, version.uid))
    dropped, removed = removed[:-REMOVALS_LISTED], removed[-REMOVALS_LISTED:]
    forgotten = dropped[-1][0] if dropped else head.forgotten
    head = ModelHead(changes=changes, removed=removed, forgotten=forgotten)
    tx.put(records.model_head_key(version.model_name), records.encode(head))
    tx.delete(records.version_key(version.uid))


def is_draining(tx: Transaction, worker_id: str) -> bool:
    """Return whether a worker is to begin nothing new."""
    return tx.get(records.drain_key(worker_id)) is not None


def put_state(tx: Transaction, record: VersionRecord, state: VersionState) -> WeightVersion:
    """Write the version in ``state``; nothing if it is there already. Raises PreconditionError."""
    version = record.version
    if lifecycle.move(version.uid, version.state, state) is version.state:
        return version
    version = replace(version, state=state)
    releasing_at = tx.now_ms if state is VersionState.RELEASING else None
    record = replace(record, version=version, releasing_at_unix_ms=releasing_at)
    put_version(tx, record)
    return version


def read_live_lease(tx: Transaction, key: str) -> Lease | None:
    """Return the lease under ``key`` unless it has expired."""
    value = tx.get(key)
    lease = None if value is None else records.decode_lease(value)
    return lease if lease is not None and lease.expires_at_unix_ms > tx.now_ms else None


def purge_leases(tx: Transaction, version_id: str) -> tuple[Sequence[Lease], int]:
    """Remove the expired leases of a version; return the live ones and how many went.

    Removing is what makes it safe: a renewal that is under way insists on the lease it read.
    """
    found = tx.list(records.leases_prefix(version_id))
    live = []
    for record in found:
        lease = records.decode_lease(record.value)
        if lease.expires_at_unix_ms > tx.now_ms:
            live.append(lease)
        else:
            tx.delete(record.key)
    return live, len(found) - len(live)
