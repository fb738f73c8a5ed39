"""Messages to values and back: total both ways, and the only place that knows both.

``parse_`` comes in from the wire and raises InvalidRequestError for what no value can hold: an
enum number that nobody knows, a message that must be there and is not. It decides nothing else;
blank or contradictory content is the ledger's to refuse. ``to_`` goes out and raises ValueError
for what the wire cannot hold, such as a negative count.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from paceline.refit.errors import InvalidRequestError
from paceline.refit.model import (
    Delta,
    Event,
    InstalledReport,
    Lease,
    ObjectStorageSource,
    ObjectStorageType,
    Pin,
    Replica,
    RetentionPolicy,
    Shard,
    Tombstone,
    VersionChanges,
    VersionDescription,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)
from paceline.refit.wire import paceline_refit_v1_pb2 as own
from paceline.refit.wire import refit_pb2 as public
from paceline.refit.wire.fields import parse_fields, render_fields

M = TypeVar("M", bound=Enum)


class _WireEnum(Protocol):
    """What a generated enum type offers of its names and numbers."""

    def items(self) -> list[tuple[str, int]]: ...


class EnumTable(Generic[M]):
    """One of our enums beside its numbers on the wire, matched by name."""

    def __init__(self, members: type[M], wire: _WireEnum, *, prefix: str) -> None:
        by_name = {name.removeprefix(f"{prefix}_"): number for name, number in wire.items()}
        self._prefix = prefix
        self._members: Mapping[int, M] = {by_name[m.name]: m for m in members}

    def name(self, member: M) -> str:
        """Return what the wire calls ``member``; messages are built with names."""
        return f"{self._prefix}_{member.name}"

    def member(self, number: int) -> M:
        """Return our member for ``number``. Raises InvalidRequestError if we have none."""
        member = self._members.get(number)
        if member is None:
            known = ", ".join(f"{n} {m.name}" for n, m in sorted(self._members.items()))
            raise InvalidRequestError(
                f"{self._prefix} {number} is not a value here; known: {known}"
            )
        return member


ROLES = EnumTable(WorkerRole, public.WorkerRole, prefix="WORKER_ROLE")
PAYLOAD_FORMATS = EnumTable(
    WeightPayloadFormat, public.WeightPayloadFormat, prefix="WEIGHT_PAYLOAD_FORMAT"
)
STATES = EnumTable(VersionState, public.WeightVersionState, prefix="WEIGHT_VERSION_STATE")
STORAGE_TYPES = EnumTable(ObjectStorageType, public.ObjectStorageType, prefix="OBJECT_STORAGE_TYPE")


def require_field(message: Message, name: str) -> None:
    """Raise InvalidRequestError unless the message-typed field ``name`` is there."""
    if not message.HasField(name):
        raise InvalidRequestError(f"{message.DESCRIPTOR.name}.{name} is missing")


def to_worker(worker: WorkerRegistration) -> public.WorkerRegistration:
    """Render a registration."""
    return public.WorkerRegistration(
        worker_id=worker.worker_id,
        role=ROLES.name(worker.role),
        model_name=worker.model_name,
        expires_at_unix_ms=worker.expires_at_unix_ms,
    )


def parse_worker(message: public.WorkerRegistration) -> WorkerRegistration:
    """Read a registration."""
    return WorkerRegistration(
        worker_id=message.worker_id,
        role=ROLES.member(message.role),
        model_name=message.model_name,
        expires_at_unix_ms=message.expires_at_unix_ms,
    )


def to_version(version: WeightVersion) -> public.WeightVersion:
    """Render a version as the public protocol has it: without the description."""
    return public.WeightVersion(
        uid=version.uid,
        model_name=version.model_name,
        idempotency_key=version.idempotency_key,
        payload_format=PAYLOAD_FORMATS.name(version.payload_format),
        base_version_id=version.base_version_id,
        expected_source_slots=version.expected_source_slots,
        layout_signature=version.layout_signature,
        state=STATES.name(version.state),
        created_at_unix_ms=version.created_at_unix_ms,
        object_storage=_to_object_storage(version.object_storage),
    )


def parse_version(
    message: public.WeightVersion, *, description: VersionDescription | None = None
) -> WeightVersion:
    """Read a version."""
    return WeightVersion(
        uid=message.uid,
        model_name=message.model_name,
        idempotency_key=message.idempotency_key,
        payload_format=PAYLOAD_FORMATS.member(message.payload_format),
        base_version_id=message.base_version_id if message.HasField("base_version_id") else None,
        expected_source_slots=tuple(message.expected_source_slots),
        layout_signature=message.layout_signature,
        state=STATES.member(message.state),
        created_at_unix_ms=message.created_at_unix_ms,
        object_storage=_parse_object_storage(message),
        description=description,
    )


def to_version_request(request: VersionRequest) -> public.CreateWeightVersionRequest:
    """Render what a version is asked for with."""
    return public.CreateWeightVersionRequest(
        model_name=request.model_name,
        idempotency_key=request.idempotency_key,
        payload_format=PAYLOAD_FORMATS.name(request.payload_format),
        base_version_id=request.base_version_id,
        expected_source_slots=request.expected_source_slots,
        object_storage=_to_object_storage(request.object_storage),
        state=STATES.name(request.state),
        uid=request.uid,
    )


def parse_version_request(message: public.CreateWeightVersionRequest) -> VersionRequest:
    """Read what a version is asked for with; an unspecified state means STAGING."""
    return VersionRequest(
        model_name=message.model_name,
        idempotency_key=message.idempotency_key,
        payload_format=PAYLOAD_FORMATS.member(message.payload_format),
        base_version_id=message.base_version_id if message.HasField("base_version_id") else None,
        expected_source_slots=tuple(message.expected_source_slots),
        object_storage=_parse_object_storage(message),
        state=STATES.member(message.state) if message.state else VersionState.STAGING,
        uid=message.uid if message.HasField("uid") else None,
    )


def to_shard(shard: Shard) -> public.WeightVersionShard:
    """Render a shard."""
    return public.WeightVersionShard(
        version_id=shard.version_id,
        source_slot_id=shard.source_slot_id,
        worker_id=shard.worker_id,
        tensor_count=shard.tensor_count,
        total_bytes=shard.total_bytes,
        manifest_digest=shard.manifest_digest,
        manifest_endpoint=shard.manifest_endpoint,
    )


def parse_shard(message: public.WeightVersionShard) -> Shard:
    """Read a shard."""
    return Shard(
        version_id=message.version_id,
        source_slot_id=message.source_slot_id,
        worker_id=message.worker_id,
        tensor_count=message.tensor_count,
        total_bytes=message.total_bytes,
        manifest_digest=message.manifest_digest,
        manifest_endpoint=message.manifest_endpoint,
    )


def to_lease(lease: Lease) -> public.VersionLease:
    """Render a lease."""
    return public.VersionLease(
        lease_id=lease.lease_id,
        version_id=lease.version_id,
        worker_id=lease.worker_id,
        expires_at_unix_ms=lease.expires_at_unix_ms,
    )


def parse_lease(message: public.VersionLease) -> Lease:
    """Read a lease."""
    return Lease(
        lease_id=message.lease_id,
        version_id=message.version_id,
        worker_id=message.worker_id,
        expires_at_unix_ms=message.expires_at_unix_ms,
    )


def to_description(description: VersionDescription) -> own.VersionDescription:
    """Render a description."""
    return own.VersionDescription(
        run_id=description.run_id,
        sequence=description.sequence,
        step=description.step,
        root_digest=description.root_digest,
        parent_root=description.parent_root,
        payload_bytes=description.payload_bytes,
        full_bytes=description.full_bytes,
        changed_elements=description.changed_elements,
        total_elements=description.total_elements,
    )


def parse_description(message: own.VersionDescription) -> VersionDescription:
    """Read a description."""
    return VersionDescription(
        run_id=message.run_id,
        sequence=message.sequence,
        step=message.step,
        root_digest=message.root_digest,
        parent_root=message.parent_root if message.HasField("parent_root") else None,
        payload_bytes=message.payload_bytes,
        full_bytes=message.full_bytes,
        changed_elements=message.changed_elements,
        total_elements=message.total_elements,
    )


def to_record(version: WeightVersion) -> own.VersionRecord:
    """Render a version with its description."""
    described = version.description
    return own.VersionRecord(
        version=to_version(version),
        description=None if described is None else to_description(described),
    )


def parse_record(message: own.VersionRecord) -> WeightVersion:
    """Read a version with its description."""
    require_field(message, "version")
    described = message.HasField("description")
    return parse_version(
        message.version,
        description=parse_description(message.description) if described else None,
    )


def to_report(report: InstalledReport) -> own.InstalledReport:
    """Render what a generator says it serves."""
    return own.InstalledReport(
        worker_id=report.worker_id,
        model_name=report.model_name,
        endpoint=report.endpoint,
        version_id=report.version_id,
        sequence=report.sequence,
        root_digest=report.root_digest,
        state=report.state,
        installed_at_unix_ms=report.installed_at_unix_ms,
        fetched_bytes=report.fetched_bytes,
        refit_ms=report.refit_ms,
        pause_ms=report.pause_ms,
        verified=report.verified,
    )


def parse_report(message: own.InstalledReport) -> InstalledReport:
    """Read what a generator says it serves."""
    return InstalledReport(
        worker_id=message.worker_id,
        model_name=message.model_name,
        endpoint=message.endpoint,
        version_id=message.version_id,
        sequence=message.sequence,
        root_digest=message.root_digest,
        state=message.state,
        installed_at_unix_ms=message.installed_at_unix_ms,
        fetched_bytes=message.fetched_bytes,
        refit_ms=message.refit_ms,
        pause_ms=message.pause_ms,
        verified=message.verified,
    )


def to_event(event: Event) -> own.Event:
    """Render an event."""
    return own.Event(
        worker_id=event.worker_id,
        name=event.name,
        at_unix_ms=event.at_unix_ms,
        fields_json=render_fields(event.fields),
        index=event.index,
    )


def parse_event(message: own.Event) -> Event:
    """Read an event."""
    return Event(
        worker_id=message.worker_id,
        name=message.name,
        at_unix_ms=message.at_unix_ms,
        fields=parse_fields(message.fields_json),
        index=message.index,
    )


def to_changes(changes: VersionChanges) -> own.WatchVersionsResponse:
    """Render what happened to a model's versions."""
    return own.WatchVersionsResponse(
        revision=changes.revision,
        records=map(to_record, changes.versions),
        removed=changes.removed,
        reset=changes.reset,
    )


