"""Things that go wrong between trainer and engine, on purpose: readers and a TCP proxy."""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.refit.errors import FetchError
from paceline.refit.model import ObjectRange
from paceline.refit.transports.partwise import PartwiseRead
from paceline.refit.transports.protocol import ObjectReader, Part, ReadPlan, Terms, read_parts
from paceline.testing.clock import FakeClock

_CONNECT_TIMEOUT_S = 5.0
_IO_TIMEOUT_S = 10.0


class _ReaderWrapper:
    """Passes everything on, part by part."""

    def __init__(self, inner: ObjectReader, *, clock: Clock | None = None) -> None:
        self._inner = inner
        self._clock = clock or FakeClock()

    @property
    def transport(self) -> str:
        """That of the reader inside."""
        return self._inner.transport

    def plan_read(self, endpoint: str, parts: Sequence[Part], *, timeout_s: float) -> ReadPlan:
        """Plan to read part after part through ``read_part``."""

        def read(part: Part, left_s: float) -> int:
            self.read_part(endpoint, part, timeout_s=left_s)
            return 0

        return PartwiseRead(
            read, transport=self.transport, source=endpoint, parts=parts, clock=self._clock
        )

    def read_part(self, endpoint: str, part: Part, *, timeout_s: float) -> None:
        """Fill one part from the source."""
        read_parts(self._inner, endpoint, [part], Terms(timeout_s=timeout_s))

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return a manifest."""
        return self._inner.read_manifest(address, size_max=size_max, timeout_s=timeout_s)

    def source_endpoint(self, address: str) -> str:
        """Return the endpoint behind an address."""
        return self._inner.source_endpoint(address)

    def close(self) -> None:
        """Close what is wrapped."""
        self._inner.close()


class TruncatingReader(_ReaderWrapper):
    """Fills the first ``keep`` bytes of a read, then loses the source."""

    def __init__(self, inner: ObjectReader, *, keep: int) -> None:
        super().__init__(inner)
        self._keep = keep

    def read_part(self, endpoint: str, part: Part, *, timeout_s: float) -> None:
        """Read less than was asked for, and say so."""
        wanted = part.wanted
        if wanted.size <= self._keep:
            super().read_part(endpoint, part, timeout_s=timeout_s)
            return
        some = ObjectRange(object_id=wanted.object_id, offset=wanted.offset, size=self._keep)
        head = Part(wanted=some, target=part.target[: self._keep])
        super().read_part(endpoint, head, timeout_s=timeout_s)
        raise FetchError(f"{endpoint}: cut after {self._keep} bytes", source=endpoint)


class CorruptingReader(_ReaderWrapper):
    """Flips one bit at byte ``at`` of an object, unnoticed; of manifests too if asked."""

    def __init__(self, inner: ObjectReader, *, at: int, in_manifests: bool = False) -> None:
        super().__init__(inner)
        self._at = at
        self._in_manifests = in_manifests

    def read_part(self, endpoint: str, part: Part, *, timeout_s: float) -> None:
        """Read, then damage."""
        super().read_part(endpoint, part, timeout_s=timeout_s)
        index = self._at - part.wanted.offset
        if 0 <= index < part.wanted.size:
            part.target[index] ^= 1

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Read, then damage if asked to."""
        data = bytearray(super().read_manifest(address, size_max=size_max, timeout_s=timeout_s))
        if self._in_manifests:
            data[self._at % len(data)] ^= 1
        return bytes(data)


