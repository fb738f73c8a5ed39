"""The control plane from afar: blocking calls over gRPC, errors in our terms, bounded retries.

Every call may be sent twice, so every call is retried while the service is unavailable and the
deadline has not passed; a service that restarts is survived. Reads, registrations, renewals and
reports are so by nature. A version is created under its idempotency key, a shard under
(version, slot, worker) with equal content, a state is "moved to", a description equals itself,
and an event that equals a kept one is that one. The two that say what they did answer as if the
first try had counted: a released lease says False the second time, and a shard that a retry
finds gone was deleted.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar, cast

import grpc

from paceline.core import address as addresses
from paceline.core.clock import Clock
from paceline.core.retry import RetryPolicy
from paceline.refit.control.status import error_of
from paceline.refit.errors import (
    ControlError,
    ControlUnavailableError,
    InvalidRequestError,
    NotFoundError,
)
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
from paceline.refit.wire import convert
from paceline.refit.wire import paceline_refit_v1_pb2 as own
from paceline.refit.wire import refit_pb2 as public
from paceline.refit.wire.rpc import CONTROL_RPCS, OWN_SERVICE, Message, Rpc, rpc_named

T = TypeVar("T")

REPLY_BYTES_MAX: Final = 64 * 1024 * 1024

_WATCH_VERSIONS: Final = rpc_named(OWN_SERVICE, "WatchVersions")

PATIENT: Final = RetryPolicy(attempts=100, first_delay_s=0.1, delay_s_max=1.0)
"""Retries go on until the call's deadline."""


