"""Ranges over HTTP straight into the caller's buffer, resumed from the byte reached."""

import http.client
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from paceline.core.clock import Clock
from paceline.core.retry import RetryPolicy
from paceline.refit.errors import FetchError
from paceline.refit.transports.http.address import object_path, split_address
from paceline.refit.transports.protocol import ObjectRange

_IO_TIMEOUT_S = 30.0
_IDLE_MAX = 4
"""Kept connections per endpoint."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_T = TypeVar("_T")


class _TryAgainError(Exception):
    """This answer is worth another try."""


@dataclass(slots=True)
class _Progress:
    """How much of the target is filled; survives a cut."""

    filled: int = 0


class HttpObjectReader:
    """Reads from HttpObjectServer, or any server that keeps RFC 9110's rules for ranges.

    Safe from several threads; each read in progress has a connection of its own.
    """

    def __init__(
        self,
        *,
        token: Callable[[], str],
        clock: Clock,
        chance: Callable[[], float],
        retry: RetryPolicy | None = None,
    ) -> None:
        """Set up without I/O.

        Args:
            token: returns what to present; asked for every request.
            clock: for deadlines and waits.
            chance: random number in [0, 1) for the jitter of waits.
            retry: how often a cut or refused transfer is taken up again within one call.
        """
        self._token = token
        self._clock = clock
        self._chance = chance
        self._retry = retry or RetryPolicy()
        self._idle: dict[str, list[_Connection]] = {}
        self._lock = threading.Lock()

    def read_object(
        self, endpoint: str, wanted: ObjectRange, target: memoryview, *, timeout_s: float
    ) -> None:
        """Fill ``target`` with the range; a cut transfer goes on where it was cut.

        Raises:
            FetchError: see the port.
        """
        if len(target) != wanted.size:
            raise ValueError(f"target has {len(target)} bytes, the range {wanted.size}")
        progress = _Progress()

        def attempt(deadline: float) -> None:
            while progress.filled < wanted.size:
                self._read_on(endpoint, wanted, target, progress, deadline=deadline)

        what = f"object {wanted.object_id[:12]} from {endpoint}"
        self._persist(attempt, what=what, timeout_s=timeout_s)

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return the manifest at an address. Raises FetchError."""
        endpoint, path = self._split(address)

        def attempt(deadline: float) -> bytes:
            with _Exchange(self, endpoint, path, {}, deadline) as answer:
                _expect(answer, 200)
                size = _length(answer)
                if size > size_max:
                    raise FetchError(f"the manifest has {size} bytes, over {size_max}")
                data = bytearray(size)
                _fill(answer, memoryview(data), _Progress())
                return bytes(data)

        return self._persist(attempt, what=f"manifest at {address}", timeout_s=timeout_s)

    def source_endpoint(self, address: str) -> str:
        """Return the endpoint behind a manifest address; no I/O. Raises FetchError."""
        return self._split(address)[0]

    def close(self) -> None:
        """Give idle connections back; idempotent."""
        with self._lock:
            found = [item for items in self._idle.values() for item in items]
            self._idle.clear()
        for connection in found:
            connection.close()

    def open_request(
        self, endpoint: str, path: str, headers: dict[str, str], deadline: float
    ) -> "tuple[_Connection, http.client.HTTPResponse]":
        """Send a request over a kept connection, or over a new one if that was closed."""
        sent = {"Authorization": f"Bearer {self._token()}", **headers}
        kept = self._take_idle(endpoint)
        if kept is not None:
            try:
                return kept, kept.ask(path, sent, deadline)
            except (OSError, http.client.HTTPException):
                # The server may close an idle connection at any time; that is not a failure.
                kept.close()
        fresh = _Connection(endpoint, self._clock)
        try:
            return fresh, fresh.ask(path, sent, deadline)
        except BaseException:
            fresh.close()
            raise

    def give_back(self, endpoint: str, connection: "_Connection") -> None:
        """Keep a connection whose answer was read to the end."""
        with self._lock:
            kept = self._idle.setdefault(endpoint, [])
            if len(kept) < _IDLE_MAX:
                kept.append(connection)
                return
        connection.close()

    def _take_idle(self, endpoint: str) -> "_Connection | None":
        with self._lock:
            kept = self._idle.get(endpoint)
            return kept.pop() if kept else None

    def _read_on(
        self,
        endpoint: str,
        wanted: ObjectRange,
        target: memoryview,
        progress: _Progress,
        *,
        deadline: float,
    ) -> None:
        """Ask for what is missing and read until it is there or the transfer breaks."""
        start, stop = wanted.offset + progress.filled, wanted.offset + wanted.size
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        path = object_path(wanted.object_id)
        with _Exchange(self, endpoint, path, headers, deadline) as answer:
            _expect(answer, 206)
            found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if found is None or (int(found[1]), int(found[2]) + 1) != (start, stop):
                raise FetchError(f"answered another range than {start}-{stop - 1}")
            if _length(answer) != stop - start:
                raise FetchError(f"announced {_length(answer)} bytes instead of {stop - start}")
            _fill(answer, target, progress)

    def _persist(self, attempt: Callable[[float], _T], *, what: str, timeout_s: float) -> _T:
        """Try until it works, the policy gives up, or the deadline passes."""
        deadline = self._clock.monotonic() + timeout_s
        failures = 0
        while True:
            try:
                return attempt(deadline)
            except FetchError as exc:
                raise FetchError(f"{what}: {exc}") from exc
            except (OSError, http.client.HTTPException, _TryAgainError) as exc:
                failures += 1
                delay_s = self._retry.delay_s(failures, chance=self._chance())
                left_s = deadline - self._clock.monotonic()
                if delay_s is None or delay_s >= left_s:
                    why = str(exc) or type(exc).__name__
                    raise FetchError(
                        f"{what}: {why}; gave up after {failures} tries, "
                        "try another source or later"
                    ) from exc
                self._clock.sleep(delay_s)

    def _split(self, address: str) -> tuple[str, str]:
        try:
            return split_address(address)
        except ValueError as exc:
            raise FetchError(str(exc)) from exc


