"""As much of S3 as weight movement needs, in memory, on loopback: put once, get, ranges, sizes."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final, Self

BODY_BYTES_MAX: Final = 64 * 1024 * 1024


class FakeS3:
    """An object store that believes every signature; path-style addresses, no listing."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        fake = self

        class Handler(_Handler):
            objects = fake.objects

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """Where clients reach it."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        """Serve."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop serving; what was put is still to be seen in ``objects``."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        """Store an object; with If-None-Match only if there is none."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > BODY_BYTES_MAX:
            self._answer(413)
            return
        body = self.rfile.read(length)
        if self.headers.get("Content-Encoding") == "aws-chunked":
            body = _unchunked(body)
        if self.headers.get("If-None-Match") == "*" and self._key in self.objects:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.objects[self._key] = body
        self._answer(200)

    def do_GET(self) -> None:
        """Return an object, or the range that was asked for."""
        found = self.objects.get(self._key)
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, found)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        end = min(int(last) if last else len(found) - 1, len(found) - 1)
        part = found[int(first) : end + 1]
        self._answer(206, part, span=f"bytes {first}-{end}/{len(found)}")

    def do_HEAD(self) -> None:
        """Return an object's size."""
        found = self.objects.get(self._key)
        self._answer(404 if found is None else 200, found or b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Say nothing."""

    @property
    def _key(self) -> str:
        return self.path.partition("?")[0]

    def _answer(self, status: int, body: bytes = b"", *, span: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"fake"')
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT")
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _unchunked(body: bytes) -> bytes:
    """Return the content of a body in S3's own chunks."""
    content = b""
    while body:
        head, _, body = body.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16)
        if size == 0:
            break
        content, body = content + body[:size], body[size + 2 :]
    return content
