"""A control plane for engines that see a bucket and nothing else: read-only, without leases.

What a commit names stays for as long as the publisher's retention says; an engine that is slower
than that finds its version gone and takes a newer one. Nobody hears what such an engine reports.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn

from paceline.core.clock import Clock
from paceline.refit.errors import (
    ControlUnavailableError,
    FetchError,
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
    WeightVersion,
    WorkerRegistration,
)

Found = Sequence[tuple[WeightVersion, Sequence[Shard]]]


class BucketControl:
    """Signs ControlPlane for a receiver."""

    def __init__(
        self, newest: Callable[[], Found], *, clock: Clock, look_every_s: float = 2.0
    ) -> None:
        """Follow commits.

        Args:
            newest: returns the committed versions with their shards; may raise FetchError.
            clock: paces and dates.
            look_every_s: how often the bucket is asked; a request costs money.
        """
        self._newest = newest
        self._clock = clock
        self._look_every_s = look_every_s
        self._look_at = clock.monotonic()
        self._found: Found = ()

    def register_worker(
        self, registration: WorkerRegistration, *, ttl_seconds: int
    ) -> WorkerRegistration:
        """Return it: there is nobody to register with."""
        return registration

    def get_version(self, uid: str) -> WeightVersion:
        """Return one committed version. Raises NotFoundError."""
        return self._entry(uid)[0]

    def list_versions(
        self, model_name: str, *, run_id: str | None = None
    ) -> Sequence[WeightVersion]:
        """Return what the newest commit names, looking again when it is time."""
        self._look()
        return [
            version
            for version, _ in self._found
            if version.model_name == model_name
            and (
                run_id is None
                or (version.description is not None and version.description.run_id == run_id)
            )
        ]

    def list_shards(self, version_id: str) -> Sequence[Shard]:
        """Return where a version's manifests are. Raises NotFoundError."""
        return list(self._entry(version_id)[1])

    def acquire_lease(self, *, version_id: str, worker_id: str, ttl_seconds: int) -> Lease:
        """Return a lease that holds nothing. Raises NotFoundError."""
        self._entry(version_id)
        expires_s = self._clock.time() + ttl_seconds
        return Lease(
            lease_id=f"{version_id}/{worker_id}",
            version_id=version_id,
            worker_id=worker_id,
            expires_at_unix_ms=int(expires_s * 1000),
        )

    def release_lease(self, lease: Lease) -> bool:
        """Return False: it held nothing."""
        return False

    def list_leases(self, version_id: str) -> Sequence[Lease]:
        """Return none."""
        return ()

    def list_workers(self, model_name: str) -> Sequence[WorkerRegistration]:
        """Return none."""
        return ()

    def report_installed(self, report: InstalledReport) -> None:
        """Tell nobody."""

    def list_installed(
        self, model_name: str, *, live_only: bool = True
    ) -> Sequence[InstalledReport]:
        """Return none."""
        return ()

    def list_pins(self, model_name: str) -> Sequence[Pin]:
        """Return none."""
        return ()

    def record_event(self, event: Event) -> None:
        """Tell nobody."""

    def list_events(self, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Return none."""
        return ()

    def close(self) -> None:
        """Nothing to give back."""

    def create_version(self, request: VersionRequest) -> WeightVersion:
        """Refuse. Raises PreconditionError."""
        self._refuse()

    def update_version_state(self, uid: str, state: VersionState) -> WeightVersion:
        """Refuse. Raises PreconditionError."""
        self._refuse()

    def delete_version(self, uid: str) -> WeightVersion:
        """Refuse. Raises PreconditionError."""
        self._refuse()

    def create_shard(self, shard: Shard) -> WeightVersion:
        """Refuse. Raises PreconditionError."""
        self._refuse()

    def delete_shard(self, *, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Refuse. Raises PreconditionError."""
        self._refuse()

    def describe_version(
        self, uid: str, description: VersionDescription, *, source_slot_id: str | None = None
    ) -> WeightVersion:
        """Refuse. Raises PreconditionError."""
        self._refuse()

    def _look(self) -> None:
        if self._clock.monotonic() < self._look_at:
            return
        try:
            self._found = self._newest()
        except FetchError as exc:
            raise ControlUnavailableError(str(exc)) from exc
        self._look_at = self._clock.monotonic() + self._look_every_s

    def _entry(self, uid: str) -> tuple[WeightVersion, Sequence[Shard]]:
        for version, shards in self._found:
            if version.uid == uid:
                return version, shards
        raise NotFoundError(f"version {uid} is not committed (any more)")

    def _refuse(self) -> NoReturn:
        raise PreconditionError("a bucket is followed, not written to, by engines")
