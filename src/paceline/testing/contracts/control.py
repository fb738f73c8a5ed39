"""What every control plane must do; subclass ControlPlaneContract and say how yours is made.

The claims are the rows of the public protocol's tables, and what Paceline's own service adds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import pytest

from paceline.refit.control.protocol import ControlPlane
from paceline.refit.digest import version_root
from paceline.refit.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from paceline.refit.model import (
    Event,
    InstalledReport,
    Lease,
    ObjectStorageSource,
    ObjectStorageType,
    Shard,
    VersionDescription,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)
from paceline.testing.clock import FakeClock

MODEL = "tiny"
TTL_S = 90

TRAINER = WorkerRegistration(worker_id="t-0", role=WorkerRole.TRAINER, model_name=MODEL)
GENERATOR = WorkerRegistration(worker_id="g-0", role=WorkerRole.GENERATOR, model_name=MODEL)

FULL = VersionRequest(
    model_name=MODEL,
    idempotency_key="step-0",
    payload_format=WeightPayloadFormat.FULL_TENSOR,
    expected_source_slots=("rank-0", "rank-1"),
)
BUCKET = ObjectStorageSource(uri="s3://weights/seed", storage_type=ObjectStorageType.S3)
SEED = VersionRequest(
    model_name=MODEL,
    idempotency_key="seed",
    payload_format=WeightPayloadFormat.FULL_HF_CHECKPOINT,
    object_storage=BUCKET,
    state=VersionState.READY,
    uid="seed-version",
)
DESCRIPTION = VersionDescription(
    run_id="run-1",
    sequence=3,
    step=30,
    root_digest="ab" * 16,
    parent_root=None,
    payload_bytes=10,
    full_bytes=100,
    changed_elements=5,
    total_elements=50,
)
REPORT = InstalledReport(
    worker_id="g-0",
    model_name=MODEL,
    endpoint="http://127.0.0.1:9000",
    version_id="v",
    sequence=3,
    root_digest="ab" * 16,
    state="ready",
    installed_at_unix_ms=1,
    fetched_bytes=10,
    refit_ms=1.5,
    pause_ms=0.5,
)
EVENT = Event(
    worker_id="t-0", name="train.step", at_unix_ms=7, fields={"step": 1, "reward": 0.5, "x": None}
)


def shard_of(version_id: str, slot: str = "rank-0", worker_id: str = "t-0") -> Shard:
    """Return a well-formed shard."""
    return Shard(
        version_id=version_id,
        source_slot_id=slot,
        worker_id=worker_id,
        tensor_count=2,
        total_bytes=64,
        manifest_digest="cd" * 32,
        manifest_endpoint="http://127.0.0.1:9001/manifest/1",
    )


def delta_on(base: WeightVersion, key: str = "delta") -> VersionRequest:
    """Return a request for a delta on ``base``."""
    return replace(
        FULL,
        idempotency_key=key,
        payload_format=WeightPayloadFormat.XOR_DELTA,
        base_version_id=base.uid,
    )


_SHARD_TEXTS = (
    "version_id",
    "source_slot_id",
    "worker_id",
    "manifest_digest",
    "manifest_endpoint",
)

_BAD_REQUESTS = {
    "blank model": replace(FULL, model_name="  "),
    "blank key": replace(FULL, idempotency_key=""),
    "no payload format": replace(FULL, payload_format=WeightPayloadFormat.UNSPECIFIED),
    "base for a full version": replace(FULL, base_version_id="x"),
    "base for a checkpoint": replace(SEED, base_version_id="x"),
    "delta without base": replace(FULL, payload_format=WeightPayloadFormat.XOR_DELTA),
    "delta with a blank base": replace(
        FULL, payload_format=WeightPayloadFormat.XOR_DELTA, base_version_id=" "
    ),
    "blank slot": replace(FULL, expected_source_slots=("a", " ")),
    "slot twice": replace(FULL, expected_source_slots=("a", "a")),
    "neither slots nor object": replace(FULL, expected_source_slots=()),
    "object without address": replace(SEED, object_storage=replace(BUCKET, uri=" ")),
    "released from the start": replace(FULL, state=VersionState.RELEASING),
    "READY before its slots": replace(FULL, state=VersionState.READY),
    "key of a megabyte": replace(FULL, idempotency_key="k" * 1_000_000),
}

_BLANKS: dict[str, Callable[[ControlPlane], object]] = {
    "RegisterWorker id": lambda p: p.register_worker(
        replace(TRAINER, worker_id=" "), ttl_seconds=1
    ),
    "RegisterWorker model": lambda p: p.register_worker(
        replace(TRAINER, model_name=""), ttl_seconds=1
    ),
    "RegisterWorker ttl": lambda p: p.register_worker(TRAINER, ttl_seconds=0),
    "GetWeightVersion": lambda p: p.get_version(""),
    "DeleteWeightVersion": lambda p: p.delete_version(" "),
    "UpdateWeightVersionState": lambda p: p.update_version_state("", VersionState.READY),
    "ListWeightVersionShards": lambda p: p.list_shards("\t"),
    "DeleteWeightVersionShard": lambda p: p.delete_shard(
        version_id="v", source_slot_id="", worker_id="w"
    ),
    "RegisterVersionLease version": lambda p: p.acquire_lease(
        version_id="", worker_id="w", ttl_seconds=1
    ),
    "RegisterVersionLease worker": lambda p: p.acquire_lease(
        version_id="v", worker_id="", ttl_seconds=1
    ),
    "RegisterVersionLease ttl": lambda p: p.acquire_lease(
        version_id="v", worker_id="w", ttl_seconds=0
    ),
    "DeleteVersionLease": lambda p: p.release_lease(
        Lease(lease_id="", version_id="v", worker_id="w", expires_at_unix_ms=0)
    ),
    "ListVersions": lambda p: p.list_versions(""),
    "ListLeases": lambda p: p.list_leases(""),
    "ListWorkers": lambda p: p.list_workers(""),
    "ListInstalled": lambda p: p.list_installed(" "),
    "DescribeVersion digest": lambda p: p.describe_version(
        "v", replace(DESCRIPTION, root_digest="")
    ),
    "DescribeVersion count": lambda p: p.describe_version("v", replace(DESCRIPTION, step=-1)),
    "ReportInstalled worker": lambda p: p.report_installed(replace(REPORT, worker_id="")),
    "ReportInstalled state": lambda p: p.report_installed(replace(REPORT, state="happy")),
    "ReportInstalled time": lambda p: p.report_installed(replace(REPORT, refit_ms=float("nan"))),
    "RecordEvent name": lambda p: p.record_event(replace(EVENT, name="")),
    "RecordEvent number": lambda p: p.record_event(replace(EVENT, fields={"x": float("inf")})),
    "RecordEvent size": lambda p: p.record_event(replace(EVENT, fields={"x": "y" * 100_000})),
    "RecordEvent object": lambda p: p.record_event(replace(EVENT, fields={"x": object()})),
    "ListEvents limit": lambda p: p.list_events(limit=0),
    "half a character": lambda p: p.get_version("\ud800"),
}


_UNKNOWN: dict[str, Callable[[ControlPlane], object]] = {
    "GetVersion": lambda p: p.get_version("no"),
    "DeleteWeightVersion": lambda p: p.delete_version("no"),
    "UpdateWeightVersionState": lambda p: p.update_version_state("no", VersionState.READY),
    "CreateWeightVersionShard": lambda p: p.create_shard(shard_of("no")),
    "ListWeightVersionShards": lambda p: p.list_shards("no"),
    "DeleteWeightVersionShard": lambda p: p.delete_shard(
        version_id="no", source_slot_id="s", worker_id="t-0"
    ),
    "RegisterVersionLease": lambda p: p.acquire_lease(
        version_id="no", worker_id="g-0", ttl_seconds=1
    ),
    "ListLeases": lambda p: p.list_leases("no"),
    "DescribeVersion": lambda p: p.describe_version("no", DESCRIPTION),
}


class ControlPlaneContract(ABC):
    """The claims of the control plane, tested against one implementation."""

    @abstractmethod
    def make(self, clock: FakeClock) -> ControlPlane:
        """Return a new, empty control plane whose service takes its time from ``clock``."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        """Return the service's clock."""
        return FakeClock()

    @pytest.fixture
    def plane(self, clock: FakeClock) -> Iterator[ControlPlane]:
        """Yield a plane where a trainer and a generator are registered."""
        made = self.make(clock)
        made.register_worker(TRAINER, ttl_seconds=TTL_S)
        made.register_worker(GENERATOR, ttl_seconds=TTL_S)
        yield made
        made.close()

    def ready(self, plane: ControlPlane, request: VersionRequest = FULL) -> WeightVersion:
        """Return a version whose slots are all published by the trainer."""
        version = plane.create_version(request)
        for slot in request.expected_source_slots:
            version = plane.create_shard(shard_of(version.uid, slot))
        return version

    @pytest.mark.parametrize("name", _BLANKS)
    def test_blank_and_senseless_arguments_are_refused(
        self, plane: ControlPlane, name: str
    ) -> None:
        """What is missing or out of range is an InvalidRequestError, whatever else is wrong."""
        with pytest.raises(InvalidRequestError):
            _BLANKS[name](plane)

    # RegisterWorker

    def test_a_registration_lives_by_the_service_clock(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """Expiry is the service's time plus the ttl; what the request says about it is ignored."""
        asked = replace(TRAINER, worker_id="t-1", expires_at_unix_ms=5)
        registered = plane.register_worker(asked, ttl_seconds=10)
        assert registered.expires_at_unix_ms == int(clock.time() * 1000) + 10_000
        assert registered in plane.list_workers(MODEL)
        clock.advance(10)
        assert registered not in plane.list_workers(MODEL)

    def test_a_heartbeat_replaces_the_expiry_in_both_directions(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """A later registration with a shorter ttl shortens the life."""
        plane.register_worker(TRAINER, ttl_seconds=1000)
        shorter = plane.register_worker(TRAINER, ttl_seconds=1)
        assert shorter.expires_at_unix_ms == int(clock.time() * 1000) + 1000

    @pytest.mark.parametrize(
        "other",
        [replace(TRAINER, role=WorkerRole.GENERATOR), replace(TRAINER, model_name="m2")],
        ids=["role", "model"],
    )
    def test_a_living_id_keeps_role_and_model(
        self, plane: ControlPlane, clock: FakeClock, other: WorkerRegistration
    ) -> None:
        """The id of a living process cannot become something else; after expiry it is free."""
        with pytest.raises(AlreadyExistsError):
            plane.register_worker(other, ttl_seconds=1)
        clock.advance(TTL_S)
        assert plane.register_worker(other, ttl_seconds=1).role is other.role

    # CreateWeightVersion

    @pytest.mark.parametrize("name", _BAD_REQUESTS)
    def test_contradictory_requests_are_refused(self, plane: ControlPlane, name: str) -> None:
        """A request that cannot mean a version creates none."""
        with pytest.raises(InvalidRequestError):
            plane.create_version(_BAD_REQUESTS[name])
        assert plane.list_versions(MODEL) == []

    def test_a_new_version_is_what_was_asked_for(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """The record echoes the request, names itself in eight hex digits, and waits."""
        version = plane.create_version(FULL)
        assert version == WeightVersion(
            uid=version.uid,
            model_name=MODEL,
            idempotency_key="step-0",
            payload_format=WeightPayloadFormat.FULL_TENSOR,
            base_version_id=None,
            expected_source_slots=("rank-0", "rank-1"),
            layout_signature="",
            state=VersionState.STAGING,
            created_at_unix_ms=int(clock.time() * 1000),
        )
        assert len(version.uid) == 8
        assert int(version.uid, 16) >= 0
        assert plane.get_version(version.uid) == version

    def test_what_is_in_a_bucket_may_start_ready(self, plane: ControlPlane) -> None:
        """A seed checkpoint needs no slots, keeps the uid asked for, and carries deltas."""
        seed = plane.create_version(SEED)
        assert (seed.uid, seed.state, seed.object_storage) == (SEED.uid, VersionState.READY, BUCKET)
        assert plane.create_version(delta_on(seed)).base_version_id == seed.uid

    def test_equal_requests_give_one_version(self, plane: ControlPlane) -> None:
        """A repeated create returns the record as it is now."""
        version = self.ready(plane)
        assert plane.create_version(FULL) == version
        assert [v.uid for v in plane.list_versions(MODEL)] == [version.uid]

    def test_a_repeated_create_does_not_look_at_the_base_again(self, plane: ControlPlane) -> None:
        """A create whose reply was lost finds its version even after the base was retired."""
        base = self.ready(plane)
        delta = plane.create_version(delta_on(base))
        plane.delete_version(base.uid)
        assert plane.create_version(delta_on(base)) == delta

    @pytest.mark.parametrize(
        "changed",
        [
            replace(FULL, expected_source_slots=("rank-1", "rank-0")),
            replace(FULL, object_storage=BUCKET),
            replace(FULL, payload_format=WeightPayloadFormat.FULL_HF_CHECKPOINT),
            replace(FULL, uid="another"),
        ],
        ids=["slot order", "object", "payload format", "uid"],
    )
    def test_a_used_key_with_other_content_is_refused(
        self, plane: ControlPlane, changed: VersionRequest
    ) -> None:
        """One key is one content."""
        plane.create_version(FULL)
        with pytest.raises(AlreadyExistsError):
            plane.create_version(changed)

    def test_keys_of_different_models_do_not_meet(self, plane: ControlPlane) -> None:
        """An idempotency key belongs to its model."""
        first = plane.create_version(FULL)
        second = plane.create_version(replace(FULL, model_name="m2"))
        assert first.uid != second.uid
        assert plane.list_versions("m2") == [second]

    def test_a_taken_uid_is_refused(self, plane: ControlPlane) -> None:
        """A uid asked for twice under different keys is ALREADY_EXISTS."""
        plane.create_version(replace(FULL, uid="mine"))
        with pytest.raises(AlreadyExistsError):
            plane.create_version(replace(FULL, uid="mine", idempotency_key="other"))

    def test_a_delta_needs_a_ready_base_of_its_model(self, plane: ControlPlane) -> None:
        """Unknown, unfinished, foreign and retired bases are refused, each as the table says."""
        staging = plane.create_version(FULL)
        with pytest.raises(NotFoundError):
            plane.create_version(replace(delta_on(staging), base_version_id="unknown"))
        with pytest.raises(PreconditionError):
            plane.create_version(delta_on(staging))
        base = self.ready(plane)
        with pytest.raises(PreconditionError):
            plane.create_version(replace(delta_on(base), model_name="m2"))
        plane.delete_version(base.uid)
        with pytest.raises(PreconditionError):
            plane.create_version(delta_on(base))

    # Get, Update, Delete

    @pytest.mark.parametrize("name", _UNKNOWN)
    def test_an_unknown_version_is_not_found(self, plane: ControlPlane, name: str) -> None:
        """Every call that names a version says NOT_FOUND for one that is not there."""
        with pytest.raises(NotFoundError):
            _UNKNOWN[name](plane)

    def test_a_version_in_a_bucket_is_moved_to_ready_by_hand(self, plane: ControlPlane) -> None:
        """Without slots to wait for, UpdateWeightVersionState makes it READY; again is fine."""
        version = plane.create_version(replace(SEED, state=VersionState.STAGING))
        for _ in range(2):
            moved = plane.update_version_state(version.uid, VersionState.READY)
            assert moved.state is VersionState.READY

    def test_ready_by_hand_waits_for_the_slots(self, plane: ControlPlane) -> None:
        """A version whose slots are not all covered cannot be declared READY."""
        version = plane.create_version(FULL)
        plane.create_shard(shard_of(version.uid))
        with pytest.raises(PreconditionError):
            plane.update_version_state(version.uid, VersionState.READY)
        assert plane.get_version(version.uid).state is VersionState.STAGING

    def test_no_version_goes_back(self, plane: ControlPlane) -> None:
        """READY does not become STAGING, and nothing leaves RELEASING."""
        version = self.ready(plane)
        with pytest.raises(PreconditionError):
            plane.update_version_state(version.uid, VersionState.STAGING)
        plane.delete_version(version.uid)
        for state in (VersionState.STAGING, VersionState.READY):
            with pytest.raises(PreconditionError):
                plane.update_version_state(version.uid, state)

    def test_deleting_is_idempotent_and_cancels_staging(self, plane: ControlPlane) -> None:
        """Both living states become RELEASING; deleting twice says the same."""
        for request in (FULL, SEED):
            version = plane.create_version(request)
            first = plane.delete_version(version.uid)
            assert first.state is VersionState.RELEASING
            assert plane.delete_version(version.uid) == first

    # Shards

    @pytest.mark.parametrize("field", _SHARD_TEXTS)
    def test_a_shard_says_everything(self, plane: ControlPlane, field: str) -> None:
        """Each text of a shard is required."""
        version = plane.create_version(FULL)
        with pytest.raises(InvalidRequestError):
            plane.create_shard(Shard(**{**asdict(shard_of(version.uid)), field: " "}))

    def test_the_last_slot_makes_the_version_ready(self, plane: ControlPlane) -> None:
        """READY comes with the shard that covers the last slot, not before and not after."""
        version = plane.create_version(FULL)
        first = plane.create_shard(shard_of(version.uid, "rank-0"))
        again = plane.create_shard(shard_of(version.uid, "rank-0"))
        assert (first.state, again.state) == (VersionState.STAGING, VersionState.STAGING)
        last = plane.create_shard(shard_of(version.uid, "rank-1"))
        assert last.state is VersionState.READY
        assert plane.get_version(version.uid) == last

    def test_a_shard_needs_a_living_trainer_of_the_model(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """Unregistered, expired, foreign and generator workers may not publish."""
        version = plane.create_version(FULL)
        plane.register_worker(
            replace(TRAINER, worker_id="t-foreign", model_name="m2"), ttl_seconds=TTL_S
        )
        for worker_id in ("nobody", "t-foreign", "g-0"):
            with pytest.raises(PreconditionError):
                plane.create_shard(shard_of(version.uid, worker_id=worker_id))
        clock.advance(TTL_S)
        with pytest.raises(PreconditionError):
            plane.create_shard(shard_of(version.uid))

    def test_an_unexpected_slot_is_refused(self, plane: ControlPlane) -> None:
        """A slot that the version does not wait for is a malformed request."""
        version = plane.create_version(FULL)
        with pytest.raises(InvalidRequestError):
            plane.create_shard(shard_of(version.uid, "rank-2"))

    def test_one_publication_per_worker_and_slot(self, plane: ControlPlane) -> None:
        """The same content again changes nothing; other content is refused."""
        version = self.ready(plane)
        shard = shard_of(version.uid)
        assert plane.create_shard(shard).state is VersionState.READY
        with pytest.raises(AlreadyExistsError):
            plane.create_shard(replace(shard, manifest_digest="ef" * 32))
        assert len(plane.list_shards(version.uid)) == 2

    def test_replicas_may_come_before_and_after_ready(self, plane: ControlPlane) -> None:
        """A second worker may cover a covered slot; it never completes another one."""
        plane.register_worker(replace(TRAINER, worker_id="t-1"), ttl_seconds=TTL_S)
        version = plane.create_version(FULL)
        plane.create_shard(shard_of(version.uid, worker_id="t-1"))
        replica = plane.create_shard(shard_of(version.uid, worker_id="t-0"))
        assert replica.state is VersionState.STAGING
        plane.create_shard(shard_of(version.uid, "rank-1", "t-0"))
        late = plane.create_shard(shard_of(version.uid, "rank-1", "t-1"))
        assert late.state is VersionState.READY
        pairs = [(s.source_slot_id, s.worker_id) for s in plane.list_shards(version.uid)]
        assert pairs == [
            ("rank-0", "t-0"),
            ("rank-0", "t-1"),
            ("rank-1", "t-0"),
            ("rank-1", "t-1"),
        ]

    def test_a_retired_version_takes_no_shards(self, plane: ControlPlane) -> None:
        """A publication that arrives after the delete fails."""
        version = plane.create_version(FULL)
        plane.delete_version(version.uid)
        with pytest.raises(PreconditionError):
            plane.create_shard(shard_of(version.uid))

    def test_dead_sources_are_left_out_where_a_living_one_is(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """A dead worker's shard is listed only while nobody living offers its slot."""
        plane.register_worker(replace(TRAINER, worker_id="t-1"), ttl_seconds=1000)
        version = self.ready(plane)
        plane.create_shard(shard_of(version.uid, "rank-1", "t-1"))
        clock.advance(TTL_S)
        left = [(s.source_slot_id, s.worker_id) for s in plane.list_shards(version.uid)]
        assert left == [("rank-0", "t-0"), ("rank-1", "t-1")]

    def test_evicting_needs_a_retired_unleased_version(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """While the version is READY or leased its shards stay; an expired lease holds nothing."""
        version = self.ready(plane)
        plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=30)

        def evict() -> bool:
            return plane.delete_shard(
                version_id=version.uid, source_slot_id="rank-0", worker_id="t-0"
            )

        with pytest.raises(PreconditionError):
            evict()
        plane.delete_version(version.uid)
        with pytest.raises(PreconditionError):
            evict()
        clock.advance(30)
        assert evict()
        with pytest.raises(NotFoundError):
            evict()
        assert [s.source_slot_id for s in plane.list_shards(version.uid)] == ["rank-1"]

    def test_a_dead_worker_evicts_nothing(self, plane: ControlPlane, clock: FakeClock) -> None:
        """The publisher of a shard must be alive to take it away."""
        version = self.ready(plane)
        plane.delete_version(version.uid)
        clock.advance(TTL_S)
        with pytest.raises(PreconditionError):
            plane.delete_shard(version_id=version.uid, source_slot_id="rank-0", worker_id="t-0")

    # Leases

    def test_a_lease_is_one_per_worker_and_renewed_under_its_id(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """Renewing keeps the id and moves the expiry by the service's clock."""
        version = self.ready(plane)
        first = plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=30)
        clock.advance(10)
        second = plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=30)
        assert second == replace(first, expires_at_unix_ms=first.expires_at_unix_ms + 10_000)
        assert plane.list_leases(version.uid) == [second]

    def test_lease_ids_are_those_of_the_public_service(self, plane: ControlPlane) -> None:
        """The id is eight hex digits of SHA-256 over version, NUL and worker."""
        self.ready(plane, replace(FULL, uid="version-a"))
        lease = plane.acquire_lease(version_id="version-a", worker_id="g-0", ttl_seconds=1)
        assert lease.lease_id == "42b2876e"

    def test_leases_are_for_living_generators_of_the_model(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """Unregistered, expired, foreign and trainer workers get none."""
        version = self.ready(plane)
        plane.register_worker(
            replace(GENERATOR, worker_id="g-foreign", model_name="m2"), ttl_seconds=TTL_S
        )
        for worker_id in ("nobody", "g-foreign", "t-0"):
            with pytest.raises(PreconditionError):
                plane.acquire_lease(version_id=version.uid, worker_id=worker_id, ttl_seconds=1)
        clock.advance(TTL_S)
        with pytest.raises(PreconditionError):
            plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=1)

    def test_only_ready_versions_are_leased_anew(self, plane: ControlPlane) -> None:
        """Neither an unfinished nor a retired version can be taken."""
        version = plane.create_version(FULL)
        with pytest.raises(PreconditionError):
            plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=1)
        plane.delete_version(self.ready(plane).uid)
        with pytest.raises(PreconditionError):
            plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=1)

    def test_a_lease_on_a_retired_version_is_renewed_but_not_revived(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """A live hold may be prolonged while the version is RELEASING; an expired one not."""
        version = self.ready(plane)
        plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=10)
        plane.delete_version(version.uid)
        clock.advance(9)
        plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=10)
        clock.advance(10)
        with pytest.raises(PreconditionError):
            plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=10)

    def test_giving_back_a_lease(self, plane: ControlPlane, clock: FakeClock) -> None:
        """True once, False when it is gone or expired, refused to anybody else."""
        version = self.ready(plane)
        lease = plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=10)
        with pytest.raises(PreconditionError):
            plane.release_lease(replace(lease, worker_id="g-1"))
        assert plane.release_lease(lease)
        assert not plane.release_lease(lease)
        lease = plane.acquire_lease(version_id=version.uid, worker_id="g-0", ttl_seconds=10)
        clock.advance(10)
        assert not plane.release_lease(lease)

    # Paceline's own part

    def test_versions_are_listed_in_the_order_of_creation(self, plane: ControlPlane) -> None:
        """Even those of one millisecond; a run's filter looks at the description."""
        made = [
            plane.create_version(replace(FULL, idempotency_key=str(n), uid=f"{9 - n}"))
            for n in range(10)
        ]
        assert [v.uid for v in plane.list_versions(MODEL)] == [v.uid for v in made]
        described = plane.describe_version("4", DESCRIPTION)
        assert plane.list_versions(MODEL, run_id="run-1") == [described]
        assert plane.list_versions(MODEL, run_id="run-2") == []

    def test_a_description_is_set_once(self, plane: ControlPlane) -> None:
        """The same one again is fine, another one is refused, and readers see it."""
        version = plane.create_version(FULL)
        described = plane.describe_version(version.uid, DESCRIPTION)
        assert described == replace(version, description=DESCRIPTION)
        assert plane.describe_version(version.uid, DESCRIPTION) == described
        with pytest.raises(AlreadyExistsError):
            plane.describe_version(version.uid, replace(DESCRIPTION, parent_root="00"))
        self.ready(plane)
        assert plane.get_version(version.uid).description == DESCRIPTION

    def test_several_slots_describe_a_version_together(self, plane: ControlPlane) -> None:
        """Each says its own part, in any order and again; the last one's makes the whole."""
        slots = ("a", "b")
        version = plane.create_version(replace(FULL, expected_source_slots=slots))
        parts = {
            slot: replace(DESCRIPTION, root_digest=f"0{slot}", parent_root=f"1{slot}")
            for slot in slots
        }
        parts["b"] = replace(parts["b"], payload_bytes=5)
        for _ in range(2):
            said = plane.describe_version(version.uid, parts["b"], source_slot_id="b")
            assert said.description is None
        with pytest.raises(PreconditionError):
            later = replace(parts["a"], step=DESCRIPTION.step + 1)
            plane.describe_version(version.uid, later, source_slot_id="a")
        for _ in range(2):
            plane.describe_version(version.uid, parts["a"], source_slot_id="a")
        parents = {slot: part.parent_root or "" for slot, part in parts.items()}
        assert plane.get_version(version.uid).description == replace(
            DESCRIPTION,
            root_digest=version_root({slot: part.root_digest for slot, part in parts.items()}),
            parent_root=version_root(parents),
            payload_bytes=DESCRIPTION.payload_bytes + 5,
            full_bytes=2 * DESCRIPTION.full_bytes,
            changed_elements=2 * DESCRIPTION.changed_elements,
            total_elements=2 * DESCRIPTION.total_elements,
        )
        with pytest.raises(AlreadyExistsError):
            plane.describe_version(version.uid, parts["a"], source_slot_id="b")

    def test_a_version_has_a_parent_if_every_slot_has_one(self, plane: ControlPlane) -> None:
        """A process that began anew has none: a full version goes on without, a delta does not."""
        slots = ("a", "b")
        base = plane.create_version(replace(FULL, expected_source_slots=slots))
        parts = {"a": replace(DESCRIPTION, parent_root="0a"), "b": DESCRIPTION}
        for slot, part in parts.items():
            said = plane.describe_version(base.uid, part, source_slot_id=slot).description
        assert said is not None
        assert said.parent_root is None

    def test_workers_are_listed_by_model(self, plane: ControlPlane) -> None:
        """Only the living of the model asked for."""
        plane.register_worker(
            replace(TRAINER, worker_id="x/../%2F", model_name="m2"), ttl_seconds=1
        )
        assert [w.worker_id for w in plane.list_workers("m2")] == ["x/../%2F"]
        assert [w.worker_id for w in plane.list_workers(MODEL)] == ["g-0", "t-0"]

    def test_the_latest_report_of_each_generator(
        self, plane: ControlPlane, clock: FakeClock
    ) -> None:
        """A report replaces the one before; those of the dead are shown on request."""
        nothing = replace(REPORT, version_id="", sequence=-1, root_digest="", endpoint="")
        plane.report_installed(nothing)
        plane.report_installed(REPORT)
        dead = replace(REPORT, worker_id="g-dead", state="loading")
        with pytest.raises(PreconditionError):
            plane.report_installed(dead)
        plane.register_worker(replace(GENERATOR, worker_id="g-dead"), ttl_seconds=1)
        plane.report_installed(dead)
        clock.advance(1)
        assert plane.list_installed(MODEL) == [REPORT]
        everybody = plane.list_installed(MODEL, live_only=False)
        assert [r.worker_id for r in everybody] == ["g-0", "g-dead"]
        clock.advance(TTL_S)
        assert plane.list_installed(MODEL) == []

    def test_events_come_in_order_and_once(self, plane: ControlPlane) -> None:
        """Indices count from 1, an equal event is taken once, and readers go on where they were."""
        events = [replace(EVENT, at_unix_ms=n) for n in range(250)]
        for event in [*events, events[-1]]:
            plane.record_event(event)
        found = plane.list_events()
        assert found == [replace(event, index=n) for n, event in enumerate(events, start=1)]
        assert plane.list_events(after=97, limit=5) == found[97:102]
        assert plane.list_events(after=250) == []
        assert plane.list_events(after=10_000) == []
