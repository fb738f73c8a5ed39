"""Around the calls: TLS, health, streams over replicas, limits, what is told to operators."""

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from typing import Any, cast

import grpc
import pytest

from paceline.core.errors import PreflightError
from paceline.refit import compose
from paceline.refit.control import auth
from paceline.refit.control.auth import FixedTokens, TokenRole
from paceline.refit.control.client import GrpcControlPlane
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.control.pacing import Pacing, ServiceLimits
from paceline.refit.control.service import ControlServer, ServiceOptions
from paceline.refit.control.tls import TlsFiles, issue, new_authority, read_trusted
from paceline.refit.control.worker import ManifestServer
from paceline.refit.errors import (
    AccessRefusedError,
    AlreadyExistsError,
    ControlUnavailableError,
    ExhaustedError,
    NotFoundError,
    PreconditionError,
)
from paceline.refit.model import (
    Delta,
    ObjectStorageSource,
    ObjectStorageType,
    Pin,
    RetentionPolicy,
    VersionChanges,
    VersionState,
)
from paceline.refit.wire import health_pb2, refit_pb2
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.telemetry.log import JsonFormatter
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.control import (
    DESCRIPTION,
    FULL,
    GENERATOR,
    MODEL,
    REPORT,
    SEED,
    TRAINER,
    TTL_S,
    shard_of,
)
from paceline.testing.fakes.control import TOKENS, LoopbackControl, counting

WAIT_S = 20.0
NOW = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.fixture
def service() -> Iterator[LoopbackControl]:
    made = LoopbackControl(MemoryStore(clock=FakeClock()))
    yield made
    made.stop()


class Follower:
    """A reader in a thread of its own."""

    def __init__(self, stream: Iterator[VersionChanges]) -> None:
        self.seen: Queue[VersionChanges] = Queue()
        self._thread = threading.Thread(target=self._follow, args=(stream,), daemon=True)
        self._thread.start()

    def _follow(self, stream: Iterator[VersionChanges]) -> None:
        try:
            for changes in stream:
                self.seen.put(changes)
        except ControlUnavailableError:
            return

    def until(self, done: Callable[[VersionChanges], bool]) -> VersionChanges:
        """Return the next changes that satisfy ``done``."""
        while True:
            changes = self.seen.get(timeout=WAIT_S)
            if done(changes):
                return changes

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(timeout=WAIT_S)
        assert not self._thread.is_alive()


def ready(client: GrpcControlPlane, key: str) -> str:
    """Publish a version and return its uid."""
    uid = client.create_version(replace(FULL, idempotency_key=key)).uid
    for slot in FULL.expected_source_slots:
        client.create_shard(shard_of(uid, slot))
    return uid


def test_a_stream_tells_what_is_and_then_what_changes(service: LoopbackControl) -> None:
    """First everything, then each change once; a reader resumes from the revision it saw."""
    client = service.client()
    client.register_worker(TRAINER, ttl_seconds=TTL_S)
    first = ready(client, "a")
    follower = Follower(client.watch_versions(MODEL))
    start = follower.seen.get(timeout=WAIT_S)
    assert start.reset
    assert [v.uid for v in start.versions] == [first]
    second = ready(client, "b")
    seen = follower.until(lambda c: any(v.state is VersionState.READY for v in c.versions))
    assert [v.uid for v in seen.versions] == [second]
    assert not seen.reset
    client.delete_version(first)
    assert follower.until(lambda c: bool(c.versions)).versions[0].state is VersionState.RELEASING
    resumed = next(client.watch_versions(MODEL, after=seen.revision))
    assert ([v.uid for v in resumed.versions], resumed.reset) == ([first], False)
    assert next(client.watch_versions(MODEL, after=10**6)).reset
    client.close()
    follower.join()


