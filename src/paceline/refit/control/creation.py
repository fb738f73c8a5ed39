"""What makes a version and completes it: creating it, and advertising its shards."""

from collections.abc import Callable
from dataclasses import replace

from paceline.refit.control import records, rules
from paceline.refit.control.lookup import (
    is_draining,
    put_state,
    put_version,
    read_versions_head,
    read_worker,
    require_version,
)
from paceline.refit.control.records import VersionRecord, VersionsHead
from paceline.refit.control.rules import Limits
from paceline.refit.control.transaction import Transaction
from paceline.refit.errors import AlreadyExistsError, ExhaustedError
from paceline.refit.model import (
    Shard,
    VersionRequest,
    VersionState,
    WeightVersion,
    WorkerRole,
)

UID_TRIES_MAX = 5


def create_version(
    tx: Transaction, request: VersionRequest, *, limits: Limits, nonce: Callable[[], str]
) -> WeightVersion:
    """Create a version, or return what an equal request created, whatever became of it."""
    key = records.idempotency_key(request.model_name, request.idempotency_key)
    made = tx.get(key)
    # Before the base is looked at: a create whose reply was lost must find its version
    # even if the base has been retired since.
    if made is not None:
        existing = require_version(tx, records.decode_text(made)).version
        rules.check_same_request(existing, request)
        return existing
    if request.base_version_id is not None:
        base = require_version(tx, request.base_version_id).version
        rules.check_base(base, model_name=request.model_name)
    head = read_versions_head(tx)
    rules.check_room(head.kept, limits)
    version = WeightVersion(
        uid=_free_uid(tx, request.uid, nonce),
        model_name=request.model_name,
        idempotency_key=request.idempotency_key,
        payload_format=request.payload_format,
        base_version_id=request.base_version_id,
        expected_source_slots=request.expected_source_slots,
        layout_signature="",
        state=request.state,
        created_at_unix_ms=tx.now_ms,
        object_storage=request.object_storage,
    )
    record = VersionRecord(version=version, ordinal=head.created)
    head = VersionsHead(created=head.created + 1, kept=head.kept + 1)
    tx.put(records.VERSIONS_HEAD, records.encode(head))
    put_version(tx, record)
    tx.put(key, records.encode_text(version.uid))
    return version


def _free_uid(tx: Transaction, wanted: str | None, nonce: Callable[[], str]) -> str:
    def is_free(uid: str) -> bool:
        places = (records.version_key(uid), records.tombstone_key(uid))
        return all(tx.get(place) is None for place in places)

    if wanted is not None:
        if not is_free(wanted):
            raise AlreadyExistsError(
                f"uid {wanted!r} belongs to another version, or did; ask for another uid, "
                "or for none"
            )
        return wanted
    for _ in range(UID_TRIES_MAX):
        uid = nonce()
        if is_free(uid):
            return uid
    raise ExhaustedError(f"{UID_TRIES_MAX} generated uids were all taken; try again")


def create_shard(tx: Transaction, shard: Shard, *, limits: Limits) -> WeightVersion:
    """Advertise a shard; with the last missing slot the version is READY in the same step."""
    record = require_version(tx, shard.version_id)
    version = record.version
    rules.check_worker(
        read_worker(tx, shard.worker_id),
        worker_id=shard.worker_id,
        now_ms=tx.now_ms,
        model_name=version.model_name,
        role=WorkerRole.TRAINER,
    )
    rules.check_publishable(version, shard)
    key = records.shard_key(version.uid, shard.source_slot_id, shard.worker_id)
    published = tx.get(key)
    if published is not None:
        if records.decode_shard(published) != shard:
            raise AlreadyExistsError(
                f"worker {shard.worker_id!r} published slot {shard.source_slot_id!r} of "
                f"version {version.uid!r} with other content; publish a new version"
            )
        return version
    rules.check_not_draining(
        is_draining=is_draining(tx, shard.worker_id), worker_id=shard.worker_id
    )
    if record.num_shards >= limits.shards_max:
        raise ExhaustedError(f"version {version.uid!r} has {record.num_shards} shards already")
    covered = tuple(sorted({*record.covered_slots, shard.source_slot_id}))
    record = replace(record, covered_slots=covered, num_shards=record.num_shards + 1)
    tx.put(key, records.encode(shard))
    is_complete = len(covered) == len(version.expected_source_slots)
    if is_complete and version.state is VersionState.STAGING:
        return put_state(tx, record, VersionState.READY)
    tx.put(records.version_key(version.uid), records.encode(record))
    return version
