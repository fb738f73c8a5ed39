"""Both transports keep the contract; HTTP survives what networks do."""

import http.client
import socket
import threading
from collections.abc import Iterator
from functools import partial
from urllib.parse import urlsplit

import pytest

from paceline.core.errors import PreflightError
from paceline.core.registry import load_entry
from paceline.core.retry import RetryPolicy
from paceline.core.waiting import wait_until
from paceline.refit.errors import FetchError, StagingError
from paceline.refit.model import ObjectRange
from paceline.refit.staging.shelf import ObjectShelf
from paceline.refit.transports.http.connection import Connection
from paceline.refit.transports.http.kept import KEPT_MAX, KEPT_S, KeptConnections
from paceline.refit.transports.http.reader import HttpObjectReader, HttpReaderOptions
from paceline.refit.transports.http.server import HttpObjectServer, HttpServerOptions
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.refit.transports.protocol import read_object
from paceline.refit.transports.registry import OBJECT_READERS, OBJECT_SERVERS
from paceline.system import system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.transport import Link, TransportContract
from paceline.testing.faults import (
    CorruptingReader,
    Fault,
    FaultyProxy,
    FlakyReader,
    SlowReader,
    TruncatingReader,
)

TOKEN = "a-secret-token"  # noqa: S105 - of this test
DATA = bytes(range(256)) * 2000


def reader_of(clock: FakeClock | None = None, *, token: str = TOKEN) -> HttpObjectReader:
    return HttpObjectReader(
        token=lambda: token,
        clock=clock or FakeClock(),
        chance=lambda: 0.5,
        options=HttpReaderOptions(retry=RetryPolicy(attempts=3)),
    )


class TestMemory(TransportContract):
    """The reference."""

    def make(self) -> Link:
        return Link(server=MemoryObjectServer(), reader=MemoryObjectReader())


class TestHttp(TransportContract):
    """Sockets on loopback."""

    def make(self) -> Link:
        return Link(server=HttpObjectServer(token=lambda: TOKEN), reader=reader_of())


@pytest.fixture
def server() -> Iterator[HttpObjectServer]:
    server = HttpObjectServer(token=lambda: TOKEN)
    server.serve_object("ab", [memoryview(DATA)])
    yield server
    server.close()


@pytest.fixture
def reader() -> Iterator[HttpObjectReader]:
    reader = reader_of()
    yield reader
    reader.close()


def fetch(reader: HttpObjectReader, endpoint: str, *, timeout_s: float = 10.0) -> bytes:
    target = bytearray(len(DATA))
    wanted = ObjectRange(object_id="ab", offset=0, size=len(DATA))
    read_object(reader, endpoint, wanted, memoryview(target), timeout_s=timeout_s)
    return bytes(target)


def address_of(server: HttpObjectServer) -> tuple[str, int]:
    parts = urlsplit(server.endpoint)
    return parts.hostname or "", parts.port or 0