class GrpcControlPlane:
    """Signs ControlPlane over one channel; safe to use from several threads."""

    def __init__(  # noqa: PLR0913 - each is a choice of its own, made where clients are made
        self,
        address: str,
        *,
        token: Callable[[], str],
        clock: Clock,
        chance: Callable[[], float],
        timeout_s: float = 30.0,
        retry: RetryPolicy = PATIENT,
        trusted: bytes | None = None,
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a channel; the first call connects.

        Args:
            address: ``host:port``.
            token: returns the bearer token; asked before every try, so that it may change.
            clock: for deadlines and the waits between tries.
            chance: random numbers in [0, 1) for jitter.
            timeout_s: of a whole call, retries included.
            retry: when to try again while the service is unavailable.
            trusted: PEM certificates of whom to trust, over TLS; None speaks plain text.
            on_registered: called whenever the service has taken this process's registration,
                which is its heartbeat.

        Raises:
            UsageError: ``address`` is none.
        """
        self._address = address
        self._token = token
        self._clock = clock
        self._chance = chance
        self._timeout_s = timeout_s
        self._retry = retry
        self._closed = threading.Event()
        self._on_registered = on_registered
        options = _channel_options(address)
        if trusted is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            credentials = grpc.ssl_channel_credentials(trusted)
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._senders: dict[type[Message], tuple[Rpc, Callable[..., bytes]]] = {
            rpc.request: (rpc, self._channel.unary_unary(rpc.path))
            for rpc in CONTROL_RPCS
            if not rpc.is_stream
        }
        self._watch: Callable[..., Iterator[bytes]] = self._channel.unary_stream(
            _WATCH_VERSIONS.path
        )

    def register_worker(
        self, registration: WorkerRegistration, *, ttl_seconds: int
    ) -> WorkerRegistration:
        """Register or refresh this process."""
        reply = self._call(
            lambda: public.RegisterWorkerRequest(
                worker=convert.to_worker(registration), ttl_seconds=ttl_seconds
            )
        )
        self._on_registered()
        return self._read(lambda: convert.parse_worker(reply.worker))

    def create_version(self, request: VersionRequest) -> WeightVersion:
        """Create a version, or return the one that an equal request created."""
        reply = self._call(lambda: convert.to_version_request(request))
        return self._read(lambda: convert.parse_version(reply.version))

    def get_version(self, uid: str) -> WeightVersion:
        """Return one version, with its description."""
        reply = self._call(lambda: own.GetVersionRequest(uid=uid))
        return self._read(lambda: convert.parse_record(reply.record))

    def update_version_state(self, uid: str, state: VersionState) -> WeightVersion:
        """Move a version along its life."""
        reply = self._call(
            lambda: public.UpdateWeightVersionStateRequest(
                uid=uid, state=convert.STATES.name(state)
            )
        )
        return self._read(lambda: convert.parse_version(reply.version))

    def delete_version(self, uid: str) -> WeightVersion:
        """Move a version to RELEASING."""
        reply = self._call(lambda: public.DeleteWeightVersionRequest(uid=uid))
        return self._read(lambda: convert.parse_version(reply.version))

    def create_shard(self, shard: Shard) -> WeightVersion:
        """Advertise a shard."""
        reply = self._call(
            lambda: public.CreateWeightVersionShardRequest(shard=convert.to_shard(shard))
        )
        return self._read(lambda: convert.parse_version(reply.version))

    def list_shards(self, version_id: str) -> Sequence[Shard]:
        """Return the shards sorted by (slot, worker)."""
        reply = self._call(lambda: public.ListWeightVersionShardsRequest(version_id=version_id))
        return [convert.parse_shard(shard) for shard in reply.shards]

    def delete_shard(self, *, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Evict a shard; True also if a try whose reply was lost had done it."""
        retries: list[int] = []
        try:
            reply = self._call(
                lambda: public.DeleteWeightVersionShardRequest(
                    version_id=version_id, source_slot_id=source_slot_id, worker_id=worker_id
                ),
                retries=retries,
            )
        except NotFoundError:
            if retries:
                return True
            raise
        return bool(reply.deleted)

    def acquire_lease(self, *, version_id: str, worker_id: str, ttl_seconds: int) -> Lease:
        """Take or renew this worker's hold."""
        reply = self._call(
            lambda: public.RegisterVersionLeaseRequest(
                version_id=version_id, worker_id=worker_id, ttl_seconds=ttl_seconds
            )
        )
        return convert.parse_lease(reply.lease)

    def release_lease(self, lease: Lease) -> bool:
        """Give a hold back; False if it was gone already."""
        reply = self._call(
            lambda: public.DeleteVersionLeaseRequest(
                version_id=lease.version_id, lease_id=lease.lease_id, worker_id=lease.worker_id
            )
        )
        return bool(reply.deleted)

    def list_versions(
        self, model_name: str, *, run_id: str | None = None
    ) -> Sequence[WeightVersion]:
        """Return every recorded version of a model, oldest first, with descriptions."""
        reply = self._call(lambda: own.ListVersionsRequest(model_name=model_name, run_id=run_id))
        return self._read(lambda: [convert.parse_record(record) for record in reply.records])

    def describe_version(
        self, uid: str, description: VersionDescription, *, source_slot_id: str | None = None
    ) -> WeightVersion:
        """Attach the description, once, or a slot's part of it."""
        reply = self._call(
            lambda: own.DescribeVersionRequest(
                uid=uid,
                description=convert.to_description(description),
                source_slot_id=source_slot_id,
            )
        )
        return self._read(lambda: convert.parse_record(reply.record))

    def list_leases(self, version_id: str) -> Sequence[Lease]:
        """Return the live leases of a version."""
        reply = self._call(lambda: own.ListLeasesRequest(version_id=version_id))
        return [convert.parse_lease(lease) for lease in reply.leases]

    def list_workers(self, model_name: str) -> Sequence[WorkerRegistration]:
        """Return the registrations of a model that have not expired."""
        reply = self._call(lambda: own.ListWorkersRequest(model_name=model_name))
        return self._read(lambda: [convert.parse_worker(worker) for worker in reply.workers])

    def report_installed(self, report: InstalledReport) -> None:
        """Say what this generator serves now."""
        self._call(lambda: own.ReportInstalledRequest(report=convert.to_report(report)))

    def list_installed(
        self, model_name: str, *, live_only: bool = True
    ) -> Sequence[InstalledReport]:
        """Return each generator's latest report."""
        reply = self._call(
            lambda: own.ListInstalledRequest(model_name=model_name, include_expired=not live_only)
        )
        return [convert.parse_report(report) for report in reply.reports]

    def record_event(self, event: Event) -> None:
        """Append to the run's events."""
        self._call(lambda: own.RecordEventRequest(event=convert.to_event(event)))

    def list_events(self, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Return events whose index is greater than ``after``, in order."""
        reply = self._call(lambda: own.ListEventsRequest(after=after, limit=limit))
        return self._read(lambda: [convert.parse_event(event) for event in reply.events])

    def watch_versions(
        self, model_name: str, *, run_id: str | None = None, after: int = 0
    ) -> Iterator[VersionChanges]:
        """Yield what a model's versions are now, then every change, until closed.

        A stream that breaks is opened again where it was, on whatever replica answers.

        Raises:
            ControlUnavailableError: nobody answered within the timeout, or this was closed.
        """
        failing_since: float | None = None
        tries = 0
        while not self._closed.is_set():
            request = own.WatchVersionsRequest(model_name=model_name, run_id=run_id, after=after)
            try:
                for changes in self._stream(request):
                    failing_since, tries, after = None, 0, changes.revision
                    yield changes
            except ControlUnavailableError:
                now_s = self._clock.monotonic()
                failing_since = now_s if failing_since is None else failing_since
                tries += 1
                delay_s = self._retry.delay_s(tries, chance=self._chance())
                if delay_s is None or now_s - failing_since > self._timeout_s:
                    raise
                self._clock.sleep(delay_s)

    def _stream(self, request: own.WatchVersionsRequest) -> Iterator[VersionChanges]:
        metadata = (("authorization", f"Bearer {self._token()}"),)
        try:
            for raw in self._watch(request.SerializeToString(), metadata=metadata):
                yield self._read(partial(_parse_changes, raw))
        except grpc.RpcError as exc:
            raise self._error(exc, call=_WATCH_VERSIONS.name) from exc
        except ValueError as exc:
            # What gRPC raises for a channel that was closed.
            raise ControlUnavailableError("the connection to the service was closed") from exc

    def get_chain(self, uid: str) -> Sequence[WeightVersion]:
        """Return the versions that lead to this one, a full version first."""
        reply = self._call(lambda: own.GetChainRequest(uid=uid))
        return self._read(lambda: [convert.parse_record(record) for record in reply.records])

    def record_delta(self, delta: Delta) -> Delta:
        """Say that one artefact leads from a base to a target."""
        reply = self._call(lambda: own.RecordDeltaRequest(delta=convert.to_delta(delta)))
        return convert.parse_delta(reply.delta)

    def list_deltas(self, target_version_id: str) -> Sequence[Delta]:
        """Return the artefacts that lead to a version, by base."""
        reply = self._call(lambda: own.ListDeltasRequest(target_version_id=target_version_id))
        return [convert.parse_delta(delta) for delta in reply.deltas]

    def announce_replica(self, replica: Replica) -> Sequence[Replica]:
        """Say which chunks this generator has; return what is said of that version."""
        reply = self._call(lambda: own.AnnounceReplicaRequest(replica=convert.to_replica(replica)))
        return [convert.parse_replica(each) for each in reply.replicas]

    def list_replicas(self, version_id: str) -> Sequence[Replica]:
        """Return the replicas of living generators."""
        reply = self._call(lambda: own.ListReplicasRequest(version_id=version_id))
        return [convert.parse_replica(each) for each in reply.replicas]

    def withdraw_replica(self, *, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Take back what was announced; False also if a try whose reply was lost had done it."""
        reply = self._call(
            lambda: own.WithdrawReplicaRequest(
                version_id=version_id, source_slot_id=source_slot_id, worker_id=worker_id
            )
        )
        return bool(reply.withdrawn)

    def set_retention(self, model_name: str, policy: RetentionPolicy) -> None:
        """Say which READY versions of a model stay."""
        self._call(
            lambda: own.SetRetentionRequest(
                model_name=model_name, policy=convert.to_retention(policy)
            )
        )

    def get_retention(self, model_name: str) -> RetentionPolicy:
        """Return the model's policy."""
        reply = self._call(lambda: own.GetRetentionRequest(model_name=model_name))
        return convert.parse_retention(reply.policy)

    def drain_worker(self, worker_id: str, *, resume: bool = False) -> None:
        """Let a living worker begin nothing new, or again."""
        self._call(lambda: own.DrainWorkerRequest(worker_id=worker_id, resume=resume))

    def set_pin(self, pin: Pin) -> None:
        """Say which version some generators serve, or the newest again."""
        self._call(
            lambda: own.SetPinRequest(
                model_name=pin.model_name, workers=pin.workers, version_id=pin.version_id
            )
        )

    def list_pins(self, model_name: str) -> Sequence[Pin]:
        """Return a model's pins, by pattern."""
        reply = self._call(lambda: own.ListPinsRequest(model_name=model_name))
        return self._read(lambda: [convert.parse_pin(pin) for pin in reply.pins])

    def list_tombstones(self, model_name: str) -> Sequence[Tombstone]:
        """Return a model's versions that are gone, by uid."""
        reply = self._call(lambda: own.ListTombstonesRequest(model_name=model_name))
        return self._read(lambda: [convert.parse_tombstone(t) for t in reply.tombstones])

    def close(self) -> None:
        """Give the connection back; calls under way end with ControlUnavailableError."""
        self._closed.set()
        self._channel.close()

    def _call(self, build: Callable[[], Message], *, retries: list[int] | None = None) -> Any:
        """Send a request until it is answered; append to ``retries`` for each further try."""
        request = _build(build)
        deadline = self._clock.monotonic() + self._timeout_s
        tries = 0
        while True:
            tries += 1
            try:
                return self._send(request, timeout_s=deadline - self._clock.monotonic())
            except ControlUnavailableError:
                delay_s = self._retry.delay_s(tries, chance=self._chance())
                left_s = deadline - self._clock.monotonic()
                if self._closed.is_set() or delay_s is None or delay_s >= left_s:
                    raise
                self._clock.sleep(delay_s)
                if retries is not None:
                    retries.append(tries)

    def _send(self, request: Message, *, timeout_s: float) -> Message:
        rpc, send = self._senders[type(request)]
        if self._closed.is_set():
            raise ControlUnavailableError(
                f"the connection to the control service at {self._address} was closed"
            )
        metadata = (("authorization", f"Bearer {self._token()}"),)
        try:
            raw = send(request.SerializeToString(), timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as exc:
            raise self._error(exc, call=rpc.name) from exc
        return self._read(lambda: rpc.parse_reply(raw))

    def _error(self, exc: grpc.RpcError, *, call: str) -> ControlError:
        # What a blocking call raises is the call itself, which the stubs do not say.
        failed = cast("grpc.Call", exc)
        code, details = failed.code(), failed.details()
        return error_of(code, details or "", address=self._address, call=call)

    def _read(self, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except InvalidRequestError as exc:
            raise ControlError(
                f"the control service at {self._address} answered what this release cannot read "
                f"({exc}); use the same release on both sides"
            ) from exc


def _build(build: Callable[[], Message]) -> Message:
    """Return the request. Raises InvalidRequestError for what the wire cannot hold."""
    try:
        return build()
    except InvalidRequestError:
        raise
    except (ValueError, TypeError) as exc:
        raise InvalidRequestError(f"the request cannot be sent: {exc}") from exc


def _parse_changes(raw: bytes) -> VersionChanges:
    message = cast(own.WatchVersionsResponse, _WATCH_VERSIONS.parse_reply(raw))
    return convert.parse_changes(message)


def _channel_options(address: str) -> Sequence[tuple[str, int]]:
    host, _ = addresses.split_address(address)
    return (
        ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
        # Ours alone: they know the deadline, and gRPC's would hide a restart behind long waits.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A proxy from the environment does not know our loopback.
        ("grpc.enable_http_proxy", 0 if addresses.is_loopback(host) else 1),
    )
