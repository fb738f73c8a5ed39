"""How the control plane keeps its values in the store: keys and JSON codecs.

One key per thing that is read, written and guarded alone. Parts of a key are percent-escaped,
so that whatever a worker calls itself cannot reach another record. A record that does not
decode raises DamagedRecordError: it is never skipped and never guessed at.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from paceline.refit.errors import ControlError
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
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)

T = TypeVar("T")

VERSIONS = "version/"
WORKERS = "worker/"
LEASES = "lease/"
REPORTS = "installed/"
DRAINS = "drain/"
PINS = "pin/"
RETENTION = "retention/"
RUNS = "run/"

TOMBSTONES = "gone/"

VERSIONS_HEAD = "head/versions"
EVENTS_HEAD = "head/events"

EVENTS_PER_BLOCK = 100
"""Events of one block share a key prefix, so that a reader lists no more than it asked for."""


class DamagedRecordError(ControlError):
    """A record in the store does not decode: the store was written by something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """A version and what the ledger has to know about it beside."""

    version: WeightVersion
    ordinal: int
    """Position in the order of creation; never used twice."""
    covered_slots: tuple[str, ...] = ()
    """Sorted; a slot is never taken back."""
    num_shards: int = 0
    releasing_at_unix_ms: int | None = None
    changed: int = 0
    """The model's count of changes when this version last changed for its readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsHead:
    """Counts over all versions; written by whatever creates or removes one."""

    created: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHead:
    """What happened to a model's versions; written by whatever changes one for its readers."""

    changes: int = 0
    removed: tuple[tuple[int, str], ...] = ()
    """The latest removals: count of changes and uid, oldest first."""
    forgotten: int = 0
    """Removals up to this count of changes are no longer listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHead:
    """What a run has published lately."""

    roots: tuple[tuple[int, str], ...]
    """Sequence and root digest, ascending; the last is how far the run is."""
    at_unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsHead:
    """Which events are kept: indices ``first`` to ``last``, both inclusive."""

    first: int = 1
    last: int = 0


def version_key(uid: str) -> str:
    """Return where a version's record is."""
    return VERSIONS + _escape(uid)


def model_head_key(model_name: str) -> str:
    """Return where a model's count of changes is."""
    return f"head/model/{_escape(model_name)}"


def run_head_key(model_name: str, run_id: str) -> str:
    """Return where it says how far a run has published."""
    return f"{RUNS}{_escape(model_name)}/{_escape(run_id)}"


def tombstone_key(uid: str) -> str:
    """Return where it says that a version is gone."""
    return TOMBSTONES + _escape(uid)


def deltas_prefix(target: str) -> str:
    """Return what the keys of the deltas to a version start with."""
    return f"delta/{_escape(target)}/"


def delta_key(target: str, base: str) -> str:
    """Return where the delta from one version to another is."""
    return deltas_prefix(target) + _escape(base)


def retention_key(model_name: str) -> str:
    """Return where a model's retention policy is."""
    return RETENTION + _escape(model_name)


def drain_key(worker_id: str) -> str:
    """Return where it says that a worker is draining."""
    return DRAINS + _escape(worker_id)


def pins_prefix(model_name: str) -> str:
    """Return where the pins of a model are."""
    return f"{PINS}{_escape(model_name)}/"


def pin_key(model_name: str, workers: str) -> str:
    """Return where it says what the workers of a pattern serve."""
    return pins_prefix(model_name) + _escape(workers)


def idempotency_key(model_name: str, key: str) -> str:
    """Return where the uid is that a model's idempotency key stands for."""
    return f"idempotency/{_escape(model_name)}/{_escape(key)}"


def shards_prefix(version_id: str) -> str:
    """Return what the keys of a version's shards start with."""
    return f"shard/{_escape(version_id)}/"


def shard_key(version_id: str, slot: str, worker_id: str) -> str:
    """Return where one worker's shard of one slot is."""
    return f"{shards_prefix(version_id)}{_escape(slot)}/{_escape(worker_id)}"