def test_a_stream_goes_on_at_another_replica_and_tells_what_is_gone() -> None:
    """A reader whose replica ends misses nothing that another one did meanwhile."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    one, two = LoopbackControl(store), LoopbackControl(store)
    client = two.client()
    client.register_worker(TRAINER, ttl_seconds=TTL_S)
    uid = ready(client, "a")
    follower = Follower(one.client().watch_versions(MODEL))
    start = follower.seen.get(timeout=WAIT_S)
    one.stop()
    client.delete_version(uid)
    clock.advance(10**6)
    two.ledger.reap()
    one.start()
    seen = follower.until(lambda c: uid in c.removed or c.reset)
    assert seen.revision > start.revision
    assert uid not in {v.uid for v in seen.versions}
    tombstone = client.list_tombstones(MODEL)[0]
    assert (tombstone.uid, tombstone.is_collected) == (uid, True)
    one.stop()
    two.stop()
    client.close()


def stream(channel: grpc.Channel, path: str) -> Callable[..., Iterator[bytes]]:
    """Return a call that answers with a stream."""
    call: Callable[..., Iterator[bytes]] = channel.unary_stream(path)
    return call


def test_workers_and_leases_are_streamed_as_they_come_and_go(service: LoopbackControl) -> None:
    """Who lives and who reads, again when that changes and not when something is renewed."""
    client = service.client()
    client.register_worker(TRAINER, ttl_seconds=TTL_S)
    client.register_worker(GENERATOR, ttl_seconds=TTL_S)
    uid = ready(client, "a")
    from paceline.refit.wire import paceline_refit_v1_pb2 as own

    metadata = (("authorization", f"Bearer {TOKENS[TokenRole.READER]}"),)
    with grpc.insecure_channel(service.address) as channel:
        prefix = "/paceline.refit.v1.ControlService/"
        leases: Any = stream(channel, prefix + "WatchLeases")(
            own.WatchLeasesRequest(version_id=uid).SerializeToString(),
            metadata=metadata,
            timeout=WAIT_S,
        )
        workers: Any = stream(channel, prefix + "WatchWorkers")(
            own.WatchWorkersRequest(model_name=MODEL).SerializeToString(),
            metadata=metadata,
            timeout=WAIT_S,
        )
        assert not own.WatchLeasesResponse.FromString(next(leases)).leases
        first = own.WatchWorkersResponse.FromString(next(workers))
        assert [w.worker_id for w in first.workers] == ["g-0", "t-0"]
        client.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=9)
        client.drain_worker("g-0")
        held = own.WatchLeasesResponse.FromString(next(leases))
        assert [lease.worker_id for lease in held.leases] == ["g-0"]
        assert list(own.WatchWorkersResponse.FromString(next(workers)).draining) == ["g-0"]
    client.close()


def test_pins_over_the_wire(service: LoopbackControl) -> None:
    """The operator pins, everybody sees it, and generators may not pin."""
    client, generator = service.client(), service.client(TokenRole.GENERATOR)
    client.register_worker(TRAINER, ttl_seconds=TTL_S)
    uid = ready(client, "a")
    pin = Pin(model_name=MODEL, workers="g-*", version_id=uid)
    with pytest.raises(AccessRefusedError):
        generator.set_pin(pin)
    client.set_pin(pin)
    client.set_pin(Pin(model_name=MODEL, workers="a", version_id=uid))
    assert [each.workers for each in generator.list_pins(MODEL)] == ["a", "g-*"]
    assert generator.list_pins("other") == []
    client.set_pin(Pin(model_name=MODEL, workers="a", version_id=""))
    assert generator.list_pins(MODEL) == [pin]
    for plane in (client, generator):
        plane.close()


def test_a_draining_worker_begins_nothing_new(service: LoopbackControl) -> None:
    """It may renew what it holds, and begin again when it is told so."""
    client = service.client()
    client.register_worker(TRAINER, ttl_seconds=TTL_S)
    client.register_worker(GENERATOR, ttl_seconds=TTL_S)
    held, other = ready(client, "a"), ready(client, "b")
    client.acquire_lease(version_id=held, worker_id="g-0", ttl_seconds=9)
    for worker in ("g-0", "t-0"):
        client.drain_worker(worker)
    client.acquire_lease(version_id=held, worker_id="g-0", ttl_seconds=9)
    with pytest.raises(PreconditionError, match="draining"):
        client.acquire_lease(version_id=other, worker_id="g-0", ttl_seconds=9)
    with pytest.raises(PreconditionError, match="draining"):
        ready(client, "c")
    client.drain_worker("g-0", resume=True)
    client.acquire_lease(version_id=other, worker_id="g-0", ttl_seconds=9)
    with pytest.raises(NotFoundError):
        client.drain_worker("nobody")
    client.close()


def test_chains_and_the_deltas_that_skip(service: LoopbackControl) -> None:
    """A chain ends at a full version; a delta is recorded once between two versions."""
    client = service.client()
    client.create_version(replace(SEED, uid="v0"))
    made = ["v0"]
    for n in (1, 2):
        request = replace(
            SEED,
            uid=f"v{n}",
            idempotency_key=f"k{n}",
            payload_format=compose_delta(),
            base_version_id=made[-1],
        )
        made.append(client.create_version(request).uid)
    assert [v.uid for v in client.get_chain("v2")] == made
    delta = Delta(
        base_version_id="v0", target_version_id="v2", payload_bytes=5, digest="d", uri="http://x"
    )
    kept = client.record_delta(delta)
    assert client.record_delta(delta) == kept
    assert client.list_deltas("v2") == [kept]
    with pytest.raises(AlreadyExistsError):
        client.record_delta(replace(delta, digest="other"))
    with pytest.raises(NotFoundError):
        client.record_delta(replace(delta, base_version_id="nothing"))
    client.close()


def compose_delta() -> Any:
    """Return the payload format of deltas."""
    from paceline.refit.model import WeightPayloadFormat

    return WeightPayloadFormat.XOR_DELTA


def test_a_run_never_publishes_a_sequence_twice(service: LoopbackControl) -> None:
    """A trainer that forgot where it was is told to go on, or to take a new run id."""
    client = service.client()
    uids = [client.create_version(replace(FULL, idempotency_key=str(n))).uid for n in range(4)]
    at = replace(DESCRIPTION, sequence=5)
    client.describe_version(uids[0], at)
    client.describe_version(uids[1], at)
    with pytest.raises(AlreadyExistsError, match="another root"):
        client.describe_version(uids[2], replace(at, root_digest="other"))
    with pytest.raises(PreconditionError, match="take a new run id"):
        client.describe_version(uids[2], replace(at, sequence=4))
    client.describe_version(uids[2], replace(at, sequence=6, root_digest="other"))
    client.describe_version(uids[3], replace(at, run_id="new", sequence=0))
    client.close()


def test_a_policy_retires_what_nobody_holds() -> None:
    """The newest and the leased stay READY; what went has its object removed, once."""
    clock = FakeClock()
    ledger = ControlLedger(MemoryStore(clock=clock), nonce=counting())
    ledger.register_worker(GENERATOR, ttl_seconds=10**6)
    for n in range(5):
        uri = ObjectStorageSource(uri=f"s3://b/{n}/x", storage_type=ObjectStorageType.S3)
        request = replace(SEED, uid=f"v{n}", idempotency_key=str(n), object_storage=uri)
        ledger.create_version(request)
    ledger.acquire_lease(version_id="v1", worker_id="g-0", ttl_seconds=10**6)
    policy = RetentionPolicy(keep_last=2)
    ledger.set_retention(MODEL, policy)
    assert ledger.get_retention(MODEL) == policy
    assert ledger.reap().retired == 2
    clock.advance(3600)
    ledger.reap()
    assert [v.uid for v in ledger.list_versions(MODEL)] == ["v1", "v3", "v4"]
    removed: list[str] = []
    assert ledger.collect_objects(lambda source: removed.append(source.uri)) == 2
    assert ledger.collect_objects(lambda source: removed.append(source.uri)) == 0
    assert removed == ["s3://b/0/x", "s3://b/2/x"]
    assert all(t.is_collected for t in ledger.list_tombstones(MODEL))


def check_health(address: str, name: str, credentials: grpc.ChannelCredentials | None) -> str:
    """Ask the health check without a token; return what it says, or the status of a refusal."""
    channel = (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, credentials)
    )
    with channel:
        call: Callable[..., bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            raw = call(
                health_pb2.HealthCheckRequest(service=name).SerializeToString(), timeout=WAIT_S
            )
        except grpc.RpcError as exc:
            return cast("grpc.Call", exc).code().name
    reply = health_pb2.HealthCheckResponse.FromString(raw)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def test_the_health_check_needs_no_token_and_says_when_the_service_goes(
    service: LoopbackControl,
) -> None:
    """Both services and the whole are SERVING; watchers hear of the end before it comes."""
    for name in ("", "model_express.refit.RefitService", "paceline.refit.v1.ControlService"):
        assert check_health(service.address, name, None) == "SERVING"
    assert check_health(service.address, "other", None) == "NOT_FOUND"
    with grpc.insecure_channel(service.address) as channel:
        watch: Any = stream(channel, "/grpc.health.v1.Health/Watch")(b"", timeout=WAIT_S)
        statuses = [health_pb2.HealthCheckResponse.FromString(next(watch)).status]
        service.stop()
        statuses += [health_pb2.HealthCheckResponse.FromString(raw).status for raw in watch]
    assert statuses == [1, 2]


def test_over_tls_only_who_trusts_the_run_gets_through(tmp_path: Path) -> None:
    """The right authority connects by name and address; another authority, and plain text, fail."""
    files, trusted = compose.create_certificate_files(
        tmp_path, name="run-1", hosts=["localhost", "127.0.0.1"]
    )
    tokens = tmp_path / "tokens.json"
    compose.create_token_file(tokens)
    served = compose.start_control_server(token_file=tokens, tls=files, listen="127.0.0.1:0")
    port = served.address.rpartition(":")[2]
    for address in (served.address, f"localhost:{port}"):
        plane = compose.connect_control(address, token_file=tokens, trusted_file=trusted)
        assert plane.list_versions(MODEL) == []
        plane.close()
    stranger = new_authority("other", now=NOW)
    (tmp_path / "other.crt").write_bytes(stranger.certificate)
    for wrong in (tmp_path / "other.crt", None):
        plane = compose.connect_control(
            served.address, token_file=tokens, trusted_file=wrong, timeout_s=1.0
        )
        with pytest.raises(ControlUnavailableError):
            plane.list_versions(MODEL)
        plane.close()
    credentials = grpc.ssl_channel_credentials(trusted.read_bytes())
    assert check_health(served.address, "", credentials) == "SERVING"
    served.stop()
    assert (files.key.stat().st_mode & 0o077) == 0


def test_a_replaced_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    """New connections see the new one; whoever trusts only the old one no longer gets in."""
    files, trusted = compose.create_certificate_files(tmp_path, name="a", hosts=["127.0.0.1"])
    old = trusted.read_bytes()
    ledger = ControlLedger(MemoryStore(clock=FakeClock()), nonce=counting())
    server = ControlServer(ledger, tokens=FixedTokens(TOKENS), options=ServiceOptions(tls=files))
    address = server.start()
    assert check_health(address, "", grpc.ssl_channel_credentials(old)) == "SERVING"
    compose.create_certificate_files(tmp_path, name="b", hosts=["127.0.0.1"])
    new = grpc.ssl_channel_credentials(trusted.read_bytes())
    assert check_health(address, "", new) == "SERVING"
    assert check_health(address, "", grpc.ssl_channel_credentials(old)) == "UNAVAILABLE"
    server.stop()


def test_certificates_that_do_not_fit_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """Missing files, nonsense, and another certificate's key; no message shows a key."""
    now = NOW
    authority = new_authority("a", now=now)
    one, two = (issue(authority, ["h"], now=now) for _ in range(2))
    ledger = ControlLedger(MemoryStore(clock=FakeClock()), nonce=counting())
    crt, key = tmp_path / "c.crt", tmp_path / "c.key"
    for certificate, secret, says in (
        (None, None, "cannot read"),
        (b"x", b"y", "must be a PEM"),
        (one.certificate, two.key, "is not the key"),
    ):
        if certificate is not None and secret is not None:
            auth.write_private(crt, certificate)
            auth.write_private(key, secret)
        with pytest.raises(PreflightError, match=says):
            ControlServer(
                ledger,
                tokens=FixedTokens(TOKENS),
                options=ServiceOptions(tls=TlsFiles(certificate=crt, key=key)),
            )
    assert "PRIVATE" not in repr(one)
    with pytest.raises(ValueError, match="at least one"):
        issue(authority, [], now=now)
    crt.write_text("nothing")
    with pytest.raises(PreflightError, match="no PEM"):
        read_trusted(crt)


