"""What a request may say, and when: pure checks that raise what the public protocol names."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.refit import lifecycle
from paceline.refit.errors import (
    AlreadyExistsError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from paceline.refit.model import (
    Delta,
    Event,
    InstalledReport,
    Pin,
    Replica,
    RetentionPolicy,
    Shard,
    VersionDescription,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)

UINT64_MAX = 2**64 - 1
UINT32_MAX = 2**32 - 1

_EVENT_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")

REPORT_STATES = frozenset({"loading", "ready", "draining", "stale", "failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the control service keeps, and of what size."""

    text_chars_max: int = 1024
    """Of an id, a name, a digest."""
    address_chars_max: int = 4096
    """Of an endpoint or URI."""
    slots_max: int = 4096
    """Of one version: its record stays well under gRPC's message limit of 4 MiB."""
    shards_max: int = 8192
    """Of one version: a reply that lists them must pass a public client's limit of 4 MiB."""
    versions_max: int = 20_000
    """In all states together."""
    events_kept: int = 20_000
    events_reply_chars_max: int = 2_000_000
    replicas_max: int = 1024
    """Generators that may serve one version on."""
    replica_chunks_bytes_max: int = 2048
    """Of the bits that say which chunks a generator has: 16 384 chunks, 64 GiB of payload with the
    usual ones. Whoever has more says only when it is complete."""
    replica_rates_max: int = 16
    reports_kept: int = 1000
    staging_ttl_s: int = 3600
    """A version that did not become READY by then is given up."""
    released_kept_s: int = 300
    """How long a version stays visible as RELEASING once nothing needs it."""
    tombstones_kept_s: int = 30 * 24 * 3600
    """How long the name of a version that is gone cannot be used again."""
    tombstones_kept: int = 100_000
    """In all, whatever their age; the oldest go."""


def require_text(limits: Limits, **texts: str) -> None:
    """Raise InvalidRequestError for a text that is blank or too long; the keyword names it."""
    for name, text in texts.items():
        _check_text(name, text, chars_max=limits.text_chars_max)


def require_address(limits: Limits, name: str, text: str) -> None:
    """Raise InvalidRequestError for an address that is blank or too long."""
    _check_text(name, text, chars_max=limits.address_chars_max)


def _check_text(name: str, text: str, *, chars_max: int) -> None:
    if not text.strip():
        raise InvalidRequestError(f"{name} is missing")
    if len(text) > chars_max:
        raise InvalidRequestError(
            f"{name} has {len(text)} characters; at most {chars_max} are taken"
        )
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(f"{name} is not Unicode text: it has half a character") from exc


def require_count(name: str, value: int, *, least: int = 0, most: int = UINT64_MAX) -> None:
    """Raise InvalidRequestError unless ``value`` is from ``least`` to ``most``, both inclusive."""
    if not least <= value <= most:
        raise InvalidRequestError(f"{name} is {value}; it must be from {least} to {most}")


def require_ttl(ttl_seconds: int) -> None:
    """Raise InvalidRequestError for a time to live that the wire cannot hold or that is zero."""
    require_count("ttl_seconds", ttl_seconds, least=1, most=UINT32_MAX)


def check_version_request(request: VersionRequest, limits: Limits) -> VersionRequest:
    """Return the request with blank optional texts as None. Raises InvalidRequestError."""
    request = replace(
        request,
        base_version_id=_text_or_none(request.base_version_id),
        uid=_text_or_none(request.uid),
    )
    require_text(limits, model_name=request.model_name, idempotency_key=request.idempotency_key)
    optional = {"uid": request.uid, "base_version_id": request.base_version_id}
    require_text(limits, **{name: text for name, text in optional.items() if text is not None})
    _check_base(request)
    _check_slots(request, limits)
    if request.object_storage is not None:
        require_address(limits, "object_storage.uri", request.object_storage.uri)
    _check_initial_state(request)
    return request