def part_key(version_id: str, slot: str) -> str:
    """Return where one slot's part of a version's description is."""
    return f"part/{_escape(version_id)}/{_escape(slot)}"


def replicas_prefix(version_id: str) -> str:
    """Return what the keys of a version's replicas start with."""
    return f"replica/{_escape(version_id)}/"


def replica_key(version_id: str, slot: str, worker_id: str) -> str:
    """Return where one generator's replica of one slot is."""
    return f"{replicas_prefix(version_id)}{_escape(slot)}/{_escape(worker_id)}"


def leases_prefix(version_id: str) -> str:
    """Return what the keys of a version's leases start with."""
    return f"{LEASES}{_escape(version_id)}/"


def lease_key(version_id: str, lease_id: str) -> str:
    """Return where a lease is."""
    return leases_prefix(version_id) + _escape(lease_id)


def lease_id_of(version_id: str, worker_id: str) -> str:
    """Return the id of this worker's only lease on this version, as the public protocol has it."""
    return hashlib.sha256(f"{version_id}\0{worker_id}".encode()).hexdigest()[:8]


def worker_key(worker_id: str) -> str:
    """Return where a registration is."""
    return WORKERS + _escape(worker_id)


def reports_prefix(model_name: str) -> str:
    """Return what the keys of a model's installed reports start with."""
    return f"{REPORTS}{_escape(model_name)}/"


def report_key(model_name: str, worker_id: str) -> str:
    """Return where a generator's latest report is."""
    return reports_prefix(model_name) + _escape(worker_id)


def event_block(index: int) -> str:
    """Return what the keys of all events near ``index`` start with."""
    return f"event/{index // EVENTS_PER_BLOCK:014d}/"


def event_key(index: int) -> str:
    """Return where one event is; keys sort as indices do."""
    return f"{event_block(index)}{index % EVENTS_PER_BLOCK:02d}"


def event_twin_key(event: Event) -> str:
    """Return where the index of an equal event is, if one is kept."""
    body = encode_event(event, index=0)
    return f"event-twin/{hashlib.sha256(body).hexdigest()}"


def encode(value: object) -> bytes:
    """Return the canonical JSON of one of this module's dataclasses or the model's."""
    return _ENCODER.encode(value).encode()