def parse_changes(message: own.WatchVersionsResponse) -> VersionChanges:
    """Read what happened to a model's versions."""
    return VersionChanges(
        revision=message.revision,
        versions=tuple(map(parse_record, message.records)),
        removed=tuple(message.removed),
        reset=message.reset,
    )


def to_delta(delta: Delta) -> own.Delta:
    """Render an artefact that leads from a base to a target."""
    return own.Delta(
        base_version_id=delta.base_version_id,
        target_version_id=delta.target_version_id,
        payload_bytes=delta.payload_bytes,
        digest=delta.digest,
        uri=delta.uri,
        created_at_unix_ms=delta.created_at_unix_ms,
    )


def parse_delta(message: own.Delta) -> Delta:
    """Read an artefact that leads from a base to a target."""
    return Delta(
        base_version_id=message.base_version_id,
        target_version_id=message.target_version_id,
        payload_bytes=message.payload_bytes,
        digest=message.digest,
        uri=message.uri,
        created_at_unix_ms=message.created_at_unix_ms,
    )


def to_replica(replica: Replica) -> own.Replica:
    """Render a replica."""
    return own.Replica(
        version_id=replica.version_id,
        source_slot_id=replica.source_slot_id,
        worker_id=replica.worker_id,
        manifest_endpoint=replica.manifest_endpoint,
        region=replica.region,
        chunks=replica.chunks,
        is_complete=replica.is_complete,
        coming=replica.coming,
        load=replica.load,
        rates=[
            own.SourceRate(worker_id=worker_id, bytes_per_s=rate)
            for worker_id, rate in replica.rates
        ],
        updated_at_unix_ms=replica.updated_at_unix_ms,
    )