def _text_or_none(text: str | None) -> str | None:
    return None if text is None or not text.strip() else text


def _check_base(request: VersionRequest) -> None:
    if request.payload_format is WeightPayloadFormat.UNSPECIFIED:
        raise InvalidRequestError("payload_format is missing")
    is_delta = request.payload_format is WeightPayloadFormat.XOR_DELTA
    if is_delta and request.base_version_id is None:
        raise InvalidRequestError("an XOR_DELTA version needs base_version_id")
    if not is_delta and request.base_version_id is not None:
        raise InvalidRequestError(
            f"a {request.payload_format.value} version stands alone and takes no base_version_id"
        )


def _check_slots(request: VersionRequest, limits: Limits) -> None:
    slots = request.expected_source_slots
    if not slots and request.object_storage is None:
        raise InvalidRequestError("expected_source_slots is empty and there is no object_storage")
    if len(slots) > limits.slots_max:
        raise InvalidRequestError(
            f"{len(slots)} expected_source_slots; at most {limits.slots_max} are taken"
        )
    for slot in slots:
        require_text(limits, expected_source_slots=slot)
    if len(set(slots)) != len(slots):
        raise InvalidRequestError("expected_source_slots names a slot twice")


def _check_initial_state(request: VersionRequest) -> None:
    if request.state not in lifecycle.INITIAL:
        raise InvalidRequestError(f"a version cannot be created {request.state}")
    if request.state is VersionState.READY and request.expected_source_slots:
        raise InvalidRequestError(
            "a version that waits for slots cannot be created READY; its shards make it READY"
        )


def check_same_request(existing: WeightVersion, request: VersionRequest) -> None:
    """Raise AlreadyExistsError unless ``existing`` is what ``request`` asks for.

    State and creation time move on and are not compared; a uid only if one is asked for.
    """
    differing = [
        name
        for name in ("payload_format", "base_version_id", "expected_source_slots", "object_storage")
        if getattr(existing, name) != getattr(request, name)
    ]
    if request.uid is not None and request.uid != existing.uid:
        differing.append("uid")
    if differing:
        raise AlreadyExistsError(
            f"idempotency key {request.idempotency_key!r} of model {request.model_name!r} made "
            f"version {existing.uid!r}, which differs in {', '.join(differing)}; "
            f"use a new key for a new version"
        )


def check_base(base: WeightVersion, *, model_name: str) -> None:
    """Raise PreconditionError unless a delta of ``model_name`` may stand on ``base``."""
    if base.model_name != model_name:
        raise PreconditionError(f"base {base.uid!r} is of another model, {base.model_name!r}")
    if base.state is not VersionState.READY:
        raise PreconditionError(
            f"base {base.uid!r} is {base.state}, not READY; start from a READY or a full version"
        )


def check_room(kept: int, limits: Limits) -> None:
    """Raise ExhaustedError if one more version would be too many."""
    if kept >= limits.versions_max:
        raise ExhaustedError(f"{kept} versions are kept already; delete versions that nobody needs")


def check_worker(
    worker: WorkerRegistration | None,
    *,
    worker_id: str,
    now_ms: int,
    model_name: str,
    role: WorkerRole | None = None,
) -> None:
    """Raise PreconditionError unless the worker is alive, of this model and in this role."""
    if not is_alive(worker, now_ms) or worker is None:
        raise PreconditionError(
            f"worker {worker_id!r} is not registered or its registration expired; register it again"
        )
    if role is not None and worker.role is not role:
        raise PreconditionError(f"worker {worker_id!r} is a {worker.role}; this takes a {role}")
    if worker.model_name != model_name:
        raise PreconditionError(
            f"worker {worker_id!r} works for model {worker.model_name!r}, not {model_name!r}"
        )


def is_alive(worker: WorkerRegistration | None, now_ms: int) -> bool:
    """Return whether a registration is there and has not expired."""
    return worker is not None and worker.expires_at_unix_ms > now_ms


