"""The standard gRPC health check, for balancers and probes; it needs no token."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Final, cast

import grpc

from paceline.core.errors import PacelineError
from paceline.refit.control.status import code_of, details_of
from paceline.refit.wire import health_pb2
from paceline.refit.wire.rpc import HEALTH_SERVICE, OWN_SERVICE, PUBLIC_SERVICE, rpc_named

if TYPE_CHECKING:
    import grpc.aio

SERVICES: Final = frozenset({"", PUBLIC_SERVICE, OWN_SERVICE})
WATCHERS_MAX: Final = 64

_CHECK: Final = rpc_named(HEALTH_SERVICE, "Check")
_WATCH: Final = rpc_named(HEALTH_SERVICE, "Watch")


class Health:
    """SERVING until ``stop``; used from one event loop."""

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._watchers = 0

    def stop(self) -> None:
        """Say NOT_SERVING from now on."""
        self._stopping.set()

    def handler(self, path: str) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """Return what answers a call of the health service, or None if it has no such call."""
        if path == _CHECK.path:
            return grpc.unary_unary_rpc_method_handler(cast(Callable[..., bytes], self._check))
        if path == _WATCH.path:
            watch = cast("Callable[..., Iterator[bytes]]", self._watch)
            return grpc.unary_stream_rpc_method_handler(watch)
        return None

    def _status(self, service: str) -> str:
        if service not in SERVICES:
            return "SERVICE_UNKNOWN"
        return "NOT_SERVING" if self._stopping.is_set() else "SERVING"

    async def _check(self, raw: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        status = self._status(await _service_named(raw, context))
        if status == "SERVICE_UNKNOWN":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return _reply(status)

    async def _watch(
        self, raw: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> AsyncIterator[bytes]:
        service = await _service_named(raw, context)
        if self._watchers >= WATCHERS_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch the health")
        self._watchers += 1
        try:
            yield _reply(self._status(service))
            await self._stopping.wait()
            yield _reply(self._status(service))
        finally:
            self._watchers -= 1


async def _service_named(raw: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> str:
    try:
        request = cast(health_pb2.HealthCheckRequest, _CHECK.parse_request(raw))
    except PacelineError as exc:
        await context.abort(code_of(exc), details_of(exc))
    return request.service


def _reply(status: str) -> bytes:
    return health_pb2.HealthCheckResponse(status=status).SerializeToString()
