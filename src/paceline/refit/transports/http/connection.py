"""One connection to a source: a request, its answer's head, and a body read within a deadline."""

import http.client
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paceline.core.clock import Clock
from paceline.refit.errors import FetchError, TransferCancelledError
from paceline.refit.transports.routes import ROUTE_TRY_S, Routes

IDLE_S_MAX = 30.0
"""How long a source may be silent; then the connection is given up and the transfer resumed."""
_LOOK_UP_S = 0.2
"""How often a blocked read looks whether it is still wanted."""
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_BUSY = frozenset({408, 429, 500, 502, 503, 504})


class TryAgainError(Exception):
    """This answer is worth another try."""


@dataclass(slots=True, kw_only=True)
class Patience:
    """Until when somebody waits for bytes, and whether still."""

    clock: Clock
    deadline: float
    is_cancelled: Callable[[], bool]

    def left_s(self) -> float:
        """Return how long to wait at most. Raises TimeoutError, TransferCancelledError."""
        if self.is_cancelled():
            raise TransferCancelledError("the transfer was cancelled")
        left_s = self.deadline - self.clock.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        return min(left_s, IDLE_S_MAX)

    def receive(self, take: Callable[[], int], set_timeout: Callable[[float], None]) -> int:
        """Wait for bytes in short steps: a timeout alone starts anew with every byte that drips."""
        waited_s = 0.0
        while True:
            step_s = min(self.left_s(), _LOOK_UP_S)
            set_timeout(step_s)
            try:
                return take()
            except TimeoutError:
                waited_s += step_s
                if waited_s >= IDLE_S_MAX:
                    raise


class _PlainSocket(socket.socket):
    patience: Patience

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        take = super().recv_into
        return self.patience.receive(lambda: take(*args, **kwargs), self.settimeout)


class _TlsSocket(ssl.SSLSocket):
    patience: Patience

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        take = super().recv_into
        return self.patience.receive(lambda: take(*args, **kwargs), self.settimeout)


class Connection(http.client.HTTPConnection):
    """One kept-alive connection, with TLS where the endpoint says so."""

    def __init__(
        self,
        endpoint: str,
        *,
        tls: ssl.SSLContext | None,
        server_name: str | None = None,
        routes: Routes | None = None,
    ) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise FetchError(f"{endpoint!r} is no http:// or https:// endpoint", source=endpoint)
        super().__init__(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        shorter = endpoint if routes is None else routes.of(endpoint)
        self._shorter = None if shorter == endpoint else urlsplit(shorter)
        self._tls = tls if parts.scheme == "https" else None
        self._server_name = server_name or self.host
        self._patience: Patience | None = None

    def connect(self) -> None:
        """Open the socket, and the TLS session in it."""
        patience = self._patience
        assert patience is not None  # noqa: S101 - ask() sets it
        if not self._connect_shorter(patience):
            self.timeout = patience.left_s()
            super().connect()
        stay_known(self.sock)
        found: _PlainSocket | _TlsSocket
        if self._tls is None:
            found = _PlainSocket(fileno=self.sock.detach())
        else:
            wrapped = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)
            assert isinstance(wrapped, _TlsSocket)  # noqa: S101 - tls_context() says so
            found = wrapped
        found.patience = patience
        self.sock = found

    def _connect_shorter(self, patience: Patience) -> bool:
        """Open the socket by a shorter way, if one is known and works."""
        if self._shorter is None:
            return False
        place = (self._shorter.hostname or "", self._shorter.port or 0)
        try:
            self.sock = socket.create_connection(place, min(patience.left_s(), ROUTE_TRY_S))
        except OSError:
            return False  # the long way is there
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True

    def ask(
        self, path: str, headers: dict[str, str], patience: Patience
    ) -> http.client.HTTPResponse:
        """Send a GET and return the answer's head."""
        self._patience = patience
        if self.sock is not None:
            self.sock.patience = patience  # type: ignore[union-attr]  # connect() made it
            self.sock.settimeout(patience.left_s())
        self.request("GET", path, headers=headers)
        return self.getresponse()


def stay_known(connection: socket.socket) -> None:
    """Have boxes between two hosts remember a connection that rests, and notice a dead peer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def tls_context(trusted: bytes | None) -> ssl.SSLContext:
    """Return what https:// sources are checked with.

    Args:
        trusted: PEM certificates of the authorities to trust; None trusts the system's.
    """
    context = ssl.create_default_context(cadata=trusted.decode("ascii") if trusted else None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslsocket_class = _TlsSocket
    return context


def expect_status(answer: http.client.HTTPResponse, status: int) -> None:
    """Refuse another status. Raises TryAgainError where it may pass, else FetchError."""
    if answer.status == status:
        return
    if answer.status in _BUSY:
        raise TryAgainError(f"answered {answer.status}")
    hints = {
        401: "the token is missing or wrong",
        404: "it is not served there any more",
        416: "it has fewer bytes than that",
    }
    raise FetchError(f"answered {answer.status}: {hints.get(answer.status, 'not as asked')}")


def expect_range(answer: http.client.HTTPResponse, start: int, stop: int) -> None:
    """Refuse any answer but exactly these bytes. Raises FetchError, TryAgainError."""
    expect_status(answer, 206)
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if found is None or (int(found[1]), int(found[2]) + 1) != (start, stop):
        raise FetchError(f"answered another range than {start}-{stop - 1}")
    if announced_length(answer) != stop - start:
        raise FetchError(f"announced {announced_length(answer)} bytes instead of {stop - start}")


def announced_length(answer: http.client.HTTPResponse) -> int:
    """Return how long the body will be. Raises FetchError if that is not said."""
    text = answer.headers.get("Content-Length", "")
    if not text.isdecimal() or "Transfer-Encoding" in answer.headers:
        raise FetchError("did not announce a length")
    return int(text)
