"""What publisher and receiver need of the control plane: plain values in and out, blocking.

The first part mirrors the public protocol ``model_express.refit`` call by call; the second is
Paceline's own service ``paceline.refit.v1``. The client over gRPC and the ledger inside the
service both sign this, so that whoever works with the one works with the other.

Every method may raise ControlUnavailableError and AccessRefusedError (the client), and
InvalidRequestError for malformed arguments.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from paceline.refit.model import (
    Delta,
    Event,
    InstalledReport,
    Lease,
    Pin,
    Replica,
    RetentionPolicy,
    Shard,
    Tombstone,
    VersionChanges,
    VersionDescription,
    VersionRequest,
    VersionState,
    WeightVersion,
    WorkerRegistration,
)


class ControlPlane(Protocol):
    """Versions, shards, workers, leases, and who serves what.

    A version's description is in the answers of get_version, list_versions and
    describe_version; the public protocol has no room for it, so the others may lack it.
    """

    def register_worker(
        self, registration: WorkerRegistration, *, ttl_seconds: int
    ) -> WorkerRegistration:
        """Register or refresh this process; returns it with the expiry. This is the heartbeat.

        Raises:
            AlreadyExistsError: the id is alive with another role or model.
        """
        ...

    def create_version(self, request: VersionRequest) -> WeightVersion:
        """Create a version, or return the one that an equal request created.

        Raises:
            AlreadyExistsError: key or uid belong to a different request.
            NotFoundError: the base is unknown.
            PreconditionError: the base is not READY or of another model.
        """
        ...

    def get_version(self, uid: str) -> WeightVersion:
        """Return one version. Raises NotFoundError."""
        ...

    def update_version_state(self, uid: str, state: VersionState) -> WeightVersion:
        """Move a version along its life. Raises NotFoundError, PreconditionError."""
        ...

    def delete_version(self, uid: str) -> WeightVersion:
        """Move a version to RELEASING; leases are untouched. Idempotent. Raises NotFoundError."""
        ...

    def create_shard(self, shard: Shard) -> WeightVersion:
        """Advertise a shard; the one that covers the last slot makes the version READY at once.

        Raises:
            NotFoundError, PreconditionError, AlreadyExistsError: as the public protocol says.
        """
        ...

    def list_shards(self, version_id: str) -> Sequence[Shard]:
        """Return the shards sorted by (slot, worker). Raises NotFoundError."""
        ...

    def delete_shard(self, *, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Evict a shard of a RELEASING version without leases.

        Raises:
            PreconditionError: leased, or not RELEASING.
            NotFoundError: no such shard.
        """
        ...

    def acquire_lease(self, *, version_id: str, worker_id: str, ttl_seconds: int) -> Lease:
        """Take or renew this worker's hold. Raises NotFoundError, PreconditionError."""
        ...

    def release_lease(self, lease: Lease) -> bool:
        """Give a hold back; False if it was gone already."""
        ...

    def list_versions(
        self, model_name: str, *, run_id: str | None = None
    ) -> Sequence[WeightVersion]:
        """Return every recorded version of a model, oldest first, with descriptions."""
        ...

    def describe_version(
        self, uid: str, description: VersionDescription, *, source_slot_id: str | None = None
    ) -> WeightVersion:
        """Attach the description, once; the same one again is fine.

        Args:
            uid: of the version.
            description: of all of it, or of what one slot brings: roots over the slot's tensors.
            source_slot_id: that slot. With the last one the version has a description: counts
                added up, and the roots that ``digest.version_root`` makes of the slots'.

        Raises:
            AlreadyExistsError: it has a different one.
            PreconditionError: the slots do not describe one state of one run.
        """
        ...

    def list_leases(self, version_id: str) -> Sequence[Lease]:
        """Return the live leases of a version. Raises NotFoundError."""
        ...

    def list_workers(self, model_name: str) -> Sequence[WorkerRegistration]:
        """Return the registrations of a model that have not expired."""
        ...

    def report_installed(self, report: InstalledReport) -> None:
        """Say what this generator serves now; kept with the history of its run."""
        ...

    def list_installed(
        self, model_name: str, *, live_only: bool = True
    ) -> Sequence[InstalledReport]:
        """Return each generator's latest report; by default of live registrations only."""
        ...

    def list_pins(self, model_name: str) -> Sequence[Pin]:
        """Return which generators are to serve a version other than the newest, by pattern."""
        ...

    def record_event(self, event: Event) -> None:
        """Append to the run's events."""
        ...

    def list_events(self, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Return events whose index is greater than ``after``, in order.

        At most ``limit``, and fewer where the reply would get large: go on from the last one
        until nothing comes.
        """
        ...

    def close(self) -> None:
        """Give the connection back; idempotent."""
        ...


class ControlKeeping(Protocol):
    """Chains, retention and drain: what operators and relays need beside ControlPlane."""

    def get_chain(self, uid: str) -> Sequence[WeightVersion]:
        """Return the versions that lead to this one, a full version first.

        Raises:
            NotFoundError: it is unknown, or one on the way is gone.
        """
        ...

    def record_delta(self, delta: Delta) -> Delta:
        """Say that one artefact leads from a base to a target.

        Raises:
            NotFoundError, PreconditionError: base or target unknown, or of different models.
            AlreadyExistsError: there is another one between them.
        """
        ...

    def list_deltas(self, target_version_id: str) -> Sequence[Delta]:
        """Return the artefacts that lead to a version, by base. Raises NotFoundError."""
        ...

    def set_retention(self, model_name: str, policy: RetentionPolicy) -> None:
        """Say which READY versions of a model stay."""
        ...

    def get_retention(self, model_name: str) -> RetentionPolicy:
        """Return the model's policy; by default everything stays."""
        ...

    def drain_worker(self, worker_id: str, *, resume: bool = False) -> None:
        """Let a living worker begin nothing new, or again. Raises NotFoundError."""
        ...

    def set_pin(self, pin: Pin) -> None:
        """Have some generators serve a READY version; with an empty one, the newest again.

        Raises:
            NotFoundError: no such version, or nothing to take away.
            PreconditionError: it is not READY, or of another model.
        """
        ...

    def list_tombstones(self, model_name: str) -> Sequence[Tombstone]:
        """Return a model's versions that are gone, by uid."""
        ...


class ReplicaBoard(Protocol):
    """Who has which bytes: what receivers that serve on tell each other."""

    def announce_replica(self, replica: Replica) -> Sequence[Replica]:
        """Say what this generator has, in place of what it said before; returns what all have.

        Raises:
            NotFoundError, PreconditionError: the version is gone or going, the worker not alive.
            ExhaustedError: too many generators have it.
        """
        ...

    def list_replicas(self, version_id: str) -> Sequence[Replica]:
        """Return what living generators have, by (slot, worker). Raises NotFoundError."""
        ...

    def withdraw_replica(self, *, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Take back what was announced; False if there was nothing."""
        ...


@runtime_checkable
class SupportsVersionWatch(Protocol):
    """Tells of changes as they happen."""

    def watch_versions(
        self, model_name: str, *, run_id: str | None = None, after: int = 0
    ) -> Iterator[VersionChanges]:
        """Yield what a model's versions are now, then every change, until closed.

        Raises:
            ControlUnavailableError: nobody answered within the timeout, or this was closed.
        """
        ...


class ControlClient(ControlPlane, ControlKeeping, ReplicaBoard, SupportsVersionWatch, Protocol):
    """A connection to the control service: everything, and streams."""