def test_a_role_that_asks_too_often_is_slowed_down_and_others_are_not() -> None:
    """The allowance of one role's token fills up again with time."""
    pacing = Pacing(ServiceLimits(calls_per_s=10, burst_s=0.5))
    for _ in range(5):
        pacing.admit(TokenRole.READER, now_s=1.0)
    with pytest.raises(ExhaustedError, match="slow down"):
        pacing.admit(TokenRole.READER, now_s=1.0)
    pacing.admit(TokenRole.TRAINER, now_s=1.0)
    pacing.admit(TokenRole.READER, now_s=1.11)


def test_streams_and_calls_are_limited() -> None:
    """One stream too many is RESOURCE_EXHAUSTED; the others go on, ended ones are not counted."""
    service = LoopbackControl(
        MemoryStore(clock=FakeClock()), limits=ServiceLimits(streams_max=1, calls_max=1)
    )
    client = service.client()
    follower = Follower(client.watch_versions(MODEL))
    follower.seen.get(timeout=WAIT_S)
    with pytest.raises(ExhaustedError, match="streams are open"):
        next(client.watch_versions(MODEL))
    assert client.list_versions(MODEL) == []
    client.close()
    follower.join()
    service.stop()
    pacing = Pacing(ServiceLimits(calls_max=1))
    with pacing.call(), pytest.raises(ExhaustedError), pacing.call():
        pass
    with pacing.call():
        pass