def check_registration(
    before: WorkerRegistration | None, after: WorkerRegistration, *, now_ms: int
) -> None:
    """Raise AlreadyExistsError if the id is alive as something else."""
    if before is None or not is_alive(before, now_ms):
        return
    if (before.role, before.model_name) != (after.role, after.model_name):
        raise AlreadyExistsError(
            f"worker {after.worker_id!r} is alive as {before.role} of {before.model_name!r}; "
            f"a new process takes a new worker id"
        )


def check_shard(shard: Shard, limits: Limits) -> None:
    """Raise InvalidRequestError for a shard that says too little or too much."""
    require_text(
        limits,
        version_id=shard.version_id,
        source_slot_id=shard.source_slot_id,
        worker_id=shard.worker_id,
        manifest_digest=shard.manifest_digest,
    )
    require_address(limits, "manifest_endpoint", shard.manifest_endpoint)
    require_count("tensor_count", shard.tensor_count)
    require_count("total_bytes", shard.total_bytes)


def check_publishable(version: WeightVersion, shard: Shard) -> None:
    """Raise if the version takes no shards now, or none for this slot."""
    if version.state not in lifecycle.PUBLISHABLE:
        raise PreconditionError(
            f"version {version.uid!r} is {version.state} and takes no more shards"
        )
    if shard.source_slot_id not in version.expected_source_slots:
        raise InvalidRequestError(
            f"version {version.uid!r} expects no slot {shard.source_slot_id!r}"
        )


def check_evictable(version: WeightVersion, *, num_leases: int) -> None:
    """Raise PreconditionError unless shards of the version may go."""
    if version.state not in lifecycle.EVICTABLE:
        raise PreconditionError(
            f"version {version.uid!r} is {version.state}; delete the version before its shards"
        )
    if num_leases:
        raise PreconditionError(
            f"{num_leases} readers hold version {version.uid!r}; wait until they let go"
        )


def check_leasable(version: WeightVersion, *, is_renewal: bool) -> None:
    """Raise PreconditionError unless the version may be held (further)."""
    admitted = lifecycle.RENEWABLE if is_renewal else lifecycle.LEASABLE
    if version.state not in admitted:
        raise PreconditionError(
            f"version {version.uid!r} is {version.state} and cannot be leased; "
            f"pick the newest READY version"
        )


def check_not_draining(*, is_draining: bool, worker_id: str) -> None:
    """Raise PreconditionError if the worker is to begin nothing new."""
    if is_draining:
        raise PreconditionError(f"worker {worker_id!r} is draining and begins nothing new")


def check_delta(delta: Delta, limits: Limits) -> None:
    """Raise InvalidRequestError for a delta that says too little, or leads nowhere."""
    require_text(
        limits,
        base_version_id=delta.base_version_id,
        target_version_id=delta.target_version_id,
        digest=delta.digest,
    )
    require_address(limits, "uri", delta.uri)
    require_count("payload_bytes", delta.payload_bytes)
    if delta.base_version_id == delta.target_version_id:
        raise InvalidRequestError("a delta leads from one version to another")


def check_replica(replica: Replica, limits: Limits) -> None:
    """Raise InvalidRequestError for a replica that says too little or too much."""
    require_text(
        limits,
        version_id=replica.version_id,
        source_slot_id=replica.source_slot_id,
        worker_id=replica.worker_id,
    )
    if replica.region:
        require_text(limits, region=replica.region)
    if replica.manifest_endpoint:
        require_address(limits, "manifest_endpoint", replica.manifest_endpoint)
    require_count("load", replica.load, most=UINT32_MAX)
    for name, bits in (("chunks", replica.chunks), ("coming", replica.coming)):
        if len(bits) > limits.replica_chunks_bytes_max:
            raise InvalidRequestError(
                f"{name} has {len(bits)} bytes; at most {limits.replica_chunks_bytes_max} are "
                "taken: say only when everything is there"
            )
    if len(replica.rates) > limits.replica_rates_max:
        raise InvalidRequestError(
            f"{len(replica.rates)} rates; at most {limits.replica_rates_max} are taken"
        )
    for worker_id, rate in replica.rates:
        require_text(limits, rates_worker_id=worker_id)
        if not math.isfinite(rate) or rate < 0:
            raise InvalidRequestError(f"a rate is {rate}; it must be zero or more")


