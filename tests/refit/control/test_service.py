"""The service over real sockets: the contract, rights, hostile bytes, restarts."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import PreflightError, UsageError
from paceline.refit.control.auth import RIGHTS, FixedTokens, TokenRole
from paceline.refit.control.client import GrpcControlPlane
from paceline.refit.control.pacing import ServiceLimits
from paceline.refit.control.service import ControlServer, ServiceOptions
from paceline.refit.errors import (
    AccessRefusedError,
    ControlError,
    ControlUnavailableError,
    InvalidRequestError,
    NotFoundError,
)
from paceline.refit.model import Shard, VersionState, WorkerRegistration, WorkerRole
from paceline.refit.wire.rpc import CONTROL_RPCS, HEALTH_SERVICE, RPCS, Message, Rpc
from paceline.store.memory import MemoryStore
from paceline.store.protocol import StoreError
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.board import ReplicaBoardContract
from paceline.testing.contracts.control import (
    EVENT,
    FULL,
    GENERATOR,
    MODEL,
    TRAINER,
    TTL_S,
    ControlPlaneContract,
    shard_of,
)
from paceline.testing.fakes.control import TOKENS, LoopbackControl

CALL_TIMEOUT_S = 20.0
MESSAGE_BYTES_MAX = ServiceLimits().message_bytes_max


@pytest.fixture
def service() -> Iterator[LoopbackControl]:
    made = LoopbackControl(MemoryStore(clock=FakeClock()))
    yield made
    made.stop()


class TestOverGrpc(ControlPlaneContract, ReplicaBoardContract):
    @pytest.fixture(autouse=True)
    def _services(self) -> Iterator[None]:
        self._made: list[LoopbackControl] = []
        yield
        for service in self._made:
            service.stop()

    def make(self, clock: FakeClock) -> GrpcControlPlane:
        service = LoopbackControl(MemoryStore(clock=clock))
        self._made.append(service)
        return service.client()


def send(
    address: str, path: str, raw: bytes, token: str | None
) -> tuple[grpc.StatusCode, str | None, bytes]:
    """Make one raw call and return its status, details and reply."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        try:
            if path in RPCS and RPCS[path].is_stream:
                stream: Callable[..., Iterator[bytes]] = channel.unary_stream(path)
                reply = next(stream(raw, timeout=CALL_TIMEOUT_S, metadata=metadata))
            else:
                call: Callable[..., bytes] = channel.unary_unary(path)
                reply = call(raw, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as exc:
            failed = cast("grpc.Call", exc)
            return failed.code(), failed.details(), b""
        return grpc.StatusCode.OK, "", reply


def test_nobody_gets_in_without_the_right_token(service: LoopbackControl) -> None:
    """Every call but the health check is UNAUTHENTICATED without a token or with a wrong one."""
    paths = [path for path, rpc in RPCS.items() if rpc.service != HEALTH_SERVICE]
    for path in [*paths, "/model_express.refit.RefitService/Unknown", "/x/y"]:
        for token in (None, "token-of-a-test-", "x" * 1000):
            code, _, _ = send(service.address, path, b"", token)
            assert code is grpc.StatusCode.UNAUTHENTICATED, (path, token)


@pytest.mark.parametrize("role", TokenRole)
def test_each_role_may_do_what_the_table_says_and_no_more(
    service: LoopbackControl, role: TokenRole
) -> None:
    """Every call is PERMISSION_DENIED exactly for the roles that lack the right."""
    for rpc in CONTROL_RPCS:
        code, _, _ = send(service.address, rpc.path, b"", TOKENS[role])
        is_denied = code is grpc.StatusCode.PERMISSION_DENIED
        assert is_denied is (rpc.name not in RIGHTS[role]), rpc.path


def test_every_call_of_the_descriptors_is_served(service: LoopbackControl) -> None:
    """An empty message to any call is answered, mostly as a malformed request, never ignored."""
    for rpc in CONTROL_RPCS:
        code, _, _ = send(service.address, rpc.path, b"", TOKENS[TokenRole.OPERATOR])
        assert code is grpc.StatusCode.INVALID_ARGUMENT, rpc.path


def test_an_unknown_call_is_unimplemented_for_those_who_may_enter(service: LoopbackControl) -> None:
    """Only the worker service has GetWeightVersionShardManifest, and nobody has Unknown."""
    for path in ("/x/GetVersion", "/model_express.refit.RefitWorkerService/GetWeightVersion"):
        code, _, _ = send(service.address, path, b"", TOKENS[TokenRole.OPERATOR])
        assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("token", "worker"),
    [
        (TokenRole.TRAINER, replace(TRAINER, role=WorkerRole.GENERATOR)),
        (TokenRole.GENERATOR, TRAINER),
    ],
    ids=["trainer", "generator"],
)
def test_nobody_registers_as_what_the_token_is_not(
    service: LoopbackControl, token: TokenRole, worker: WorkerRegistration
) -> None:
    """A trainer's token registers trainers only, a generator's generators only."""
    with pytest.raises(AccessRefusedError, match="may not register"):
        service.client(token).register_worker(worker, ttl_seconds=1)
    assert service.ledger.list_workers(MODEL) == []