def ask(
    server: HttpObjectServer, path: str, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    """One plain request with the right token unless another is given."""
    connection = http.client.HTTPConnection(*address_of(server), timeout=5)
    sent = {"Authorization": f"Bearer {TOKEN}", **headers}
    connection.request("GET", path, headers=sent)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_registry_names_lead_here() -> None:
    """The names of both transports load."""
    for name in ("http", "memory"):
        assert load_entry(OBJECT_SERVERS, name, port="transport")
        assert load_entry(OBJECT_READERS, name, port="transport")


@pytest.mark.parametrize(
    ("asked", "status", "range_given", "length"),
    [
        (None, 200, None, len(DATA)),
        ("bytes=0-0", 206, f"bytes 0-0/{len(DATA)}", 1),
        ("bytes=10-", 206, f"bytes 10-{len(DATA) - 1}/{len(DATA)}", len(DATA) - 10),
        ("bytes=5-99999999999", 206, f"bytes 5-{len(DATA) - 1}/{len(DATA)}", len(DATA) - 5),
        (f"bytes={len(DATA)}-", 416, f"bytes */{len(DATA)}", None),
        ("bytes=9-5", 416, f"bytes */{len(DATA)}", None),
        ("lines=1-2", 200, None, len(DATA)),
    ],
)
def test_ranges_as_http_says(
    server: HttpObjectServer, asked: str | None, status: int, range_given: str, length: int | None
) -> None:
    """Any HTTP client gets the ranges that RFC 9110 describes."""
    answer, body = ask(server, "/v1/objects/ab", **({"Range": asked} if asked else {}))
    assert answer.status == status
    assert answer.headers.get("Content-Range") == range_given
    if length is not None:
        assert len(body) == length


@pytest.mark.parametrize(
    "path", ["/", "/v1/objects/", "/v1/objects/zz", "/v1/objects/a/b", "/v1/manifests/x", "//x"]
)
def test_unknown_paths(server: HttpObjectServer, path: str) -> None:
    """Everything else is not found."""
    assert ask(server, path)[0].status == 404


@pytest.mark.parametrize("given", ["", "Bearer wrong", "Basic x", f"Bearer {TOKEN}x", "Bearer "])
def test_token_is_required(server: HttpObjectServer, given: str) -> None:
    """Without the token nothing is said, not even whether an object exists."""
    for path in ("/v1/objects/ab", "/v1/objects/zz"):
        answer, body = ask(server, path, Authorization=given)
        assert answer.status == 401
        assert TOKEN.encode() not in body


def test_empty_token_admits_nobody() -> None:
    """A server whose token is empty by mistake is closed, not open."""
    server = HttpObjectServer(token=lambda: "")
    answer, _ = ask(server, "/v1/objects/ab", Authorization="Bearer ")
    server.close()
    assert answer.status == 401


def test_wrong_token_is_final_and_secret(server: HttpObjectServer) -> None:
    """The reader says what is wrong, does not retry, and shows no token."""
    clock = FakeClock()
    reader = reader_of(clock, token="another-token")  # noqa: S106 - of this test
    with pytest.raises(FetchError, match="token is missing or wrong") as refused:
        fetch(reader, server.endpoint)
    reader.close()
    assert "another-token" not in str(refused.value)
    assert clock.monotonic() == 0


def test_taken_port_is_explained(server: HttpObjectServer) -> None:
    """A port in use is a preflight error that names it."""
    port = address_of(server)[1]
    with pytest.raises(PreflightError, match=f"port {port}"):
        HttpObjectServer(token=lambda: TOKEN, port=port)
    with pytest.raises(PreflightError, match="cannot listen"):
        HttpObjectServer(token=lambda: TOKEN, host="203.0.113.7")


def test_connections_are_kept(server: HttpObjectServer, reader: HttpObjectReader) -> None:
    """Many reads go over one connection."""
    proxy = FaultyProxy(address_of(server), [Fault()])
    for _ in range(5):
        assert fetch(reader, proxy.endpoint) == DATA
    reader.close()
    proxy.close()
    assert len(proxy._threads) == 1 + 2


@pytest.mark.parametrize("cut_at", [0, 10, 300, 5000, len(DATA) // 2, len(DATA)])
def test_cut_transfers_are_resumed(
    server: HttpObjectServer, reader: HttpObjectReader, cut_at: int
) -> None:
    """Wherever a connection is cut, in head or body, the read goes on from the byte reached."""
    proxy = FaultyProxy(address_of(server), [Fault(cut_at=cut_at), Fault(cut_at=cut_at)])
    assert fetch(reader, proxy.endpoint) == DATA
    reader.close()
    proxy.close()


def test_retries_are_bounded(server: HttpObjectServer, reader: HttpObjectReader) -> None:
    """A source that is always cut is given up."""
    proxy = FaultyProxy(address_of(server), [Fault(cut_at=400)] * 9)
    with pytest.raises(FetchError, match="gave up after 3 tries"):
        fetch(reader, proxy.endpoint)
    reader.close()
    proxy.close()


def test_deadline_is_total(server: HttpObjectServer) -> None:
    """No wait between tries goes past the deadline."""
    clock = FakeClock()
    reader = reader_of(clock)
    dead = FaultyProxy(address_of(server), [Fault(cut_at=0)] * 9)
    with pytest.raises(FetchError):
        fetch(reader, dead.endpoint, timeout_s=0.3)
    reader.close()
    dead.close()
    assert clock.monotonic() <= 0.3


def scripted(*answers: bytes) -> tuple[str, socket.socket, threading.Thread]:
    """A source that answers each connection with given bytes, whatever it is asked."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            connection.settimeout(5)
            connection.recv(65536)
            connection.sendall(answer)
            connection.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", listener, thread


def part(content_range: str, length: object, body: bytes) -> bytes:
    """A 206 answer."""
    head = f"HTTP/1.1 206 Partial Content\r\nContent-Range: {content_range}\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode() + body


LIES = {
    "another range": part("bytes 1-4/9", 4, b"abcd"),
    "no range": part("", 4, b"abcd"),
    "longer": part("bytes 0-3/9", 5, b"abcde"),
    "shorter": part("bytes 0-3/9", 3, b"abc"),
    "no length": b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-3/9\r\n\r\nabcd",
    "chunked": b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-3/9\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n",
    "all instead of a part": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd",
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused(name: str) -> None:
    """An answer that is not exactly the range asked for is refused at once."""
    endpoint, listener, thread = scripted(LIES[name])
    reader = reader_of()
    wanted = ObjectRange(object_id="ab", offset=0, size=4)
    with pytest.raises(FetchError):
        read_object(reader, endpoint, wanted, memoryview(bytearray(4)), timeout_s=5)
    thread.join(5)
    listener.close()


def test_busy_and_garbage_are_tried_again() -> None:
    """A busy source and an answer that is no HTTP are worth another try."""
    endpoint, listener, thread = scripted(
        b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
        b"what?\r\n\r\n",
        part("bytes 0-3/9", 4, b"abcd"),
    )
    reader, target = reader_of(), bytearray(4)
    wanted = ObjectRange(object_id="ab", offset=0, size=4)
    read_object(reader, endpoint, wanted, memoryview(target), timeout_s=5)
    thread.join(5)
    listener.close()
    reader.close()
    assert target == b"abcd"


@pytest.mark.parametrize("address", ["", "x", "https://h/v1", "http://u:p@h/v1", "http://h/v1?x"])
def test_addresses_are_checked(reader: HttpObjectReader, address: str) -> None:
    """What is no address of ours is refused without I/O."""
    with pytest.raises(FetchError):
        reader.read_manifest(address, size_max=9, timeout_s=1)


def test_too_many_connections_are_turned_away() -> None:
    """Above the limit a connection is answered 503; the others go on."""
    server = HttpObjectServer(token=lambda: TOKEN, options=HttpServerOptions(connections_max=1))
    held = socket.create_connection(address_of(server), timeout=5)
    held.sendall(b"GET / HTTP/1.1\r\n")
    second = socket.create_connection(address_of(server), timeout=5)
    assert second.recv(12) == b"HTTP/1.1 503"
    second.close()
    held.sendall(b"\r\n")
    assert held.recv(12) == b"HTTP/1.1 401"
    held.close()
    server.close()


def wait_until_resting(server: HttpObjectServer) -> socket.socket:
    """Wait until a connection is waiting for its next request, and return the server's end."""
    resting = server._listener._resting
    wait_until(
        lambda: bool(resting),
        what="a connection at rest",
        clock=system_clock(),
        timeout_s=20,
        interval_s=0.005,
    )
    return next(iter(resting))


def test_who_was_answered_may_rest_and_gives_way() -> None:
    """Between slow steps a connection stays, longer than a request may take to arrive."""
    options = HttpServerOptions(connections_max=1, io_timeout_s=20, rest_s=500)
    server = HttpObjectServer(token=lambda: TOKEN, options=options)
    server.serve_object("ab", [memoryview(DATA)])
    first, second = reader_of(), reader_of()
    for _ in range(2):
        assert fetch(first, server.endpoint) == DATA
        resting = wait_until_resting(server)
        assert resting.gettimeout() == 500
    assert fetch(second, server.endpoint) == DATA  # there was room for one
    assert wait_until_resting(server) is not resting
    assert fetch(first, server.endpoint) == DATA  # it finds its own closed, and opens another
    wait_until_resting(server)
    stranger = http.client.HTTPConnection(*address_of(server), timeout=5)
    stranger.request("GET", "/", headers={"Authorization": "Bearer guessed"})
    assert stranger.getresponse().read()
    assert not server._listener._resting
    assert [each.gettimeout() for each in server._listener._open] == [20]
    for each in (stranger, first, second, server):
        each.close()


def test_kept_connections_are_few_and_young() -> None:
    """Those of endpoints that nobody asks any more go too."""
    clock = FakeClock()
    kept = KeptConnections(clock)
    made = {name: Connection(f"http://{name}", tls=None) for name in ("gone", "here")}
    closed: list[Connection] = []
    for each in made.values():
        each.close = partial(closed.append, each)  # type: ignore[method-assign]
    kept.give_back("gone", made["gone"])
    clock.sleep(KEPT_S + 1)
    for _ in range(KEPT_MAX + 1):
        kept.give_back("here", made["here"])
    assert closed == [made["gone"], made["here"]]
    assert (kept.take("gone"), kept.take("here")) == (None, made["here"])
    kept.close()
    assert kept.take("here") is None


def test_withdraw_cuts_a_reader_that_does_not_take() -> None:
    """A reader that stops reading does not hold the buffers for ever."""
    server = HttpObjectServer(
        token=lambda: TOKEN, options=HttpServerOptions(withdraw_patience_s=0.5)
    )
    server.serve_object("ab", [memoryview(bytes(64 * 2**20))])
    lazy = socket.create_connection(address_of(server), timeout=5)
    lazy.sendall(f"GET /v1/objects/ab HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    assert lazy.recv(12) == b"HTTP/1.1 200"
    server.withdraw_object("ab")
    lazy.close()
    server.close()


def test_shelf_waits_for_readers_and_keeps_what_is_stuck() -> None:
    """Withdrawing returns after the last reader; a stuck one is an error, not a reused buffer."""
    shelf = ObjectShelf()
    shelf.put("a", [memoryview(b"abc")])
    cancelled = []
    with shelf.reading("a", cancel=lambda: cancelled.append(1)) as held:
        assert held is not None
        with pytest.raises(StagingError, match="did not leave"):
            shelf.withdraw("a", patience_s=0.01)
    assert cancelled == [1]
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with shelf.reading("a"):
            inside.set()
            leave.wait(5)

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait(5)
    withdrawn: list[str] = []

    def withdraw() -> None:
        shelf.withdraw("a", patience_s=5)
        withdrawn.append("yes")

    waiter = threading.Thread(target=withdraw)
    waiter.start()
    assert not withdrawn
    leave.set()
    waiter.join(5)
    thread.join(5)
    assert withdrawn == ["yes"]
    with shelf.reading("a") as gone:
        assert gone is None


def test_faults_do_what_they_say() -> None:
    """Each faulty reader goes wrong in its own way and otherwise reads on."""
    server, plain, clock = MemoryObjectServer(), MemoryObjectReader(), FakeClock()
    server.serve_object("ab", [memoryview(b"0123")])
    wanted = ObjectRange(object_id="ab", offset=0, size=4)
    target = bytearray(4)

    def read(
        reader: TruncatingReader | CorruptingReader | FlakyReader | SlowReader, timeout_s: float = 9
    ) -> bytes:
        read_object(reader, server.endpoint, wanted, memoryview(target), timeout_s=timeout_s)
        return bytes(target)

    with pytest.raises(FetchError, match="after 2"):
        read(TruncatingReader(plain, keep=2))
    assert target == b"01\0\0"
    assert read(TruncatingReader(plain, keep=4)) == b"0123"
    assert read(CorruptingReader(plain, at=3)) == b"0122"
    flaky = FlakyReader(plain, failures=1)
    with pytest.raises(FetchError):
        read(flaky)
    assert read(flaky) == b"0123"
    slow = SlowReader(plain, clock=clock, delay_s=2)
    assert read(slow) == b"0123"
    with pytest.raises(FetchError):
        read(slow, timeout_s=1)
    assert clock.monotonic() == 3
