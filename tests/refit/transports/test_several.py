"""Several transports as one: served through all, read through the best that works."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from paceline.refit.errors import FetchError, PublishError
from paceline.refit.model import ObjectRange
from paceline.refit.transports.http.reader import HttpObjectReader
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.refit.transports.protocol import (
    ObjectReader,
    Part,
    ReadPlan,
    ReadSession,
    Terms,
    read_object,
    read_parts,
)
from paceline.refit.transports.several import LEFT_ALONE_S, SeveralReaders, SeveralServers
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.transport import Link, TransportContract
from paceline.testing.faults import FlakyReader, TruncatingReader

TOKEN = "of-this-test"  # noqa: S105 - not a secret
DATA = bytes(range(256)) * 100


def http_reader() -> HttpObjectReader:
    return HttpObjectReader(token=lambda: TOKEN, clock=FakeClock(), chance=lambda: 0.0)


def servers() -> SeveralServers:
    return SeveralServers([MemoryObjectServer(), HttpObjectServer(token=lambda: TOKEN)])


class TestSeveral(TransportContract):
    """Memory preferred, HTTP behind it."""

    def make(self) -> Link:
        readers: dict[str, ObjectReader] = {"memory": MemoryObjectReader(), "http": http_reader()}
        return Link(server=servers(), reader=SeveralReaders(readers, clock=FakeClock()))


def parts(count: int = 4, size: int = 100) -> list[Part]:
    return [
        Part(
            wanted=ObjectRange(object_id="ab", offset=index * size, size=size),
            target=memoryview(bytearray(size)),
        )
        for index in range(count)
    ]


def test_what_one_way_did_not_bring_comes_through_the_next() -> None:
    """A way that breaks in mid-run keeps what it brought; each part is told of once."""
    source, clock = servers(), FakeClock()
    source.serve_object("ab", [memoryview(DATA)])
    broken = TruncatingReader(MemoryObjectReader(), keep=100)
    reader = SeveralReaders({"memory": broken, "http": http_reader()}, clock=clock)
    wanted = [*parts(2), *parts(1, size=300)]
    told: list[int] = []
    record = read_parts(reader, source.endpoint, wanted, Terms(timeout_s=9, on_part=told.append))
    assert [bytes(part.target) for part in wanted] == [DATA[:100], DATA[100:200], DATA[:300]]
    assert told == [0, 1, 2]
    assert (record.transport, record.retries) == ("http", 1)
    reader.close()
    source.close()


def test_a_failed_way_is_left_alone_for_a_while() -> None:
    """The next run does not begin with the way that has just failed; later it does again."""
    source, clock = servers(), FakeClock()
    source.serve_object("ab", [memoryview(DATA)])
    flaky = FlakyReader(MemoryObjectReader(), failures=1)
    reader = SeveralReaders({"memory": flaky, "http": http_reader()}, clock=clock)

    def by() -> str:
        return read_parts(reader, source.endpoint, parts(), Terms(timeout_s=9)).transport

    assert [by(), by()] == ["http", "http"]
    clock.sleep(LEFT_ALONE_S + 1)
    assert by() == "memory"
    reader.close()
    source.close()


def test_nothing_in_common() -> None:
    """A reader without any of the source's transports says which ones there are."""
    source = servers()
    reader = SeveralReaders({"s3": MemoryObjectReader()}, clock=FakeClock())
    with pytest.raises(FetchError, match="served over http, memory; this process reads s3"):
        read_object(
            reader,
            source.endpoint,
            ObjectRange(object_id="ab", offset=0, size=1),
            memoryview(bytearray(1)),
            timeout_s=1,
        )
    source.close()


class Refusing(MemoryObjectServer):
    """Takes nothing."""

    def serve_object(self, object_id: str, parts: object) -> None:
        raise PublishError("full")

    def publish_manifest(self, **_: object) -> str:
        raise PublishError("full")


def test_all_or_none() -> None:
    """What one transport refuses is served by none of them."""
    first = MemoryObjectServer()
    source = SeveralServers([first, Refusing()])
    with pytest.raises(PublishError):
        source.serve_object("ab", [memoryview(DATA)])
    with pytest.raises(PublishError):
        source.publish_manifest(
            version_id="v", source_slot_id="s", manifest=TestSeveral().manifest()
        )
    reader = MemoryObjectReader()
    with pytest.raises(FetchError):
        read_parts(reader, first.endpoint, parts(1), Terms(timeout_s=1))
    with pytest.raises(FetchError):
        reader.read_manifest(f"{first.endpoint}/v/s", size_max=99, timeout_s=1)
    source.close()
    with pytest.raises(ValueError, match="at least one"):
        SeveralServers([])


def test_a_session_is_that_of_the_reader_that_has_one() -> None:
    """Its window is lent through, its way is read through it, and what failed stays left alone."""
    source, clock = servers(), FakeClock()
    source.serve_object("ab", [memoryview(DATA)])
    lent = memoryview(bytearray(100))

    class Able(MemoryObjectReader):
        is_in_session = False

        @contextmanager
        def session(self, *, window_bytes: int) -> Iterator[ReadSession]:
            reader = Able()
            reader.is_in_session = True
            yield ReadSession(reader=reader, window=lent[:window_bytes])

        def plan_read(self, endpoint: str, parts: Sequence[Part], *, timeout_s: float) -> ReadPlan:
            assert self.is_in_session
            return super().plan_read(endpoint, parts, timeout_s=timeout_s)

    readers: dict[str, ObjectReader] = {"http": http_reader(), "memory": Able()}
    several = SeveralReaders(readers, clock=clock)
    several.note_failure(source.endpoint.split()[1])
    with several.session(window_bytes=50) as session:
        part = Part(wanted=ObjectRange(object_id="ab", offset=7, size=50), target=session.window)
        record = read_parts(session.reader, source.endpoint, [part], Terms(timeout_s=5))
        assert record.transport == "memory"
    assert lent[:50] == DATA[7:57]
    several.close()
    source.close()