class _Exchange:
    """One request and its answer; the connection is kept only after a complete answer."""

    def __init__(
        self,
        reader: HttpObjectReader,
        endpoint: str,
        path: str,
        headers: dict[str, str],
        deadline: float,
    ) -> None:
        self._reader = reader
        self._endpoint = endpoint
        self._connection, self._answer = reader.open_request(endpoint, path, headers, deadline)

    def __enter__(self) -> http.client.HTTPResponse:
        return self._answer

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self._answer.isclosed() and not self._answer.will_close:
            self._reader.give_back(self._endpoint, self._connection)
        else:
            self._answer.close()
            self._connection.close()


class _DeadlineSocket(socket.socket):
    """A socket whose every receive is bounded by one deadline for all of them.

    A timeout alone would start anew with every byte of a peer that drips.
    """

    def __init__(self, connected: socket.socket, left_s: Callable[[], float]) -> None:
        super().__init__(fileno=connected.detach())
        self._left_s = left_s

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.settimeout(self._left_s())
        return super().recv_into(*args, **kwargs)


class _Connection(http.client.HTTPConnection):
    """One kept-alive connection."""

    def __init__(self, endpoint: str, clock: Clock) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme != "http" or not parts.hostname:
            raise FetchError(f"{endpoint!r} is not an http:// endpoint")
        super().__init__(parts.hostname, parts.port)
        self._clock = clock
        self._deadline = 0.0

    def connect(self) -> None:
        self.timeout = self._left_s()
        super().connect()
        self.sock = _DeadlineSocket(self.sock, self._left_s)

    def ask(self, path: str, headers: dict[str, str], deadline: float) -> http.client.HTTPResponse:
        """Send a GET and return the answer's head."""
        self._deadline = deadline
        if self.sock is not None:
            self.sock.settimeout(self._left_s())
        self.request("GET", path, headers=headers)
        return self.getresponse()

    def _left_s(self) -> float:
        left_s = self._deadline - self._clock.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        return min(left_s, _IO_TIMEOUT_S)


def _expect(answer: http.client.HTTPResponse, status: int) -> None:
    if answer.status == status:
        return
    if answer.status in _BUSY:
        raise _TryAgainError(f"answered {answer.status}")
    hints = {
        401: "the token is missing or wrong",
        404: "it is not served there any more",
        416: "it has fewer bytes than that",
    }
    raise FetchError(f"answered {answer.status}: {hints.get(answer.status, 'not as asked')}")


def _length(answer: http.client.HTTPResponse) -> int:
    text = answer.headers.get("Content-Length", "")
    if not text.isdecimal() or "Transfer-Encoding" in answer.headers:
        raise FetchError("did not announce a length")
    return int(text)


def _fill(answer: http.client.HTTPResponse, target: memoryview, progress: _Progress) -> None:
    while progress.filled < len(target):
        count = answer.readinto(target[progress.filled : progress.filled + 2**16])
        if not count:
            raise _TryAgainError(f"cut after {progress.filled} of {len(target)} bytes")
        progress.filled += count
    if not answer.isclosed():
        answer.read(0)