def parse_replica(message: own.Replica) -> Replica:
    """Read a replica."""
    return Replica(
        version_id=message.version_id,
        source_slot_id=message.source_slot_id,
        worker_id=message.worker_id,
        manifest_endpoint=message.manifest_endpoint,
        region=message.region,
        chunks=message.chunks,
        is_complete=message.is_complete,
        coming=message.coming,
        load=message.load,
        rates=tuple((rate.worker_id, rate.bytes_per_s) for rate in message.rates),
        updated_at_unix_ms=message.updated_at_unix_ms,
    )


def to_retention(policy: RetentionPolicy) -> own.RetentionPolicy:
    """Render a policy."""
    return own.RetentionPolicy(
        keep_last=policy.keep_last,
        anchors_every=policy.anchors_every,
        anchor_cost=policy.anchor_cost,
    )


def parse_retention(message: own.RetentionPolicy) -> RetentionPolicy:
    """Read a policy."""
    return RetentionPolicy(
        keep_last=message.keep_last,
        anchors_every=message.anchors_every,
        anchor_cost=message.anchor_cost,
    )


def to_pin(pin: Pin) -> own.Pin:
    """Render a pin."""
    return own.Pin(model_name=pin.model_name, workers=pin.workers, version_id=pin.version_id)


def parse_pin(message: own.Pin | own.SetPinRequest) -> Pin:
    """Read a pin, or what is to become one."""
    return Pin(
        model_name=message.model_name, workers=message.workers, version_id=message.version_id
    )


def to_tombstone(tombstone: Tombstone) -> own.Tombstone:
    """Render what is left of a version."""
    return own.Tombstone(
        uid=tombstone.uid,
        model_name=tombstone.model_name,
        removed_at_unix_ms=tombstone.removed_at_unix_ms,
        object_storage=_to_object_storage(tombstone.object_storage),
        is_collected=tombstone.is_collected,
    )


def parse_tombstone(message: own.Tombstone) -> Tombstone:
    """Read what is left of a version."""
    return Tombstone(
        uid=message.uid,
        model_name=message.model_name,
        removed_at_unix_ms=message.removed_at_unix_ms,
        object_storage=_parse_object_storage(message),
        is_collected=message.is_collected,
    )


def _to_object_storage(source: ObjectStorageSource | None) -> public.ObjectStorageSource | None:
    if source is None:
        return None
    return public.ObjectStorageSource(
        uri=source.uri, storage_type=STORAGE_TYPES.name(source.storage_type)
    )


def _parse_object_storage(
    message: public.WeightVersion | public.CreateWeightVersionRequest | own.Tombstone,
) -> ObjectStorageSource | None:
    if not message.HasField("object_storage"):
        return None
    return ObjectStorageSource(
        uri=message.object_storage.uri,
        storage_type=STORAGE_TYPES.member(message.object_storage.storage_type),
    )