def test_errors_never_contain_the_token(service: LoopbackControl) -> None:
    """What a refused client is told says what to do and shows no secret."""
    client = GrpcControlPlane(
        service.address,
        token=lambda: "a-wrong-secret",
        clock=FakeClock(),
        chance=lambda: 0.0,
    )
    with pytest.raises(AccessRefusedError, match="token is missing or unknown") as caught:
        client.get_version("v")
    assert "secret" not in str(caught.value)
    client.close()


TEXTS = st.sampled_from(["", " ", "v", "t-0", "\u20ac", "{}", '{"a":NaN}', "[" * 9999, "a/b"])
NUMBERS = st.sampled_from([0, 1, 2, 3, 9, 2**31 - 1])


def values_of(field: FieldDescriptor) -> st.SearchStrategy[object]:
    """Return plausible and senseless values of a message field."""
    if field.message_type is not None:
        one: st.SearchStrategy[object] = messages_of(field.message_type)
    elif field.type == FieldDescriptor.TYPE_STRING:
        one = TEXTS
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = st.binary(max_size=8)
    elif field.type == FieldDescriptor.TYPE_DOUBLE:
        one = st.floats()
    else:
        one = NUMBERS
    return st.lists(one, max_size=3) if field.is_repeated else one


def messages_of(kind: Descriptor) -> st.SearchStrategy[Message]:
    """Return messages of a kind with any of their fields set to anything."""
    optional = {field.name: values_of(field) for field in kind.fields}
    build = message_factory.GetMessageClass(kind)
    return st.fixed_dictionaries({}, optional=optional).map(lambda fields: build(**fields))


def requests_of(rpc: Rpc) -> st.SearchStrategy[tuple[Rpc, bytes]]:
    """Return serialised requests: well-formed with any content, cut short, or plain noise."""
    kind = cast(Descriptor, rpc.request.DESCRIPTOR)
    whole = messages_of(kind).map(lambda message: message.SerializeToString())
    cut = st.tuples(whole, st.integers(0, 40)).map(lambda pair: pair[0][: pair[1]])
    noise = st.binary(max_size=100)
    return st.tuples(st.just(rpc), st.one_of(whole, cut, noise))


@pytest.fixture(scope="module")
def shared_service() -> Iterator[LoopbackControl]:
    made = LoopbackControl(MemoryStore(clock=FakeClock()))
    yield made
    made.stop()


@given(request=st.sampled_from(CONTROL_RPCS).flatmap(requests_of))
@settings(max_examples=200, deadline=None)
def test_no_request_makes_it_fail_or_hang(
    shared_service: LoopbackControl, request: tuple[Rpc, bytes]
) -> None:
    """Whatever is sent, the answer is a refusal that blames the request, or success."""
    rpc, raw = request
    code, details, _ = send(shared_service.address, rpc.path, raw, TOKENS[TokenRole.OPERATOR])
    assert code in {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
    }, details


def test_a_message_over_the_limit_is_refused(service: LoopbackControl) -> None:
    """Four MiB and more never reach the parser, and the service goes on."""
    path = "/model_express.refit.RefitService/GetWeightVersion"
    token = TOKENS[TokenRole.OPERATOR]
    code, _, _ = send(service.address, path, b"\0" * (MESSAGE_BYTES_MAX + 1), token)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert send(service.address, path, b"\x0a\x01v", token)[0] is grpc.StatusCode.NOT_FOUND


def test_long_names_do_not_break_the_error_they_appear_in(service: LoopbackControl) -> None:
    """An error about a thousand exotic characters still arrives as that error."""
    with pytest.raises(NotFoundError):
        service.client().get_version("\U0010ffff" * 1024)


def test_a_taken_port_is_an_error_that_says_so(service: LoopbackControl) -> None:
    """Two services never share a port; the message names it and the way out."""
    port = service.address.rpartition(":")[2]
    second = ControlServer(
        service.ledger, tokens=FixedTokens(TOKENS), options=ServiceOptions(listen=service.address)
    )
    with pytest.raises(PreflightError, match=f"port {port} is taken.*--listen"):
        second.start()
    second.stop()
    assert service.client().list_versions(MODEL) == []


@pytest.mark.parametrize("listen", ["", "8001", "host:", ":1", "127.0.0.1:99999", "a:b"])
def test_an_address_that_is_none_is_a_usage_error(service: LoopbackControl, listen: str) -> None:
    """A malformed address is refused before anything starts."""
    with pytest.raises(UsageError, match="write host:port"):
        ControlServer(
            service.ledger, tokens=FixedTokens(TOKENS), options=ServiceOptions(listen=listen)
        )


def test_plain_text_stays_on_this_computer_unless_allowed(service: LoopbackControl) -> None:
    """Other addresses are refused; saying so explicitly admits them."""
    tokens = FixedTokens(TOKENS)
    with pytest.raises(PreflightError, match="plain text"):
        ControlServer(service.ledger, tokens=tokens, options=ServiceOptions(listen="0.0.0.0:0"))
    ControlServer(
        service.ledger,
        tokens=tokens,
        options=ServiceOptions(listen="0.0.0.0:0", allow_plaintext=True),
    )
    ControlServer(service.ledger, tokens=tokens, options=ServiceOptions(listen="[::1]:0"))