class FlakyReader(_ReaderWrapper):
    """Fails the first ``failures`` reads of anything."""

    def __init__(self, inner: ObjectReader, *, failures: int) -> None:
        super().__init__(inner)
        self._left = failures

    def read_part(self, endpoint: str, part: Part, *, timeout_s: float) -> None:
        """Fail or read."""
        self._maybe_fail()
        super().read_part(endpoint, part, timeout_s=timeout_s)

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Fail or read."""
        self._maybe_fail()
        return super().read_manifest(address, size_max=size_max, timeout_s=timeout_s)

    def _maybe_fail(self) -> None:
        if self._left > 0:
            self._left -= 1
            raise FetchError("the source is away")


class SlowReader(_ReaderWrapper):
    """Takes ``delay_s`` of the clock for every read; past the deadline it fails."""

    def __init__(self, inner: ObjectReader, *, clock: Clock, delay_s: float) -> None:
        super().__init__(inner, clock=clock)
        self._delay_s = delay_s

    def read_part(self, endpoint: str, part: Part, *, timeout_s: float) -> None:
        """Wait, then read."""
        self._clock.sleep(min(self._delay_s, timeout_s))
        if self._delay_s >= timeout_s:
            raise FetchError(f"{endpoint}: not done after {timeout_s:g} s", source=endpoint)
        super().read_part(endpoint, part, timeout_s=timeout_s - self._delay_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one connection's answers; by default they pass.

    Offsets count the bytes of the answers on that connection, heads included.
    """

    cut_at: int | None = None
    """Here both sides are cut; what came before arrives."""
    flip_at: int | None = None
    """In this byte a bit is flipped."""
    drop_at: int | None = None
    """This byte is left out, so that an answer comes short and the next one early."""
    repeat_at: int | None = None
    """This byte comes twice."""
    stall_at: int | None = None
    """From here on nothing comes, and the line stays open."""
    delay_s: float = 0.0
    """Before each piece of the answer is passed on."""
    busy: bool = False
    """Answer 503 and close, without asking the source."""


BUSY_ANSWER = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultyProxy:
    """A TCP proxy on loopback whose n-th connection suffers the n-th fault; later ones none."""

    def __init__(self, target: tuple[str, int], faults: Sequence[Fault] = ()) -> None:
        self._target = target
        self._faults = list(faults)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        """Closed at the end: a number closed early could be another connection's by then."""
        self._is_closed = threading.Event()
        self._start(self._accept)

    @property
    def endpoint(self) -> str:
        """Where a reader finds the source through the proxy."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Stop accepting and wait for what is open; close readers first."""
        self._is_closed.set()
        with contextlib.suppress(OSError):  # not connected: shutdown only wakes the accept
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(_IO_TIMEOUT_S)
        for connection in self._sockets:
            connection.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            fault = self._faults.pop(0) if self._faults else Fault()
            if fault.busy:
                self._refuse(client)
                continue
            source = socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT_S)
            for connection in (client, source):
                connection.settimeout(_IO_TIMEOUT_S)
                self._sockets.append(connection)
            self._start(self._relay, client, source, Fault())
            self._start(self._relay, source, client, fault)

    def _refuse(self, client: socket.socket) -> None:
        client.settimeout(_IO_TIMEOUT_S)
        self._sockets.append(client)
        with contextlib.suppress(OSError):  # gone already
            client.recv(65536)
            client.sendall(BUSY_ANSWER)
            client.shutdown(socket.SHUT_RDWR)

    def _relay(self, source: socket.socket, sink: socket.socket, fault: Fault) -> None:
        passed = 0
        with contextlib.suppress(OSError):  # the other direction cut the line
            while data := source.recv(65536):
                if fault.delay_s:
                    self._is_closed.wait(fault.delay_s)
                changed, is_last = _suffer(data, passed, fault)
                sink.sendall(changed)
                passed += len(data)
                if is_last:
                    break
            if fault.stall_at is not None and passed > fault.stall_at:
                self._is_closed.wait(_IO_TIMEOUT_S)
        for connection in (source, sink):
            with contextlib.suppress(OSError):  # gone already
                connection.shutdown(socket.SHUT_RDWR)


def _suffer(data: bytes, passed: int, fault: Fault) -> tuple[bytes, bool]:
    """Return what is passed on of a piece that begins at byte ``passed``, and whether it ends."""
    found, is_last = bytearray(data), False

    def index(at: int | None) -> int | None:
        return at - passed if at is not None and 0 <= at - passed < len(data) else None

    ends = [at for at in (index(fault.cut_at), index(fault.stall_at)) if at is not None]
    if ends:
        is_last = True
        del found[min(ends) :]
    flip, drop, repeat = index(fault.flip_at), index(fault.drop_at), index(fault.repeat_at)
    if flip is not None and flip < len(found):
        found[flip] ^= 1
    if drop is not None and drop < len(found):
        del found[drop]
    if repeat is not None and repeat < len(found):
        found.insert(repeat, found[repeat])
    return bytes(found), is_last
