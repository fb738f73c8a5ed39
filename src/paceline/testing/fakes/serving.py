"""A fake provider behind a real HTTP server on loopback."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast
from urllib.parse import parse_qsl, urlsplit

from paceline.testing.fakes.cloud import FakeCloud, Reply, Request

_BODY_BYTES_MAX = 16 * 2**20
_DRIP_S = 0.5


class FakeServer(ThreadingHTTPServer):
    """Serves one fake on 127.0.0.1."""

    daemon_threads = True

    def __init__(self, fake: FakeCloud, *, port: int = 0) -> None:
        self.fake = fake
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(fake: FakeCloud, *, port: int = 0) -> Iterator[FakeServer]:
    """Serve in the background; the port is closed and its threads are done afterwards."""
    server = FakeServer(fake, port=port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        num_bytes = min(int(self.headers.get("Content-Length") or 0), _BODY_BYTES_MAX)
        reply = cast(FakeServer, self.server).fake.answer(
            Request(
                method=self.command,
                path=address.path,
                query=dict(parse_qsl(address.query)),
                headers={name.lower(): value for name, value in self.headers.items()},
                body=self.rfile.read(num_bytes),
            )
        )
        with suppress(BrokenPipeError, ConnectionResetError):  # a machine that ended itself
            self._send(reply)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_GET  # noqa: N815 - the library's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing; the fake keeps a list of calls."""

    def _send(self, reply: Reply) -> None:
        self.close_connection = True
        if reply.is_lost:
            # a reset, as when a proxy on the way dies
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if not reply.is_slow:
            self.wfile.write(reply.content)
            return
        clock = cast(FakeServer, self.server).fake.clock
        for place in range(len(reply.content)):
            clock.sleep(_DRIP_S)
            self.wfile.write(reply.content[place : place + 1])
