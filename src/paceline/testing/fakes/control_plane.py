"""A control plane in memory, written independently of the real one, that fails on request."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TypeVar

from paceline.core.clock import Clock
from paceline.refit.control.describing import combine
from paceline.refit.errors import (
    AlreadyExistsError,
    ControlError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from paceline.refit.model import (
    Event,
    InstalledReport,
    Lease,
    Pin,
    Shard,
    VersionDescription,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)

_T = TypeVar("_T")


class FakeControlPlane:
    """Signs ControlPlane; keeps everything it was told.

    ``fail`` makes the next calls of one method raise, before or after they took effect: the
    latter is a lost reply. ``down`` makes every call raise.
    """

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._faults: dict[str, list[tuple[ControlError | None, bool]]] = {}
        self.down: ControlError | None = None
        self.calls: list[str] = []
        self.workers: dict[str, WorkerRegistration] = {}
        self.versions: dict[str, WeightVersion] = {}
        self.requests: dict[str, VersionRequest] = {}
        self.shards: dict[tuple[str, str, str], Shard] = {}
        self.parts: dict[str, dict[str, VersionDescription]] = {}
        self.leases: dict[tuple[str, str], Lease] = {}
        self.installed: dict[str, InstalledReport] = {}
        self.events: list[Event] = []
        self.pins: list[Pin] = []

    def fail(
        self,
        method: str,
        error: ControlError,
        *,
        after: bool = False,
        times: int = 1,
        skip: int = 0,
    ) -> None:
        """Let calls of a method raise: the next ``times`` once ``skip`` of them have passed.

        With ``after`` they take effect first. Replaces what was set for this method; zero times
        heals it.
        """
        self._faults[method] = [(None, False)] * skip + [(error, after)] * times

    def register_worker(
        self, registration: WorkerRegistration, *, ttl_seconds: int
    ) -> WorkerRegistration:
        """Register or refresh."""

        def act() -> WorkerRegistration:
            known = self._live(registration.worker_id)
            if known and (known.role, known.model_name) != (
                registration.role,
                registration.model_name,
            ):
                raise AlreadyExistsError(f"worker {known.worker_id} is alive as {known.role}")
            found = replace(registration, expires_at_unix_ms=self._now() + 1000 * ttl_seconds)
            self.workers[registration.worker_id] = found
            return found

        return self._call("register_worker", act)

    def create_version(self, request: VersionRequest) -> WeightVersion:
        """Create, or return what an equal request created."""

        def act() -> WeightVersion:
            uid = request.uid or f"{len(self.versions):08x}"
            for known_uid, known in self.requests.items():
                if known.idempotency_key == request.idempotency_key or known_uid == uid:
                    if known != request:
                        raise AlreadyExistsError(f"{uid} belongs to another request")
                    return self.versions[known_uid]
            self._check_base(request)
            self.requests[uid] = request
            self.versions[uid] = WeightVersion(
                uid=uid,
                model_name=request.model_name,
                idempotency_key=request.idempotency_key,
                payload_format=request.payload_format,
                base_version_id=request.base_version_id,
                expected_source_slots=request.expected_source_slots,
                layout_signature="",
                state=request.state,
                created_at_unix_ms=self._now(),
                object_storage=request.object_storage,
            )
            return self.versions[uid]

        return self._call("create_version", act)

    def get_version(self, uid: str) -> WeightVersion:
        """Return one version."""
        return self._call("get_version", lambda: self._version(uid))

    def update_version_state(self, uid: str, state: VersionState) -> WeightVersion:
        """Move a version on."""

        def act() -> WeightVersion:
            before = self._version(uid).state
            legal = {VersionState.STAGING: 0, VersionState.READY: 1, VersionState.RELEASING: 2}
            if legal[state] < legal[before]:
                raise PreconditionError(f"{uid} is {before}")
            return self._put(uid, state)

        return self._call("update_version_state", act)

    def delete_version(self, uid: str) -> WeightVersion:
        """Move a version to RELEASING."""

        def act() -> WeightVersion:
            self._version(uid)
            return self._put(uid, VersionState.RELEASING)

        return self._call("delete_version", act)

    def create_shard(self, shard: Shard) -> WeightVersion:
        """Advertise; the last slot makes it READY."""

        def act() -> WeightVersion:
            version = self._version(shard.version_id)
            worker = self._live(shard.worker_id)
            if worker is None or worker.role is not WorkerRole.TRAINER:
                raise PreconditionError(f"worker {shard.worker_id} is not registered")
            if version.state is VersionState.RELEASING:
                raise PreconditionError(f"{version.uid} is RELEASING")
            if shard.source_slot_id not in version.expected_source_slots:
                raise InvalidRequestError(f"slot {shard.source_slot_id} is not expected")
            key = (shard.version_id, shard.source_slot_id, shard.worker_id)
            if self.shards.setdefault(key, shard) != shard:
                raise AlreadyExistsError(f"{key} has another shard")
            covered = {slot for uid, slot, _ in self.shards if uid == version.uid}
            is_ready = covered == set(version.expected_source_slots)
            return self._put(version.uid, VersionState.READY) if is_ready else version

        return self._call("create_shard", act)

    def list_shards(self, version_id: str) -> Sequence[Shard]:
        """Return shards by slot and worker."""

        def act() -> Sequence[Shard]:
            self._version(version_id)
            return [shard for key, shard in sorted(self.shards.items()) if key[0] == version_id]

        return self._call("list_shards", act)

    def delete_shard(self, *, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Evict a shard."""

        def act() -> bool:
            version = self._version(version_id)
            key = (version_id, source_slot_id, worker_id)
            if key not in self.shards:
                raise NotFoundError(f"no shard {key}")
            if version.state is not VersionState.RELEASING or self._live(worker_id) is None:
                raise PreconditionError(f"{version_id} is {version.state}, or its worker is gone")
            if self._live_leases(version_id):
                raise PreconditionError(f"{version_id} is leased")
            del self.shards[key]
            return True

        return self._call("delete_shard", act)

    def acquire_lease(self, *, version_id: str, worker_id: str, ttl_seconds: int) -> Lease:
        """Take or renew a lease."""

        def act() -> Lease:
            version = self._version(version_id)
            worker = self._live(worker_id)
            if worker is None or worker.role is not WorkerRole.GENERATOR:
                raise PreconditionError(f"worker {worker_id} is not a registered generator")
            has_one = any(lease.worker_id == worker_id for lease in self._live_leases(version_id))
            if version.state is not VersionState.READY and not has_one:
                raise PreconditionError(f"{version_id} is {version.state}")
            lease = Lease(
                lease_id=sha256(f"{version_id}\0{worker_id}".encode()).hexdigest()[:8],
                version_id=version_id,
                worker_id=worker_id,
                expires_at_unix_ms=self._now() + 1000 * ttl_seconds,
            )
            self.leases[version_id, worker_id] = lease
            return lease

        return self._call("acquire_lease", act)

    def release_lease(self, lease: Lease) -> bool:
        """Give a lease back."""
        return self._call(
            "release_lease",
            lambda: self.leases.pop((lease.version_id, lease.worker_id), None) is not None,
        )

    def list_versions(
        self, model_name: str, *, run_id: str | None = None
    ) -> Sequence[WeightVersion]:
        """Return versions, oldest first."""
        return self._call(
            "list_versions",
            lambda: [
                version
                for version in self.versions.values()
                if version.model_name == model_name
                and (
                    run_id is None
                    or (version.description is not None and version.description.run_id == run_id)
                )
            ],
        )

    def describe_version(
        self, uid: str, description: VersionDescription, *, source_slot_id: str | None = None
    ) -> WeightVersion:
        """Attach a description, once; with several slots, when the last has said its part."""

        def act() -> WeightVersion:
            version = self._version(uid)
            expected = version.expected_source_slots
            if source_slot_id is not None and len(expected) > 1:
                parts = self.parts.setdefault(uid, {})
                if parts.setdefault(source_slot_id, description) != description:
                    raise AlreadyExistsError(f"{source_slot_id} of {uid} is described otherwise")
                if len({(each.run_id, each.sequence, each.step) for each in parts.values()}) > 1:
                    raise PreconditionError(f"the slots of {uid} differ")
                whole = combine(parts) if parts.keys() == set(expected) else None
                self.versions[uid] = replace(version, description=whole)
                return self.versions[uid]
            if version.description not in (None, description):
                raise AlreadyExistsError(f"{uid} is described otherwise")
            self.versions[uid] = replace(version, description=description)
            return self.versions[uid]

        return self._call("describe_version", act)

    def list_leases(self, version_id: str) -> Sequence[Lease]:
        """Return live leases."""

        def act() -> Sequence[Lease]:
            self._version(version_id)
            return self._live_leases(version_id)

        return self._call("list_leases", act)

    def list_workers(self, model_name: str) -> Sequence[WorkerRegistration]:
        """Return live workers."""
        return self._call(
            "list_workers",
            lambda: [
                worker
                for worker in self.workers.values()
                if worker.model_name == model_name and self._live(worker.worker_id)
            ],
        )

    def report_installed(self, report: InstalledReport) -> None:
        """Note what a generator serves."""
        self._call("report_installed", lambda: self.installed.__setitem__(report.worker_id, report))

    def list_installed(
        self, model_name: str, *, live_only: bool = True
    ) -> Sequence[InstalledReport]:
        """Return the latest reports."""
        return self._call(
            "list_installed",
            lambda: [
                report
                for report in self.installed.values()
                if report.model_name == model_name
                and (not live_only or self._live(report.worker_id))
            ],
        )

    def record_event(self, event: Event) -> None:
        """Append an event."""
        self._call(
            "record_event",
            lambda: self.events.append(replace(event, index=len(self.events) + 1)),
        )

    def list_events(self, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Return events after an index."""
        return self._call("list_events", lambda: self.events[after : after + limit])

    def set_pin(self, pin: Pin) -> None:
        """Put a pin, or take it away."""

        def act() -> None:
            others = [each for each in self.pins if each.workers != pin.workers]
            if pin.version_id:
                self._version(pin.version_id)
            elif len(others) == len(self.pins):
                raise NotFoundError(f"no pin {pin.workers}")
            self.pins = [*others, pin] if pin.version_id else others

        self._call("set_pin", act)

    def list_pins(self, model_name: str) -> Sequence[Pin]:
        """Return the pins."""
        return self._call("list_pins", lambda: list(self.pins))

    def close(self) -> None:
        """Nothing to give back."""

    def _call(self, method: str, act: Callable[[], _T]) -> _T:
        with self._lock:
            self.calls.append(method)
            if self.down is not None:
                raise self.down
            waiting = self._faults.get(method, [])
            error, after = waiting.pop(0) if waiting else (None, False)
            if error is not None and not after:
                raise error
            result = act()
            if error is not None:
                raise error
            return result

    def _now(self) -> int:
        return int(self._clock.time() * 1000)

    def _version(self, uid: str) -> WeightVersion:
        if uid not in self.versions:
            raise NotFoundError(f"no version {uid}")
        return self.versions[uid]

    def _put(self, uid: str, state: VersionState) -> WeightVersion:
        self.versions[uid] = replace(self.versions[uid], state=state)
        return self.versions[uid]

    def _live(self, worker_id: str) -> WorkerRegistration | None:
        worker = self.workers.get(worker_id)
        return worker if worker and worker.expires_at_unix_ms > self._now() else None

    def _live_leases(self, version_id: str) -> list[Lease]:
        return [
            lease
            for lease in self.leases.values()
            if lease.version_id == version_id and lease.expires_at_unix_ms > self._now()
        ]

    def _check_base(self, request: VersionRequest) -> None:
        is_delta = request.payload_format is WeightPayloadFormat.XOR_DELTA
        if is_delta != (request.base_version_id is not None):
            raise InvalidRequestError("a base is for XOR_DELTA, and for it alone")
        if request.base_version_id is not None:
            base = self._version(request.base_version_id)
            if base.state is not VersionState.READY or base.model_name != request.model_name:
                raise PreconditionError(f"base {base.uid} is {base.state}")
