"""Ranges over HTTP straight into the caller's buffers, resumed from the byte reached."""

import http.client
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

from paceline.core.clock import Clock
from paceline.core.retry import RetryPolicy
from paceline.refit.errors import FetchError
from paceline.refit.model import ObjectRange
from paceline.refit.transports.address import object_path, split_address
from paceline.refit.transports.http.connection import (
    Connection,
    Patience,
    TryAgainError,
    announced_length,
    expect_range,
    expect_status,
    tls_context,
)
from paceline.refit.transports.http.kept import KeptConnections
from paceline.refit.transports.http.run import Cursor, Share, shares_of
from paceline.refit.transports.protocol import Part, ReadPlan, Terms, TransferRecord
from paceline.refit.transports.routes import Routes

_RECEIVE_BYTES = 2**20
_SHARE_BYTES_MIN = 4 * 2**20
"""Less than this is not worth a further stream."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReaderOptions:
    """How a reader behaves towards sources."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """How often a cut or refused transfer is taken up again within one call."""
    streams: int = 1
    """Connections that share one run; more help where one does not fill the link."""
    trusted: bytes | None = None
    """PEM certificates of the authorities that https:// sources are checked with; None trusts
    those of the system."""
    server_name: str | None = None
    """What an https:// source must prove to be; None asks for the host that it is reached by."""
    routes: Routes = field(default_factory=Routes)
    """Shorter ways to sources than the addresses that they tell."""


