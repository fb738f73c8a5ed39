"""Objects and manifests over HTTP/1.1: ranges, keep-alive, TLS, a bearer token, no copies.

The standard library's threading server sends straight out of staged buffers. Every way a
peer can be slow or rude is bounded: connections, time per read, time per megabyte sent. Between
requests there is more time, for those who have presented the token.
"""

import errno
import hmac
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from paceline.core.address import join_address, told_as
from paceline.core.errors import PreflightError
from paceline.refit.model import WeightVersionShardManifest
from paceline.refit.staging.shelf import HeldObject, ManifestShelf, ObjectShelf
from paceline.refit.transports.address import (
    ManifestPath,
    ObjectPath,
    manifest_path,
    parse_path,
)
from paceline.refit.transports.http.connection import stay_known

_SEND_BYTES = 2**20
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServerOptions:
    """Limits of a server."""

    advertise_host: str | None = None
    """The name that readers use; the bound one by default."""
    io_timeout_s: float = 30.0
    """For a request to arrive, and for each MiB of a reply to be taken."""
    rest_s: float = 300.0
    """How long a connection that was answered on may wait for its next request: steps are slow, and
    over a long way a new connection costs several round trips."""
    connections_max: int = 128
    """For further ones those give way that wait; if none does they are answered 503."""
    withdraw_patience_s: float = 10.0
    """How long readers may finish when an object goes; then they are cut."""
    tls: "HttpTlsFiles | None" = None
    """What to prove the server's name with; None serves in plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTlsFiles:
    """A certificate chain and its private key, as PEM; read again when they are replaced."""

    certificate: Path
    key: Path


class HttpObjectServer:
    """Serves this process's objects and manifests; signs ObjectServer and the publisher's port."""

    def __init__(
        self,
        *,
        token: Callable[[], str],
        host: str = "127.0.0.1",
        port: int = 0,
        options: HttpServerOptions | None = None,
    ) -> None:
        """Bind and start answering.

        Args:
            token: returns what readers must present; asked for every request.
            host: the address to listen on.
            port: 0 takes a free one.
            options: limits.

        Raises:
            PreflightError: the address cannot be listened on, or the certificate is unfit.
        """
        self.objects = ObjectShelf()
        self.manifests = ManifestShelf()
        self.token = token
        self.options = options or HttpServerOptions()
        self._listener = _listen(self, host, port)
        name = self.options.advertise_host or told_as(host)
        scheme = "https" if self.options.tls else "http"
        self._endpoint = f"{scheme}://{join_address(name, self._listener.server_address[1])}"
        self._thread = threading.Thread(
            target=self._listener.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="paceline-objects",
            daemon=True,
        )
        self._thread.start()

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        return "http"

    @property
    def endpoint(self) -> str:
        """Where readers reach this server."""
        return self._endpoint

    @property
    def num_readers(self) -> int:
        """How many reads of objects it answers now."""
        return self.objects.num_readers

    def serve_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Make an object readable, without copying it."""
        self.objects.put(object_id, parts)

    def replace_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Serve the same bytes from other memory. Raises StagingError if a reader stays."""
        patience_s = self.options.withdraw_patience_s
        self.objects.replace(object_id, parts, patience_s=patience_s)

    def withdraw_object(self, object_id: str) -> None:
        """Stop serving; returns when no reader is inside. Raises StagingError if one stays."""
        self.objects.withdraw(object_id, patience_s=self.options.withdraw_patience_s)

    def publish_manifest(
        self, *, version_id: str, source_slot_id: str, manifest: WeightVersionShardManifest
    ) -> str:
        """Serve a manifest and return its full URL. Raises PublishError for a second content."""
        self.manifests.put((version_id, source_slot_id), manifest)
        return self._endpoint + manifest_path(version_id, source_slot_id)

    def release_manifest(self, *, version_id: str, source_slot_id: str) -> None:
        """Stop serving it; idempotent."""
        self.manifests.remove((version_id, source_slot_id))

    def close(self) -> None:
        """Stop listening and cut what is open; idempotent."""
        if self._thread.is_alive():
            self._listener.shutdown()
            self._thread.join()
            self._listener.server_close()
            self._listener.cut_all()


def _listen(owner: HttpObjectServer, host: str, port: int) -> "_Listener":
    try:
        return _Listener(owner, host, port)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise PreflightError(
                f"port {port} on {host} is taken by another program; give another one, "
                "or 0 for any free port"
            ) from exc
        raise PreflightError(f"cannot listen on {host} port {port}: {exc.strerror}") from exc


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, owner: HttpObjectServer, host: str, port: int) -> None:
        self.owner = owner
        self._open: set[socket.socket] = set()
        self._resting: dict[socket.socket, None] = {}
        """Those that wait for their next request, the longest first."""
        self._lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        files = owner.options.tls
        self._certificate = None if files is None else _Certificate(files)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own also asks the name service for a name that nothing here uses.
        TCPServer.server_bind(self)

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        stay_known(connection)
        if self._certificate is not None:
            # The handshake waits for the peer: that is for the connection's own thread.
            connection = self._certificate.context().wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= self.owner.options.connections_max and self._resting:
                longest = next(iter(self._resting))
                del self._resting[longest]
                self._open.discard(longest)
                cut(longest)
            is_full = len(self._open) >= self.owner.options.connections_max
            if not is_full:
                self._open.add(request)
        if is_full:
            self._refuse(request)
        else:
            super().process_request(request, client_address)

    def rest(self, request: socket.socket) -> None:
        """Note that a connection waits for its next request."""
        with self._lock:
            if request in self._open:  # else it has just been cut
                self._resting[request] = None

    def wake(self, request: socket.socket) -> None:
        """Note that a request has begun to arrive."""
        with self._lock:
            self._resting.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
            self._resting.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A peer that went away or was cut is its own affair; anything else is a defect of ours.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def cut_all(self) -> None:
        """End every connection; their threads notice and finish."""
        with self._lock:
            found = list(self._open)
        for connection in found:
            cut(connection)

    def _refuse(self, request: socket.socket) -> None:
        request.settimeout(1.0)
        try:
            if isinstance(request, ssl.SSLSocket):
                request.do_handshake()
            request.sendall(
                b"HTTP/1.1 503 Service Unavailable\r\n"
                b"Content-Length: 0\r\nConnection: close\r\n\r\n"
            )
        except OSError:
            self.handle_error(request, None)
        self.shutdown_request(request)


class _Certificate:
    """A server's TLS context, made again when the files behind it are replaced."""

    def __init__(self, files: HttpTlsFiles) -> None:
        self._files = files
        self._seen = self._stamp()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        try:
            now = self._stamp()
            if now != self._seen:
                self._context, self._seen = self._load(), now
        except PreflightError:
            pass  # being written just now: the one before serves until it is whole
        return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._files.certificate, self._files.key)
        except OSError as exc:  # SSLError is one
            raise PreflightError(
                f"{self._files.certificate} and {self._files.key} are no certificate with its "
                f"key: {exc}; write them again"
            ) from exc
        return context

    def _stamp(self) -> tuple[int, int]:
        try:
            return self._files.certificate.stat().st_mtime_ns, self._files.key.stat().st_mtime_ns
        except OSError as exc:
            raise PreflightError(f"cannot read {exc.filename}: {exc.strerror}") from exc