def test_a_client_rides_out_a_restart(service: LoopbackControl) -> None:
    """A call made while the service is down is answered once it is back; nothing happens twice."""
    client = service.client()
    client.register_worker(TRAINER, ttl_seconds=TTL_S)
    service.stop()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.create_version, FULL)
        service.start()
        version = pending.result(timeout=CALL_TIMEOUT_S)
    assert [v.uid for v in client.list_versions(MODEL)] == [version.uid]
    client.close()


def test_a_service_that_stays_away_is_unavailable_within_the_deadline(
    service: LoopbackControl,
) -> None:
    """Retries end with the call's deadline, and the message names address and remedy."""
    client = service.client(timeout_s=0.5)
    service.stop()
    with pytest.raises(ControlUnavailableError, match=f"{service.address}.*check that it runs"):
        client.get_version("v")
    client.close()


def test_a_closed_client_says_so(service: LoopbackControl) -> None:
    """After close every call fails at once; closing again is fine."""
    client = service.client()
    client.list_versions(MODEL)
    client.close()
    client.close()
    with pytest.raises(ControlUnavailableError, match="was closed"):
        client.list_versions(MODEL)


def test_many_threads_share_one_client(service: LoopbackControl) -> None:
    """Calls from several threads at once all arrive, each event under its own index."""
    client = service.client()
    gate = threading.Barrier(8)

    def record(worker: int) -> None:
        gate.wait(timeout=10)
        for n in range(10):
            client.record_event(replace(EVENT, worker_id=f"w{worker}", at_unix_ms=n))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(record, range(8)))
    assert [event.index for event in client.list_events()] == list(range(1, 81))
    client.close()


class LosingLedgerStore(MemoryStore):
    """A store whose commit works and is then reported as failed, as if the reply were lost."""

    losses = 0

    def commit(self, **kwargs: object) -> None:
        """Commit, and raise if a loss is due."""
        super().commit(**kwargs)  # type: ignore[arg-type]
        if self.losses:
            self.losses -= 1
            raise StoreError("the reply was lost")


def test_every_call_survives_losing_its_first_reply() -> None:
    """Retried calls have the effect of one and report success."""
    store = LosingLedgerStore(clock=FakeClock())
    service = LoopbackControl(store)
    client = service.client()

    def losing(times: int = 1) -> None:
        store.losses = times

    losing()
    client.register_worker(TRAINER, ttl_seconds=TTL_S)
    client.register_worker(GENERATOR, ttl_seconds=TTL_S)
    losing()
    uid = client.create_version(FULL).uid
    for slot in FULL.expected_source_slots:
        losing()
        version = client.create_shard(shard_of(uid, slot))
    assert version.state is VersionState.READY
    losing()
    lease = client.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=10)
    losing()
    assert client.release_lease(lease) is False
    losing()
    client.delete_version(uid)
    losing()
    assert client.delete_shard(version_id=uid, source_slot_id="rank-0", worker_id="t-0")
    losing()
    client.record_event(EVENT)
    assert len(client.list_events()) == 1
    assert len(client.list_shards(uid)) == 1
    with pytest.raises(NotFoundError):
        client.delete_shard(version_id=uid, source_slot_id="rank-0", worker_id="t-0")
    client.close()
    service.stop()


def test_a_damaged_store_is_told_as_such_and_not_retried() -> None:
    """INTERNAL becomes a ControlError that names the call; the service stays up."""
    store = MemoryStore(clock=FakeClock())
    store.commit(expect={}, writes={"version/v": b"{}"})
    service = LoopbackControl(store)
    client = service.client()
    with pytest.raises(ControlError, match=r"INTERNAL.*cannot be read") as caught:
        client.get_version("v")
    assert not isinstance(caught.value, ControlUnavailableError)
    client.close()
    service.stop()


def test_what_the_wire_cannot_hold_is_refused_before_it_is_sent(service: LoopbackControl) -> None:
    """A count below zero is an InvalidRequestError of the client."""
    client = service.client()
    shard: Shard = replace(shard_of("v"), tensor_count=-1)
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        client.create_shard(shard)
    client.close()


def test_expired_records_are_removed_in_the_background() -> None:
    """The service reaps by itself."""
    clock = FakeClock()
    removed = threading.Event()

    class Watching(MemoryStore):
        def commit(self, **kwargs: object) -> None:
            super().commit(**kwargs)  # type: ignore[arg-type]
            if self.get("worker/t-0") is None:
                removed.set()

    service = LoopbackControl(Watching(clock=clock))
    service.stop()
    service.ledger.register_worker(TRAINER, ttl_seconds=1)
    clock.advance(1)
    server = ControlServer(
        service.ledger, tokens=FixedTokens(TOKENS), options=ServiceOptions(reap_interval_s=0.01)
    )
    server.start()
    assert removed.wait(timeout=CALL_TIMEOUT_S)
    server.stop()
