"""Which generators have which bytes: told by themselves, believed by nobody without a hash.

A replica counts while its worker is registered. What is said here only decides whom a reader
asks; every byte is proven by the reader.
"""

from collections.abc import Sequence
from dataclasses import replace

from paceline.refit.control import records, rules
from paceline.refit.control.lookup import read_worker, require_version
from paceline.refit.control.rules import Limits
from paceline.refit.control.transaction import Transaction
from paceline.refit.errors import ExhaustedError, InvalidRequestError, PreconditionError
from paceline.refit.model import Replica, VersionState, WorkerRole


def announce(tx: Transaction, replica: Replica, *, limits: Limits) -> Sequence[Replica]:
    """Write a replica over the one before and return all of its version's.

    Raises:
        NotFoundError, PreconditionError: no such version, not READY, not a living generator.
        InvalidRequestError: it has no such slot.
        ExhaustedError: too many generators have it already.
    """
    version = require_version(tx, replica.version_id).version
    rules.check_worker(
        read_worker(tx, replica.worker_id),
        worker_id=replica.worker_id,
        now_ms=tx.now_ms,
        model_name=version.model_name,
        role=WorkerRole.GENERATOR,
    )
    if version.state is not VersionState.READY:
        raise PreconditionError(f"version {version.uid!r} is {version.state} and is not served on")
    if replica.source_slot_id not in version.expected_source_slots:
        raise InvalidRequestError(f"version {version.uid!r} has no slot {replica.source_slot_id!r}")
    told = replace(replica, updated_at_unix_ms=tx.now_ms)
    others = [each for each in list_living(tx, replica.version_id) if _order(each) != _order(told)]
    if len(others) >= limits.replicas_max:
        raise ExhaustedError(f"{len(others)} generators have version {version.uid!r} already")
    key = records.replica_key(told.version_id, told.source_slot_id, told.worker_id)
    tx.put(key, records.encode_replica(told))
    return sorted([*others, told], key=_order)


def list_living(tx: Transaction, version_id: str) -> Sequence[Replica]:
    """Return the replicas of living generators by (slot, worker); others are of no use."""
    found = [records.decode_replica(r.value) for r in tx.list(records.replicas_prefix(version_id))]
    alive = {
        worker: rules.is_alive(read_worker(tx, worker), tx.now_ms)
        for worker in {each.worker_id for each in found}
    }
    return sorted((each for each in found if alive[each.worker_id]), key=_order)


def withdraw(tx: Transaction, *, version_id: str, source_slot_id: str, worker_id: str) -> bool:
    """Forget a replica; False if there was none."""
    key = records.replica_key(version_id, source_slot_id, worker_id)
    if tx.get(key) is None:
        return False
    tx.delete(key)
    return True


def forget_dead(tx: Transaction, version_id: str) -> None:
    """Forget the replicas of workers whose registration has gone."""
    for record in tx.list(records.replicas_prefix(version_id)):
        worker = read_worker(tx, records.decode_replica(record.value).worker_id)
        if not rules.is_alive(worker, tx.now_ms):
            tx.delete(record.key)


def forget_all(tx: Transaction, version_id: str) -> None:
    """Forget every replica of a version that is gone."""
    for record in tx.list(records.replicas_prefix(version_id)):
        tx.delete(record.key)


def _order(replica: Replica) -> tuple[str, str]:
    return replica.source_slot_id, replica.worker_id