def _fields(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields as they are; the encoder comes back for those inside."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def encode_text(text: str) -> bytes:
    """Return the record of a bare string."""
    return _dump({"text": text})


def encode_event(event: Event, *, index: int) -> bytes:
    """Return an event's record at its position."""
    return _dump({**_fields(event), "index": index})


def decode_version(value: bytes) -> VersionRecord:
    """Read what ``encode`` wrote of a VersionRecord."""

    def build(fields: dict[str, Any]) -> VersionRecord:
        version = fields.pop("version")
        return VersionRecord(
            version=_build_version(version),
            covered_slots=tuple(fields.pop("covered_slots")),
            **fields,
        )

    return _decode(value, build)


def decode_model_head(value: bytes) -> ModelHead:
    """Read what ``encode`` wrote of a ModelHead."""

    def build(fields: dict[str, Any]) -> ModelHead:
        removed = tuple((int(change), str(uid)) for change, uid in fields.pop("removed"))
        return ModelHead(removed=removed, **fields)

    return _decode(value, build)


def decode_run_head(value: bytes) -> RunHead:
    """Read what ``encode`` wrote of a RunHead."""

    def build(fields: dict[str, Any]) -> RunHead:
        roots = tuple((int(sequence), str(root)) for sequence, root in fields.pop("roots"))
        return RunHead(roots=roots, **fields)

    return _decode(value, build)


def decode_tombstone(value: bytes) -> Tombstone:
    """Read what ``encode`` wrote of a Tombstone."""

    def build(fields: dict[str, Any]) -> Tombstone:
        source = fields.pop("object_storage")
        return Tombstone(object_storage=None if source is None else _build_source(source), **fields)

    return _decode(value, build)


def decode_delta(value: bytes) -> Delta:
    """Read what ``encode`` wrote of a Delta."""
    return _decode(value, lambda fields: Delta(**fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRecord:
    """A model's retention policy."""

    model_name: str
    policy: RetentionPolicy


def decode_retention(value: bytes) -> RetentionRecord:
    """Read what ``encode`` wrote of a RetentionRecord."""
    return _decode(
        value,
        lambda fields: RetentionRecord(policy=RetentionPolicy(**fields.pop("policy")), **fields),
    )


def decode_pin(value: bytes) -> Pin:
    """Read what ``encode`` wrote of a Pin."""
    return _decode(value, lambda fields: Pin(**fields))


def decode_shard(value: bytes) -> Shard:
    """Read what ``encode`` wrote of a Shard."""
    return _decode(value, lambda fields: Shard(**fields))


def decode_description(value: bytes) -> VersionDescription:
    """Read what ``encode`` wrote of a VersionDescription."""
    return _decode(value, lambda fields: VersionDescription(**fields))


def encode_replica(replica: Replica) -> bytes:
    """Return a replica's record; which chunks it has is written in hex."""
    bits = {"chunks": replica.chunks.hex(), "coming": replica.coming.hex()}
    return _dump({**_fields(replica), **bits})


def decode_replica(value: bytes) -> Replica:
    """Read what ``encode_replica`` wrote."""

    def build(fields: dict[str, Any]) -> Replica:
        rates = tuple((str(worker), float(rate)) for worker, rate in fields.pop("rates"))
        chunks, coming = (bytes.fromhex(fields.pop(name)) for name in ("chunks", "coming"))
        return Replica(chunks=chunks, coming=coming, rates=rates, **fields)

    return _decode(value, build)


def decode_lease(value: bytes) -> Lease:
    """Read what ``encode`` wrote of a Lease."""
    return _decode(value, lambda fields: Lease(**fields))


def decode_worker(value: bytes) -> WorkerRegistration:
    """Read what ``encode`` wrote of a WorkerRegistration."""
    return _decode(
        value, lambda fields: WorkerRegistration(role=WorkerRole(fields.pop("role")), **fields)
    )


def decode_report(value: bytes) -> InstalledReport:
    """Read what ``encode`` wrote of an InstalledReport."""
    return _decode(value, lambda fields: InstalledReport(**fields))


def decode_event(value: bytes) -> Event:
    """Read what ``encode_event`` wrote."""
    return _decode(value, lambda fields: Event(**fields))


def decode_text(value: bytes) -> str:
    """Read what ``encode_text`` wrote."""
    return _decode(value, lambda fields: str(fields["text"]))


def decode_versions_head(value: bytes) -> VersionsHead:
    """Read what ``encode`` wrote of a VersionsHead."""
    return _decode(value, lambda fields: VersionsHead(**fields))


def decode_events_head(value: bytes) -> EventsHead:
    """Read what ``encode`` wrote of an EventsHead."""
    return _decode(value, lambda fields: EventsHead(**fields))


def _build_version(fields: dict[str, Any]) -> WeightVersion:
    source = fields.pop("object_storage")
    described = fields.pop("description")
    return WeightVersion(
        payload_format=WeightPayloadFormat(fields.pop("payload_format")),
        expected_source_slots=tuple(fields.pop("expected_source_slots")),
        state=VersionState(fields.pop("state")),
        object_storage=None if source is None else _build_source(source),
        description=None if described is None else VersionDescription(**described),
        **fields,
    )


def _build_source(fields: Mapping[str, Any]) -> ObjectStorageSource:
    return ObjectStorageSource(
        uri=fields["uri"], storage_type=ObjectStorageType(fields["storage_type"])
    )


def _escape(part: str) -> str:
    return quote(part, safe="")


def _dump(fields: Mapping[str, object]) -> bytes:
    return _ENCODER.encode(fields).encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False, default=_fields)


def _decode(value: bytes, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        return build(json.loads(value))
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise DamagedRecordError(
            f"a record of {len(value)} bytes in the store cannot be read ({type(exc).__name__}); "
            f"give the control service the store that it wrote, or an empty one"
        ) from exc