class HttpObjectReader:
    """Reads from HttpObjectServer, or any server that keeps RFC 9110's rules for ranges.

    Safe from several threads; each read in progress has connections of its own.
    """

    def __init__(
        self,
        *,
        token: Callable[[], str],
        clock: Clock,
        chance: Callable[[], float],
        options: HttpReaderOptions | None = None,
    ) -> None:
        """Set up without I/O.

        Args:
            token: returns what to present; asked for every request.
            clock: for deadlines and waits.
            chance: random number in [0, 1) for the jitter of waits.
            options: streams, retries, trust.
        """
        self.options = options or HttpReaderOptions()
        self.clock = clock
        self._token = token
        self._chance = chance
        self._tls = tls_context(self.options.trusted)
        self._kept = KeptConnections(clock)

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        return "http"

    def plan_read(self, endpoint: str, parts: Sequence[Part], *, timeout_s: float) -> ReadPlan:
        """Cut the parts into one share per stream; no I/O."""
        size = sum(part.wanted.size for part in parts)
        streams = max(1, min(self.options.streams, size // _SHARE_BYTES_MIN))
        return _HttpRead(self, endpoint, shares_of(parts, streams), size)

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return the manifest at an address. Raises FetchError."""
        endpoint, path = self._split(address)

        def attempt(patience: Patience) -> bytes:
            with _Exchange(self, endpoint, path, {}, patience) as exchange:
                expect_status(exchange.answer, 200)
                size = announced_length(exchange.answer)
                if size > size_max:
                    raise FetchError(f"the manifest has {size} bytes, over {size_max}")
                data = bytearray(size)
                wanted = ObjectRange(object_id="manifest", offset=0, size=size)
                part = Part(wanted=wanted, target=memoryview(data))
                exchange.fill(Cursor([(0, part)]), lambda index: None)
                return bytes(data)

        terms = Terms(timeout_s=timeout_s)
        what = f"manifest at {address}"
        return self.persist(attempt, what=what, source=endpoint, terms=terms)[0]

    def source_endpoint(self, address: str) -> str:
        """Return the endpoint behind a manifest address; no I/O. Raises FetchError."""
        return self._split(address)[0]

    def close(self) -> None:
        """Give idle connections back; idempotent."""
        self._kept.close()

    def open_request(
        self, endpoint: str, path: str, headers: dict[str, str], patience: Patience
    ) -> tuple[Connection, http.client.HTTPResponse]:
        """Send a request over a kept connection, or over a new one if that was closed."""
        sent = {"Authorization": f"Bearer {self._token()}", **headers}
        kept = self._kept.take(endpoint)
        if kept is not None:
            try:
                return kept, kept.ask(path, sent, patience)
            except (OSError, http.client.HTTPException):
                # The server may close an idle connection at any time; that is not a failure.
                kept.close()
        fresh = Connection(
            endpoint,
            tls=self._tls,
            server_name=self.options.server_name,
            routes=self.options.routes,
        )
        try:
            return fresh, fresh.ask(path, sent, patience)
        except BaseException:
            fresh.close()
            raise

    def give_back(self, endpoint: str, connection: Connection) -> None:
        """Keep a connection whose answer was read to the end."""
        self._kept.give_back(endpoint, connection)

    def persist(
        self, attempt: Callable[[Patience], _T], *, what: str, source: str, terms: Terms
    ) -> tuple[_T, int]:
        """Try until it works, the policy gives up, or the deadline passes; count the retries."""
        patience = Patience(
            clock=self.clock,
            deadline=self.clock.monotonic() + terms.timeout_s,
            is_cancelled=terms.is_cancelled,
        )
        failures = 0
        while True:
            try:
                return attempt(patience), failures
            except FetchError as exc:
                raise FetchError(f"{what}: {exc}", source=source) from exc
            except ssl.SSLCertVerificationError as exc:
                raise FetchError(
                    f"{what}: its certificate is not trusted here ({exc.verify_message}); check "
                    "that both are of one run, and that the clocks agree",
                    source=source,
                ) from exc
            except (OSError, http.client.HTTPException, TryAgainError) as exc:
                failures += 1
                delay_s = self.options.retry.delay_s(failures, chance=self._chance())
                if delay_s is None or delay_s >= patience.deadline - self.clock.monotonic():
                    why = str(exc) or type(exc).__name__
                    raise FetchError(
                        f"{what}: {why}; gave up after {failures} tries, "
                        "try another source or later",
                        source=source,
                    ) from exc
                self.clock.sleep(delay_s)

    def _split(self, address: str) -> tuple[str, str]:
        try:
            return split_address(address)
        except ValueError as exc:
            raise FetchError(str(exc)) from exc


class _HttpRead:
    """Signs ReadPlan."""

    def __init__(
        self, reader: HttpObjectReader, endpoint: str, shares: Sequence[Share], num_bytes: int
    ) -> None:
        self._reader = reader
        self._endpoint = endpoint
        self._shares = shares
        self._num_bytes = num_bytes

    @property
    def source(self) -> str:
        return self._endpoint

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def run(self, terms: Terms) -> TransferRecord:
        """Move every share over a connection of its own; the first failure ends the others."""
        started = self._reader.clock.monotonic()
        retries, failures = [0] * len(self._shares), list[BaseException]()
        failed = threading.Event()

        def move(index: int) -> None:
            try:
                retries[index] = self._move(
                    self._shares[index],
                    Terms(
                        timeout_s=terms.timeout_s,
                        is_cancelled=lambda: failed.is_set() or terms.is_cancelled(),
                        on_part=terms.on_part,
                    ),
                )
            except BaseException as exc:  # noqa: BLE001 - raised below, in the caller's thread
                failures.append(exc)
                failed.set()

        threads = [
            threading.Thread(target=move, args=(index,), name="paceline-http", daemon=True)
            for index in range(1, len(self._shares))
        ]
        for thread in threads:
            thread.start()
        if self._shares:
            move(0)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        seconds = self._reader.clock.monotonic() - started
        return TransferRecord(
            transport="http",
            source=self._endpoint,
            num_bytes=self._num_bytes,
            seconds=seconds,
            retries=sum(retries),
            stages={"move": seconds},
        )

    def close(self) -> None:
        """Nothing is held between runs."""

    def _move(self, share: Share, terms: Terms) -> int:
        """Move one share and return how often it had to be taken up again."""
        retries, deadline = 0, self._reader.clock.monotonic() + terms.timeout_s
        for run in share:
            cursor = Cursor(run)
            for index in cursor.start():
                terms.on_part(index)

            def attempt(patience: Patience, cursor: Cursor = cursor) -> None:
                while cursor.left:
                    self._read_on(cursor, patience, terms.on_part)

            left_s = deadline - self._reader.clock.monotonic()
            try:
                _, again = self._reader.persist(
                    attempt,
                    what=f"{cursor.missing} from {self._endpoint}",
                    source=self._endpoint,
                    terms=Terms(timeout_s=left_s, is_cancelled=terms.is_cancelled),
                )
            except FetchError as exc:
                exc.wanted = cursor.missing
                raise
            retries += again
        return retries

    def _read_on(self, cursor: Cursor, patience: Patience, on_part: Callable[[int], None]) -> None:
        """Ask for what is missing and read until it is there or the transfer breaks."""
        missing = cursor.missing
        start, stop = missing.offset, missing.offset + missing.size
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        path = object_path(missing.object_id)
        with _Exchange(self._reader, self._endpoint, path, headers, patience) as exchange:
            expect_range(exchange.answer, start, stop)
            exchange.fill(cursor, on_part)


class _Exchange:
    """One request and its answer; the connection is kept only after a complete answer."""

    def __init__(
        self,
        reader: HttpObjectReader,
        endpoint: str,
        path: str,
        headers: dict[str, str],
        patience: Patience,
    ) -> None:
        self._reader = reader
        self._endpoint = endpoint
        self._connection, self.answer = reader.open_request(endpoint, path, headers, patience)
        self._is_whole = False

    def fill(self, cursor: Cursor, on_part: Callable[[int], None]) -> None:
        """Read the body, which is as long as what the cursor misses. Raises TryAgainError."""
        # Not readinto: it reports nothing of what it read before a cut.
        body = self.answer.fp
        while cursor.left:
            count = body.readinto1(cursor.room(_RECEIVE_BYTES))
            if not count:
                raise TryAgainError(f"cut {cursor.left} bytes before the end")
            for index in cursor.advance(count):
                on_part(index)
        self._is_whole = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        will_close = self.answer.will_close
        self.answer.close()
        if kind is None and self._is_whole and not will_close:
            self._reader.give_back(self._endpoint, self._connection)
        else:
            self._connection.close()
