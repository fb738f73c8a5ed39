"""The control service: both protocols and the health check over grpc.aio, in a thread of its own.

The event loop only moves bytes, checks tokens and counts; requests are parsed, decided and
rendered by the desk's threads. A call is refused before its body is read if the token does not
allow it, and bodies are parsed here instead of inside gRPC, which would answer malformed ones
with INTERNAL.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeAlias, cast

import grpc
import grpc.aio

from paceline.core import address
from paceline.core.errors import PacelineError, PreflightError
from paceline.refit.control import auth, health
from paceline.refit.control.auth import TokenRole, Tokens
from paceline.refit.control.calls import CALLS
from paceline.refit.control.desk import Desk
from paceline.refit.control.hints import keys_of
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.control.pacing import Pacing, ServiceLimits
from paceline.refit.control.status import code_of, details_of
from paceline.refit.control.tls import TlsFiles, server_credentials
from paceline.refit.control.watching import WATCHES, Watching, pause
from paceline.refit.model import ObjectStorageSource
from paceline.refit.wire import refit_pb2
from paceline.refit.wire.convert import ROLES
from paceline.refit.wire.rpc import HEALTH_SERVICE, RPCS, Message, Rpc

START_TIMEOUT_S: Final = 30.0
REAP_INTERVAL_S: Final = 5.0

_LOG = logging.getLogger(__name__)
_AUDIT = logging.getLogger("paceline.audit")

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Answer = Callable[[bytes, Context], Awaitable[bytes]]
Stream = Callable[[bytes, Context], AsyncIterator[bytes]]
Observe = Callable[[str, str, float], None]
"""Hears of every call that was answered: its name, its status, how many seconds it took."""
Collect = Callable[[ObjectStorageSource], None]
"""Removes an object-storage version whose record is gone; may be told of one twice."""


def _observe_nothing(name: str, code: str, seconds: float) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How the service listens, and what it tells and to whom."""

    listen: str = "127.0.0.1:0"
    """``host:port``; port 0 takes a free one."""
    tls: TlsFiles | None = None
    allow_plaintext: bool = False
    """Admit an address that other machines reach, without TLS."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    reap_interval_s: float = REAP_INTERVAL_S
    observe: Observe = _observe_nothing
    collect: Collect | None = None
    """None: objects of versions that are gone stay where they are."""


class Router(grpc.GenericRpcHandler):
    """Finds the handler of a call, which is a refusal unless the caller may make it now."""

    def __init__(
        self, ledger: ControlLedger, desk: Desk, *, tokens: Tokens, options: ServiceOptions
    ) -> None:
        self._ledger = ledger
        self._desk = desk
        self._options = options
        self._pacing = Pacing(options.limits)
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[tuple[str, TokenRole], grpc.RpcMethodHandler[bytes, bytes]] = {}
        self._tokens = tokens
        self.watching = Watching(ledger, desk)
        self.health = health.Health()

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """Return the handler, or None for a call that nobody may make because there is none."""
        path = handler_call_details.method
        if path.startswith(f"/{HEALTH_SERVICE}/"):
            # Balancers and probes have no token, and learn nothing but that somebody is here.
            return self.health.handler(path)
        name = path.rpartition("/")[2]
        metadata = handler_call_details.invocation_metadata
        try:
            role = auth.authorize(name, metadata, tokens=self._tokens)
            self._pacing.admit(role, now_s=self._loop.time())
        except PacelineError as exc:
            _AUDIT.warning("refused", extra={"call": path, "code": code_of(exc).name})
            return _refusal(exc)
        found = self._handlers.get((path, role))
        if found is None and (path in CALLS or path in WATCHES):
            found = self._handlers[path, role] = self._handler(RPCS[path], role)
        return found

    def _handler(self, rpc: Rpc, role: TokenRole) -> "grpc.RpcMethodHandler[bytes, bytes]":
        if rpc.is_stream:
            return _stream_handler(self._watch(rpc))
        return _handler(self._answer(rpc, role))

    def _answer(self, rpc: Rpc, role: TokenRole) -> Answer:
        is_audited = rpc.name in AUDITED

        async def answer(raw: bytes, context: Context) -> bytes:
            start_s = self._loop.time()
            decision = _Decision(self._ledger, rpc, role, raw)
            try:
                with self._pacing.call():
                    reply = await self._desk.run(decision.decide, prepare=decision.prepare)
            except PacelineError as exc:
                code = code_of(exc).name
                self._options.observe(rpc.name, code, self._loop.time() - start_s)
                if is_audited:
                    _AUDIT.info("refused", extra=decision.told(code))
                await _abort(context, exc)
            self._options.observe(rpc.name, "OK", self._loop.time() - start_s)
            if is_audited:
                _AUDIT.info("done", extra=decision.told("OK"))
            return reply

        return answer

    def _watch(self, rpc: Rpc) -> Stream:
        async def watch(raw: bytes, context: Context) -> AsyncIterator[bytes]:
            def still_allowed() -> None:
                metadata = context.invocation_metadata() or ()
                auth.authorize(rpc.name, metadata, tokens=self._tokens)

            try:
                request = rpc.parse_request(raw)
                with self._pacing.stream():
                    async for reply in self.watching.follow(rpc, request, still_allowed):
                        yield reply
            except PacelineError as exc:
                await _abort(context, exc)

        return watch


AUDITED: Final = frozenset(
    {
        "CreateWeightVersion",
        "UpdateWeightVersionState",
        "DeleteWeightVersion",
        "DeleteWeightVersionShard",
        "DescribeVersion",
        "SetRetention",
        "DrainWorker",
        "SetPin",
    }
)
"""Calls that change what others see, and are rare enough to be told one by one."""

SUBJECTS: Final = ("uid", "version_id", "worker_id", "model_name")
"""Fields of requests that say what a call is about."""


class _Decision:
    """One call on its way over the desk."""

    __slots__ = ("_ledger", "_raw", "_request", "_role", "_rpc")

    _request: Message | None

    def __init__(self, ledger: ControlLedger, rpc: Rpc, role: TokenRole, raw: bytes) -> None:
        self._ledger = ledger
        self._rpc = rpc
        self._role = role
        self._raw = raw
        self._request = None

    def told(self, code: str) -> dict[str, str]:
        """Return what an auditor needs to know: who did what to whom, and what came of it."""
        subjects = {
            name: value
            for name in SUBJECTS
            if isinstance(value := getattr(self._request, name, None), str) and value
        }
        return {"call": self._rpc.path, "role": self._role, "code": code, **subjects}

    def prepare(self) -> Sequence[str]:
        """Read the request, and return what it will need of the store."""
        request = self._request = self._rpc.parse_request(self._raw)
        _check_registration(self._role, request)
        return keys_of(self._rpc, request)

    def decide(self) -> bytes:
        """Return the reply."""
        return CALLS[self._rpc.path](self._ledger, self._request).SerializeToString()


def _handler(answer: Answer) -> "grpc.RpcMethodHandler[bytes, bytes]":
    # The stubs know the blocking form of a handler only.
    return grpc.unary_unary_rpc_method_handler(cast(Callable[..., bytes], answer))


def _stream_handler(stream: Stream) -> "grpc.RpcMethodHandler[bytes, bytes]":
    return grpc.unary_stream_rpc_method_handler(cast("Callable[..., Iterator[bytes]]", stream))


def _refusal(error: PacelineError) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Return what refuses a call of any kind: to the wire a stream that fails at once is one."""

    async def refuse(raw: bytes, context: Context) -> bytes:
        await _abort(context, error)

    return _handler(refuse)


