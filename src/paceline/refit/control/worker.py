"""RefitWorkerService: a trainer process hands out the manifests of its shards over gRPC.

Clients of the public protocol fetch a shard's manifest from the process that published it, with
no token, and believe it only if it has the digest that the control service names. Paceline's
own engines read the same bytes over HTTP, where they must prove who they are; so this listens
on loopback unless told otherwise.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Final, cast

import grpc

from paceline.core import address
from paceline.core.errors import PacelineError, PreflightError
from paceline.refit.control.status import code_of, details_of
from paceline.refit.errors import AlreadyExistsError, NotFoundError
from paceline.refit.wire import refit_pb2
from paceline.refit.wire.rpc import WORKER_SERVICE, rpc_named

THREADS: Final = 4
REQUEST_BYTES_MAX: Final = 64 * 1024
MANIFEST_BYTES_MAX: Final = 96 * 1024 * 1024
"""Clients of the public protocol take replies of up to 100 MiB."""

_RPC: Final = rpc_named(WORKER_SERVICE, "GetWeightVersionShardManifest")


class ManifestServer(grpc.GenericRpcHandler):
    """Serves published manifests from construction to ``close``; safe from several threads."""

    def __init__(self, *, listen: str = "127.0.0.1:0", allow_plaintext: bool = False) -> None:
        """Listen.

        Raises:
            UsageError: ``listen`` is no address.
            PreflightError: the port is taken, or other machines would reach it although plain
                text was not allowed.
        """
        if not allow_plaintext:
            address.require_loopback(listen, why="manifests would travel")
        host, port = address.split_address(listen)
        self._lock = threading.Lock()
        self._manifests: dict[tuple[str, str], bytes] = {}
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="manifests"),
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
                ("grpc.max_send_message_length", -1),
            ),
        )
        self._server.add_generic_rpc_handlers((self,))
        try:
            port = self._server.add_insecure_port(address.join_address(host, port))
        except RuntimeError as exc:
            raise PreflightError(f"cannot listen on {listen}: the port is taken") from exc
        self._server.start()
        self.endpoint = address.join_address(host, port)
        """What a shard names as its ``manifest_endpoint``."""

    def publish(self, *, version_id: str, source_slot_id: str, manifest: bytes) -> str:
        """Hand these bytes out from now on; return their digest. The same bytes again are fine.

        Raises:
            AlreadyExistsError: other bytes are published there.
            ValueError: more than clients take.
        """
        if len(manifest) > MANIFEST_BYTES_MAX:
            raise ValueError(f"a manifest of {len(manifest)} bytes is larger than clients take")
        with self._lock:
            kept = self._manifests.setdefault((version_id, source_slot_id), manifest)
        if kept != manifest:
            raise AlreadyExistsError(
                f"another manifest of version {version_id!r}, slot {source_slot_id!r} is published"
            )
        return sha256(manifest).hexdigest()

    def withdraw(self, *, version_id: str, source_slot_id: str) -> None:
        """Hand it out no longer; one that is not published is fine."""
        with self._lock:
            self._manifests.pop((version_id, source_slot_id), None)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """Return the handler of the one call."""
        if handler_call_details.method != _RPC.path:
            return None
        answer: Callable[[bytes, grpc.ServicerContext], bytes] = self._answer
        return grpc.unary_unary_rpc_method_handler(answer)

    def close(self, grace_s: float = 1.0) -> None:
        """Refuse new calls and let running ones end; idempotent."""
        self._server.stop(grace_s).wait()

    def _answer(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            manifest = self._find(raw)
        except PacelineError as exc:
            context.abort(code_of(exc), details_of(exc))
        reply = refit_pb2.GetWeightVersionShardManifestResponse(
            manifest=manifest, manifest_digest=sha256(manifest).hexdigest()
        )
        return reply.SerializeToString()

    def _find(self, raw: bytes) -> bytes:
        request = cast(refit_pb2.GetWeightVersionShardManifestRequest, _RPC.parse_request(raw))
        with self._lock:
            manifest = self._manifests.get((request.version_id, request.source_slot_id))
        if manifest is None:
            raise NotFoundError(
                f"no manifest of version {request.version_id!r}, slot {request.source_slot_id!r}"
            )
        return manifest