def check_pinnable(version: WeightVersion, pin: Pin) -> None:
    """Raise PreconditionError for a version that nobody could be pinned to."""
    if version.model_name != pin.model_name:
        raise PreconditionError(
            f"version {version.uid!r} is of model {version.model_name!r}, not {pin.model_name!r}"
        )
    if version.state is not VersionState.READY:
        raise PreconditionError(
            f"version {version.uid!r} is {version.state.value}; only a READY one can be served"
        )


def check_retention(policy: RetentionPolicy) -> None:
    """Raise InvalidRequestError for numbers that a policy cannot have."""
    require_count("keep_last", policy.keep_last, most=UINT32_MAX)
    require_count("anchors_every", policy.anchors_every, most=UINT32_MAX)
    if not math.isfinite(policy.anchor_cost) or policy.anchor_cost < 0:
        raise InvalidRequestError(f"anchor_cost is {policy.anchor_cost}; it must be zero or more")


def check_description(description: VersionDescription, limits: Limits) -> None:
    """Raise InvalidRequestError for a description that is incomplete or out of range."""
    require_text(limits, run_id=description.run_id, root_digest=description.root_digest)
    if description.parent_root is not None:
        require_text(limits, parent_root=description.parent_root)
    for name in (
        "sequence",
        "step",
        "payload_bytes",
        "full_bytes",
        "changed_elements",
        "total_elements",
    ):
        require_count(name, getattr(description, name))


def check_report(report: InstalledReport, limits: Limits) -> None:
    """Raise InvalidRequestError for a report that is incomplete or out of range."""
    require_text(limits, worker_id=report.worker_id, model_name=report.model_name)
    if report.state not in REPORT_STATES:
        raise InvalidRequestError(
            f"state {report.state!r} is none of {', '.join(sorted(REPORT_STATES))}"
        )
    if report.endpoint:
        require_address(limits, "endpoint", report.endpoint)
    optional = {
        "version_id": report.version_id,
        "root_digest": report.root_digest,
        "verified": report.verified,
    }
    require_text(limits, **{name: text for name, text in optional.items() if text})
    require_count("sequence", report.sequence, least=-1, most=2**63 - 1)
    require_count("installed_at_unix_ms", report.installed_at_unix_ms)
    require_count("fetched_bytes", report.fetched_bytes)
    for name, value in (("refit_ms", report.refit_ms), ("pause_ms", report.pause_ms)):
        if not math.isfinite(value) or value < 0:
            raise InvalidRequestError(f"{name} is {value}; it must be a time of zero or more")


def check_event(event: Event, limits: Limits) -> None:
    """Raise InvalidRequestError for an event without a name, a worker or a time."""
    require_text(limits, worker_id=event.worker_id, name=event.name)
    if _EVENT_NAME.fullmatch(event.name) is None:
        raise InvalidRequestError(
            f"{event.name!r} is no event name; write lower-case words joined by points"
        )
    require_count("at_unix_ms", event.at_unix_ms)


def visible_shards(shards: Sequence[Shard], *, is_live: Mapping[str, bool]) -> Sequence[Shard]:
    """Return the shards without those of dead workers whose slot a living one offers too."""
    offered = {shard.source_slot_id for shard in shards if is_live[shard.worker_id]}
    return [
        shard for shard in shards if is_live[shard.worker_id] or shard.source_slot_id not in offered
    ]


def not_found(kind: str, name: str) -> NotFoundError:
    """Return the refusal for something that is not there."""
    return NotFoundError(f"there is no {kind} {name!r}; it never was, or it has been released")