def test_a_stream_ends_when_its_token_does() -> None:
    """A revoked token does not go on listening."""
    tokens = dict(TOKENS)

    class Changing:
        def role_of(self, token: str) -> TokenRole | None:
            return FixedTokens(tokens).role_of(token)

    ledger = ControlLedger(MemoryStore(clock=FakeClock()), nonce=counting())
    server = ControlServer(ledger, tokens=Changing(), options=ServiceOptions())
    client = GrpcControlPlane(
        server.start(),
        token=lambda: TOKENS[TokenRole.READER],
        clock=system_clock(),
        chance=lambda: 0.0,
    )
    changes = client.watch_versions(MODEL)
    next(changes)
    tokens[TokenRole.READER] = "another-token-altogether"
    ledger.create_version(FULL)
    with pytest.raises(AccessRefusedError):
        for _ in changes:
            pass
    client.close()
    server.stop()


def test_operators_hear_of_what_matters_as_json_without_secrets(service: LoopbackControl) -> None:
    """Refusals and changes are audited; no line holds a token; metrics count every call."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    audit = logging.getLogger("paceline.audit")
    audit.addHandler(handler)
    audit.setLevel(logging.INFO)
    try:
        service.client().create_version(FULL)
        with pytest.raises(AccessRefusedError):
            service.client(TokenRole.READER).create_version(FULL)
    finally:
        audit.removeHandler(handler)
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    assert [(line["message"], line["code"]) for line in lines] == [
        ("done", "OK"),
        ("refused", "PERMISSION_DENIED"),
    ]
    assert (lines[0]["role"], lines[0]["model_name"]) == ("operator", MODEL)
    assert not any(token in text.getvalue() for token in TOKENS.values())


def test_prometheus_reads_how_many_calls_there_were(tmp_path: Path) -> None:
    """Counts by call and status, on a port of its own."""
    import httpx

    tokens = tmp_path / "tokens.json"
    compose.create_token_file(tokens)
    served = compose.start_control_server(token_file=tokens, metrics_listen="127.0.0.1:0")
    plane = compose.connect_control(served.address, token_file=tokens)
    plane.list_versions(MODEL)
    with pytest.raises(NotFoundError):
        plane.get_version("nothing")
    text = httpx.get(f"http://{served.metrics_address}/metrics").text
    assert 'paceline_control_calls_total{call="ListVersions",code="OK"} 1.0' in text
    assert 'paceline_control_calls_total{call="GetVersion",code="NOT_FOUND"} 1.0' in text
    with pytest.raises(PreflightError, match="cannot serve metrics"):
        compose.start_control_server(token_file=tokens, metrics_listen=served.metrics_address)
    plane.close()
    served.stop()


def test_a_report_says_how_it_was_proven(service: LoopbackControl) -> None:
    """The word travels; a reader sees who serves what since when."""
    client = service.client()
    client.register_worker(GENERATOR, ttl_seconds=TTL_S)
    client.report_installed(replace(REPORT, verified="live-bytes"))
    assert client.list_installed(MODEL) == [replace(REPORT, verified="live-bytes")]
    client.close()


def test_a_trainer_hands_out_manifests(service: LoopbackControl) -> None:
    """Published bytes come back with their digest until they are withdrawn; others never."""
    server = ManifestServer()
    digest = server.publish(version_id="v", source_slot_id="s", manifest=b"m")
    assert server.publish(version_id="v", source_slot_id="s", manifest=b"m") == digest
    with pytest.raises(AlreadyExistsError):
        server.publish(version_id="v", source_slot_id="s", manifest=b"other")
    path = "/model_express.refit.RefitWorkerService/GetWeightVersionShardManifest"
    request = refit_pb2.GetWeightVersionShardManifestRequest(version_id="v", source_slot_id="s")
    with grpc.insecure_channel(server.endpoint) as channel:
        call: Any = channel.unary_unary(path)
        reply = refit_pb2.GetWeightVersionShardManifestResponse.FromString(
            call(request.SerializeToString(), timeout=WAIT_S)
        )
        assert (reply.manifest, reply.manifest_digest) == (b"m", digest)
        server.withdraw(version_id="v", source_slot_id="s")
        for raw, code in (
            (request.SerializeToString(), "NOT_FOUND"),
            (b"\xff\xff", "INVALID_ARGUMENT"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(raw, timeout=WAIT_S)
            assert cast("grpc.Call", caught.value).code().name == code
    with pytest.raises(PreflightError, match="taken"):
        ManifestServer(listen=server.endpoint)
    server.close()
    with pytest.raises(PreflightError, match="plain text"):
        ManifestServer(listen="0.0.0.0:0")
