"""The control service: both protocols over grpc.aio, in a thread of its own.

The event loop only moves bytes and checks tokens; the ledger blocks, so it runs in a pool.
A call is refused before its body is read if the token does not allow it, and bodies are parsed
here instead of inside gRPC, which would answer malformed ones with INTERNAL.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NoReturn, cast

import grpc
import grpc.aio

from paceline.core.errors import PacelineError, PreflightError
from paceline.refit.control import address, auth
from paceline.refit.control.auth import TokenRole, Tokens
from paceline.refit.control.calls import CALLS
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.control.status import code_of, details_of
from paceline.refit.wire import refit_pb2
from paceline.refit.wire.convert import ROLES
from paceline.refit.wire.rpc import RPCS, Message, Rpc

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a request. Replies have no limit here: those that can grow are bounded by the ledger."""
CALLS_MAX: Final = 256
"""Answered at the same time; gRPC refuses more with RESOURCE_EXHAUSTED."""
THREADS: Final = 8
START_TIMEOUT_S: Final = 30.0
REAP_INTERVAL_S: Final = 5.0

_OPTIONS: Final = (
    # By default two services share a port in silence, and each gets some of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
)

_LOG = logging.getLogger(__name__)

Answer = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]


class Router(grpc.GenericRpcHandler):
    """Finds the handler of a call, which is a refusal unless the caller's token allows it."""

    def __init__(self, ledger: ControlLedger, *, tokens: Tokens, pool: ThreadPoolExecutor) -> None:
        self._ledger = ledger
        self._tokens = tokens
        self._pool = pool

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """Return the handler, or None for a call that nobody may make because there is none."""
        path = handler_call_details.method
        name = path.rpartition("/")[2]
        try:
            role = auth.authorize(
                name, handler_call_details.invocation_metadata, tokens=self._tokens
            )
        except PacelineError as exc:
            return _handler(_refusal(exc))
        return _handler(self._answer(RPCS[path], role)) if path in CALLS else None

    def _answer(self, rpc: Rpc, role: TokenRole) -> Answer:
        async def answer(raw: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
            loop = asyncio.get_running_loop()
            try:
                request = rpc.parse_request(raw)
                _check_registration(role, request)
                reply = await loop.run_in_executor(
                    self._pool, CALLS[rpc.path], self._ledger, request
                )
            except PacelineError as exc:
                await _abort(context, exc)
            return reply.SerializeToString()

        return answer


def _handler(answer: Answer) -> "grpc.RpcMethodHandler[bytes, bytes]":
    # The stubs know the blocking form of a handler only.
    return grpc.unary_unary_rpc_method_handler(cast(Callable[..., bytes], answer))


def _refusal(error: PacelineError) -> Answer:
    async def refuse(raw: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        await _abort(context, error)

    return refuse


async def _abort(
    context: "grpc.aio.ServicerContext[bytes, bytes]", error: PacelineError
) -> NoReturn:
    await context.abort(code_of(error), details_of(error))


def _check_registration(role: TokenRole, request: Message) -> None:
    """Raise AccessRefusedError if the request registers what its sender is not."""
    if isinstance(request, refit_pb2.RegisterWorkerRequest) and request.HasField("worker"):
        auth.require_may_register(role, ROLES.member(request.worker.role))


class ControlServer:
    """The service in a background thread, from ``start`` to ``stop``."""

    def __init__(
        self,
        ledger: ControlLedger,
        *,
        tokens: Tokens,
        listen: str = "127.0.0.1:0",
        allow_plaintext: bool = False,
        reap_interval_s: float = REAP_INTERVAL_S,
    ) -> None:
        """Prepare; nothing is bound yet.

        Args:
            ledger: stays the caller's to close, after ``stop``.
            tokens: who may call what.
            listen: ``host:port``; port 0 takes a free one.
            allow_plaintext: admit an address that other machines reach, without TLS.
            reap_interval_s: how often the ledger removes what has expired.

        Raises:
            UsageError: ``listen`` is no address.
            PreflightError: other machines would reach it in plain text.
        """
        if not allow_plaintext:
            address.require_loopback(listen, why="tokens would travel")
        self._host, self._port = address.split_address(listen)
        self._ledger = ledger
        self._tokens = tokens
        self._reap_interval_s = reap_interval_s
        self._grace_s = 0.0
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

    def stop(self, grace_s: float = 2.0) -> None:
        """Refuse new calls, give running ones ``grace_s`` and end the thread; idempotent."""
        if self._running is not None:
            loop, stopping = self._running
            self._running = None
            self._grace_s = grace_s
            loop.call_soon_threadsafe(stopping.set)
        if self._thread is not None:
            self._thread.join(timeout=grace_s + START_TIMEOUT_S)

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
        with ThreadPoolExecutor(THREADS, thread_name_prefix="control-ledger") as pool:
            router = Router(self._ledger, tokens=self._tokens, pool=pool)
            server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
            server.add_generic_rpc_handlers((router,))
            port = self._bind(server)
            await server.start()
            stopping = asyncio.Event()
            self._running = asyncio.get_running_loop(), stopping
            started.set_result(address.join_address(self._host, port))
            await self._reap_until(stopping, pool=pool)
            await server.stop(self._grace_s)

    def _bind(self, server: grpc.aio.Server) -> int:
        wanted = address.join_address(self._host, self._port)
        try:
            port = server.add_insecure_port(wanted)
        except RuntimeError as exc:
            raise PreflightError(
                f"cannot listen on {wanted}: port {self._port} is taken or may not be used here; "
                f"stop what uses it, or choose another with --listen HOST:PORT (port 0: any free)"
            ) from exc
        return port

    async def _reap_until(self, stopping: asyncio.Event, *, pool: ThreadPoolExecutor) -> None:
        """Reap now and then until ``stopping``; trouble is logged, the next pass tries again."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await asyncio.wait_for(stopping.wait(), timeout=self._reap_interval_s)
            except TimeoutError:
                try:
                    await loop.run_in_executor(pool, self._ledger.reap)
                except PacelineError as exc:
                    _LOG.warning("cannot remove expired records now: %s", exc)
            else:
                return