async def _abort(context: Context, error: PacelineError) -> NoReturn:
    await context.abort(code_of(error), details_of(error))


def _check_registration(role: TokenRole, request: Message) -> None:
    """Raise AccessRefusedError if the request registers what its sender is not."""
    if isinstance(request, refit_pb2.RegisterWorkerRequest) and request.HasField("worker"):
        auth.require_may_register(role, ROLES.member(request.worker.role))


class ControlServer:
    """The service in a background thread, from ``start`` to ``stop``."""

    def __init__(
        self, ledger: ControlLedger, *, tokens: Tokens, options: ServiceOptions | None = None
    ) -> None:
        """Prepare; nothing is bound yet.

        Args:
            ledger: stays the caller's to close, after ``stop``.
            tokens: who may call what.
            options: where to listen, TLS, limits.

        Raises:
            UsageError: ``listen`` is no address.
            PreflightError: other machines would reach it in plain text, or TLS files are unfit.
        """
        self._options = options or ServiceOptions()
        listen = self._options.listen
        if self._options.tls is None and not self._options.allow_plaintext:
            address.require_loopback(listen, why="tokens would travel")
        self._host, self._port = address.split_address(listen)
        tls = self._options.tls
        self._credentials = None if tls is None else server_credentials(tls)
        self._ledger = ledger
        self._tokens = tokens
        self._grace_s = self._drain_s = 0.0
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serve, and return the address with the real port; once per object.

        Raises:
            PreflightError: the port is taken or may not be bound.
        """
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="control-service", daemon=True
        )
        self._thread.start()
        return started.result(timeout=START_TIMEOUT_S)

    def stop(self, grace_s: float = 2.0, *, drain_s: float = 0.0) -> None:
        """Refuse new calls, give running ones ``grace_s`` and end the thread; idempotent.

        For ``drain_s`` before that the health check says NOT_SERVING and streams end, while
        calls are still answered: long enough for a balancer to look elsewhere.
        """
        if self._running is not None:
            loop, stopping = self._running
            self._running = None
            self._grace_s, self._drain_s = grace_s, drain_s
            loop.call_soon_threadsafe(stopping.set)
        if self._thread is not None:
            self._thread.join(timeout=grace_s + drain_s + START_TIMEOUT_S)

    def _run(self, started: "Future[str]") -> None:
        try:
            asyncio.run(self._serve(started))
        except Exception as exc:  # noqa: BLE001 - the last frame of a thread
            # Whoever waits in start() must hear of it; later there is nobody but the log.
            if started.done():
                _LOG.exception("the control service ended")
            else:
                started.set_exception(exc)

    async def _serve(self, started: "Future[str]") -> None:
        desk = Desk(self._ledger.group, threads=self._ledger.threads)
        router = Router(self._ledger, desk, tokens=self._tokens, options=self._options)
        server = grpc.aio.server(options=_options(self._options.limits))
        server.add_generic_rpc_handlers((router,))
        port = self._bind(server)
        desk.start()
        try:
            await server.start()
            stopping = asyncio.Event()
            self._running = asyncio.get_running_loop(), stopping
            started.set_result(address.join_address(self._host, port))
            await self._reap_until(stopping, desk)
            router.health.stop()
            router.watching.stop()
            await pause(asyncio.Event(), self._drain_s)
            await server.stop(self._grace_s)
        finally:
            desk.stop()

    def _bind(self, server: grpc.aio.Server) -> int:
        wanted = address.join_address(self._host, self._port)
        try:
            if self._credentials is None:
                return server.add_insecure_port(wanted)
            return server.add_secure_port(wanted, self._credentials)
        except RuntimeError as exc:
            raise PreflightError(
                f"cannot listen on {wanted}: port {self._port} is taken or may not be used here; "
                f"stop what uses it, or choose another with --listen HOST:PORT (port 0: any free)"
            ) from exc

    async def _reap_until(self, stopping: asyncio.Event, desk: Desk) -> None:
        """Reap now and then until ``stopping``; trouble is logged, the next pass tries again."""
        while True:
            try:
                await asyncio.wait_for(stopping.wait(), timeout=self._options.reap_interval_s)
            except TimeoutError:
                try:
                    await self._reap(desk, stopping)
                except PacelineError as exc:
                    _LOG.warning("cannot remove expired records now: %s", exc)
            else:
                return

    async def _reap(self, desk: Desk, stopping: asyncio.Event) -> None:
        steps = self._ledger.sweep()
        while not stopping.is_set() and await desk.run(lambda: next(steps, None)) is not None:
            pass
        if self._options.collect is not None:
            # It waits for somebody else's store of objects, so it has no place at the desk.
            await asyncio.to_thread(self._ledger.collect_objects, self._options.collect)


def _options(limits: ServiceLimits) -> tuple[tuple[str, int], ...]:
    return (
        # By default two services share a port in silence, and each gets some of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        # Replies that can grow are bounded by the ledger.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", limits.streams_max + limits.calls_max),
    )
