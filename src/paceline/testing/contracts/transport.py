"""What every transport must do: inherit, implement ``make``, and all claims are tested."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pytest

from paceline.refit.errors import FetchError, PublishError, TransferCancelledError
from paceline.refit.model import ObjectRange, WeightVersionShardManifest
from paceline.refit.trainers.protocol import WeightVersionShardManifestPublisher
from paceline.refit.transports.protocol import (
    ObjectReader,
    ObjectServer,
    Part,
    SupportsReplace,
    Terms,
    open_session,
    read_object,
    read_parts,
)

TIMEOUT_S = 10.0
PARTS = (b"", b"0123456789", b"a", bytes(range(256)) * 1000, b"")
WHOLE = b"".join(PARTS)


class Source(ObjectServer, WeightVersionShardManifestPublisher, Protocol):
    """A server of a trainer process: objects and manifests behind one endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Both ends of a transport."""

    server: Source
    reader: ObjectReader


class TransportContract(ABC):
    """Claims about serving and reading, for any transport."""

    copies = False
    """True where serving takes a copy to somewhere that outlives the server."""

    @abstractmethod
    def make(self) -> Link:
        """Return a fresh server and a reader that may read from it."""

    @pytest.fixture
    def link(self) -> Iterator[Link]:
        """Both ends, closed afterwards."""
        link = self.make()
        yield link
        link.reader.close()
        link.server.close()

    def serve(self, link: Link, object_id: str = "ab12") -> str:
        """Serve the sample in several parts."""
        link.server.serve_object(object_id, [memoryview(part) for part in PARTS])
        return object_id

    def read(self, link: Link, object_id: str, offset: int, size: int) -> bytes:
        """Read a range into a fresh buffer."""
        target = bytearray(size)
        wanted = ObjectRange(object_id=object_id, offset=offset, size=size)
        read_object(
            link.reader, link.server.endpoint, wanted, memoryview(target), timeout_s=TIMEOUT_S
        )
        return bytes(target)

    @pytest.mark.parametrize(
        ("offset", "size"),
        [(0, len(WHOLE)), (0, 1), (9, 3), (10, 1), (11, 5000), (len(WHOLE) - 1, 1), (5, 0)],
    )
    def test_ranges_arrive(self, link: Link, offset: int, size: int) -> None:
        """Any range inside an object arrives exactly, across the seams of its parts."""
        object_id = self.serve(link)
        assert self.read(link, object_id, offset, size) == WHOLE[offset : offset + size]

    @pytest.mark.parametrize("window", [0, 1000, len(WHOLE)])
    def test_sessions(self, link: Link, window: int) -> None:
        """A fetch gets memory of its own, reads into it again and again, and another is apart."""
        object_id = self.serve(link)
        with (
            open_session(link.reader, window_bytes=window) as session,
            open_session(link.reader, window_bytes=window) as other,
        ):
            assert len(session.window) == len(other.window) == window
            other.window[:] = bytes(window)
            for offset in range(0, len(WHOLE), len(WHOLE) // 3 + 1):
                size = min(window, len(WHOLE) - offset)
                target = session.window[:size]
                wanted = ObjectRange(object_id=object_id, offset=offset, size=size)
                read_object(
                    session.reader, link.server.endpoint, wanted, target, timeout_s=TIMEOUT_S
                )
                assert target == WHOLE[offset : offset + size]
            assert other.window == bytes(window)
        assert self.read(link, object_id, 0, 4) == WHOLE[:4]

    @pytest.mark.parametrize(("offset", "size"), [(len(WHOLE), 1), (0, len(WHOLE) + 1), (10**9, 5)])
    def test_past_the_end(self, link: Link, offset: int, size: int) -> None:
        """A range that reaches past the end is refused."""
        object_id = self.serve(link)
        with pytest.raises(FetchError):
            self.read(link, object_id, offset, size)

    def test_target_of_another_size(self, link: Link) -> None:
        """A target that is not as long as the range is our mistake, found before any I/O."""
        wanted = ObjectRange(object_id=self.serve(link), offset=0, size=3)
        with pytest.raises(ValueError, match="target"):
            read_object(
                link.reader,
                link.server.endpoint,
                wanted,
                memoryview(bytearray(2)),
                timeout_s=TIMEOUT_S,
            )

    def test_unknown_object(self, link: Link) -> None:
        """What is not served cannot be fetched."""
        with pytest.raises(FetchError):
            self.read(link, "00", 0, 1)

    def test_serving_twice_is_once(self, link: Link) -> None:
        """Serving the same id again changes nothing, and one withdrawal ends it."""
        object_id = self.serve(link)
        self.serve(link)
        assert self.read(link, object_id, 0, 4) == WHOLE[:4]
        link.server.withdraw_object(object_id)
        link.server.withdraw_object(object_id)
        with pytest.raises(FetchError):
            self.read(link, object_id, 0, 4)

    def test_buffers_are_served_where_they_lie(self, link: Link) -> None:
        """Nothing is copied on the source: a write to the buffer is seen (hence the leases).

        Where serving copies, what was served is what is read.
        """
        buffer = bytearray(b"old!")
        link.server.serve_object("ab", [memoryview(buffer)])
        buffer[:] = b"new!"
        assert self.read(link, "ab", 0, 4) == (b"old!" if self.copies else b"new!")

    def test_the_same_bytes_from_elsewhere(self, link: Link) -> None:
        """Where an object can be replaced, its old memory may be written to afterwards."""
        if not isinstance(link.server, SupportsReplace):
            return
        buffer = bytearray(b"old!")
        link.server.serve_object("ab", [memoryview(buffer)])
        link.server.replace_object("ab", [memoryview(b"ol"), memoryview(b"d!")])
        buffer[:] = b"new!"
        assert self.read(link, "ab", 0, 4) == b"old!"
        link.server.withdraw_object("ab")
        link.server.replace_object("ab", [memoryview(b"old!")])
        with pytest.raises(FetchError):
            self.read(link, "ab", 0, 4)

    def test_many_readers(self, link: Link) -> None:
        """Several threads read at once, each its own range."""
        object_id = self.serve(link)
        found: dict[int, bytes] = {}

        def read(offset: int) -> None:
            found[offset] = self.read(link, object_id, offset, 100_000)

        threads = [threading.Thread(target=read, args=(offset,)) for offset in range(0, 8000, 1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert found == {offset: WHOLE[offset : offset + 100_000] for offset in found}
        assert len(found) == len(threads)

    def parts(self, *ranges: tuple[str, int, int]) -> list[Part]:
        """Fresh buffers for (object, offset, size)."""
        return [
            Part(
                wanted=ObjectRange(object_id=object_id, offset=offset, size=size),
                target=memoryview(bytearray(size)),
            )
            for object_id, offset, size in ranges
        ]

    def test_one_plan_of_many_parts(self, link: Link) -> None:
        """Parts of several objects, next to each other or not, all arrive, each told of once."""
        self.serve(link)
        link.server.serve_object("cd34", [memoryview(b"another")])
        parts = self.parts(
            ("ab12", 0, 5), ("ab12", 5, 9), ("cd34", 2, 3), ("ab12", 14, 0), ("ab12", 1000, 90_000)
        )
        told: list[int] = []
        terms = Terms(timeout_s=TIMEOUT_S, on_part=told.append)
        record = read_parts(link.reader, link.server.endpoint, parts, terms)
        expected = [WHOLE[:5], WHOLE[5:14], b"oth", b"", WHOLE[1000:91_000]]
        assert [bytes(part.target) for part in parts] == expected
        assert sorted(told) == [0, 1, 2, 3, 4]
        assert record.num_bytes == 90_017
        assert record.source == link.server.endpoint
        assert record.transport
        assert record.seconds >= 0
        assert record.retries == 0

    def test_a_plan_runs_again(self, link: Link) -> None:
        """What is planned once may run as often as wanted, into the same buffers."""
        object_id = self.serve(link)
        parts = self.parts((object_id, 3, 4000))
        plan = link.reader.plan_read(link.server.endpoint, parts, timeout_s=TIMEOUT_S)
        for _ in range(3):
            parts[0].target[:] = bytes(4000)
            plan.run(Terms(timeout_s=TIMEOUT_S))
            assert bytes(parts[0].target) == WHOLE[3:4003]
        plan.close()
        plan.close()

    def test_errors_name_source_and_range(self, link: Link) -> None:
        """Whoever picks sources learns from the error which one failed, and what is missing."""
        object_id = self.serve(link)
        parts = self.parts((object_id, 0, 9), ("00", 4, 6))
        with pytest.raises(FetchError) as caught:
            read_parts(link.reader, link.server.endpoint, parts, Terms(timeout_s=TIMEOUT_S))
        assert caught.value.source == link.server.endpoint
        assert caught.value.wanted == parts[1].wanted

    def test_cancelled(self, link: Link) -> None:
        """A run that nobody wants any more ends, blames nobody, and leaves the rest alone."""
        object_id = self.serve(link)
        parts = self.parts((object_id, 0, 9), (object_id, 100, 5))
        terms = Terms(timeout_s=TIMEOUT_S, is_cancelled=lambda: True)
        with pytest.raises(TransferCancelledError):
            read_parts(link.reader, link.server.endpoint, parts, terms)
        assert bytes(parts[1].target) == bytes(5)
        assert self.read(link, object_id, 0, 4) == WHOLE[:4]

    def manifest(self, data: bytes = b"{}") -> WeightVersionShardManifest:
        """A manifest of any content."""
        return WeightVersionShardManifest(
            data=data, tensor_count=1, total_bytes=1, transport="http"
        )

    def publish(self, link: Link, data: bytes = b"{}") -> str:
        """Publish under one key, with characters that need quoting."""
        return link.server.publish_manifest(
            version_id="run a/1",
            source_slot_id="publisher:global-rank:0",
            manifest=self.manifest(data),
        )

    def test_manifests_arrive(self, link: Link) -> None:
        """A published manifest is read at its address, and the address names the endpoint."""
        address = self.publish(link, b"{}" * 500)
        assert link.reader.source_endpoint(address) == link.server.endpoint
        found = link.reader.read_manifest(address, size_max=1000, timeout_s=TIMEOUT_S)
        assert found == b"{}" * 500

    def test_manifests_are_bounded(self, link: Link) -> None:
        """A manifest above the limit is refused."""
        address = self.publish(link, b"{}" * 500)
        with pytest.raises(FetchError, match="over 999"):
            link.reader.read_manifest(address, size_max=999, timeout_s=TIMEOUT_S)

    def test_manifests_never_change(self, link: Link) -> None:
        """Publishing again is fine; publishing something else under the key is refused."""
        address = self.publish(link)
        assert self.publish(link) == address
        with pytest.raises(PublishError):
            self.publish(link, b"[]")
        assert link.reader.read_manifest(address, size_max=9, timeout_s=TIMEOUT_S) == b"{}"

    def test_released_manifests_are_gone(self, link: Link) -> None:
        """After release the manifest cannot be read, and releasing again is fine."""
        address = self.publish(link)
        for _ in range(2):
            link.server.release_manifest(
                version_id="run a/1", source_slot_id="publisher:global-rank:0"
            )
        with pytest.raises(FetchError):
            link.reader.read_manifest(address, size_max=9, timeout_s=TIMEOUT_S)

    def test_close_is_final_and_idempotent(self, link: Link) -> None:
        """A closed server serves nothing new, and closing twice is fine on both ends.

        What it served is gone with it, or stays where it was copied to.
        """
        object_id = self.serve(link)
        assert self.read(link, object_id, 0, 1) == b"0"
        for _ in range(2):
            link.server.close()
        if self.copies:
            assert self.read(link, object_id, 0, 1) == b"0"
            with pytest.raises(PublishError):
                self.serve(link, "cd34")
        else:
            with pytest.raises(FetchError):
                self.read(link, object_id, 0, 1)
        for _ in range(2):
            link.reader.close()