def cut(connection: socket.socket) -> None:
    """End a connection that another thread may be blocked on."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as exc:
        if exc.errno not in (errno.ENOTCONN, errno.EBADF):
            raise


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "paceline"
    sys_version = ""
    disable_nagle_algorithm = True
    server: _Listener
    connection: socket.socket

    def setup(self) -> None:
        self.owner = self.server.owner
        self._is_known = False
        """It has presented the token."""
        super().setup()
        self.connection.settimeout(self.owner.options.io_timeout_s)
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()

    def handle_one_request(self) -> None:
        if self._is_known:
            self.connection.settimeout(self.owner.options.rest_s)
            self.server.rest(self.connection)
        super().handle_one_request()

    def parse_request(self) -> bool:
        self.server.wake(self.connection)
        self.connection.settimeout(self.owner.options.io_timeout_s)
        return super().parse_request()

    def do_GET(self) -> None:
        """Answer one request."""
        self._is_known = self._is_allowed()
        if not self._is_known:
            self._refuse(HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})
            return
        match parse_path(self.path):
            case ObjectPath(object_id=object_id):
                with self.owner.objects.reading(
                    object_id, cancel=lambda: cut(self.connection)
                ) as held:
                    self._send_object(held)
            case ManifestPath(version_id=version_id, source_slot_id=slot):
                self._send_manifest(self.owner.manifests.get((version_id, slot)))
            case None:
                self._refuse(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Stay quiet: what matters is reported by readers, with more context."""

    def _is_allowed(self) -> bool:
        wanted = self.owner.token()
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        return hmac.compare_digest(given, f"Bearer {wanted}".encode()) and bool(wanted)

    def _send_object(self, held: HeldObject | None) -> None:
        if held is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        found = _parse_range(self.headers.get("Range"), held.num_bytes)
        if found is None:
            self._refuse(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                {"Content-Range": f"bytes */{held.num_bytes}"},
            )
            return
        start, stop, is_part = found
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{held.object_id}"'}
        if is_part:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{held.num_bytes}"
        status = HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK
        self._start(status, "application/octet-stream", stop - start, headers)
        for piece in held.pieces(start, stop - start):
            # One timeout covers one sendall, so large pieces go in steps.
            for at in range(0, len(piece), _SEND_BYTES):
                self.wfile.write(piece[at : at + _SEND_BYTES])

    def _send_manifest(self, manifest: WeightVersionShardManifest | None) -> None:
        if manifest is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        headers = {"ETag": f'"{manifest.digest}"'}
        self._start(HTTPStatus.OK, "application/json", len(manifest.data), headers)
        self.wfile.write(manifest.data)

    def _refuse(self, status: HTTPStatus, headers: dict[str, str] | None = None) -> None:
        body = f"{status.phrase}\n".encode()
        self._start(status, "text/plain", len(body), headers or {})
        self.wfile.write(body)

    def _start(
        self, status: HTTPStatus, content_type: str, length: int, headers: dict[str, str]
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _parse_range(text: str | None, size: int) -> tuple[int, int, bool] | None:
    """Return start, stop and whether it is a part; None if it cannot be satisfied.

    A form other than ``bytes=a-b`` or ``bytes=a-`` is ignored, as RFC 9110 allows.
    """
    found = _RANGE.fullmatch(text or "")
    if found is None:
        return 0, size, False
    start = int(found[1])
    stop = min(int(found[2]) + 1, size) if found[2] else size
    return (start, stop, True) if start < stop else None
