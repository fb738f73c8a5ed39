"""A payload arrives whole and proven, whatever lies between, or not at all."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import PreflightError
from paceline.core.retry import RetryPolicy
from paceline.refit.control.tls import KeyPair, issue, new_authority
from paceline.refit.errors import FetchError, LyingSourceError, NoRoomError, VerifyError
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import Shard, TensorBuffer
from paceline.refit.receiver.attempt import Attempt
from paceline.refit.receiver.fetch import Fetcher, FetchLimits, FetchParts
from paceline.refit.receiver.pieces import Piece, pieces_of
from paceline.refit.transports.http.reader import HttpObjectReader, HttpReaderOptions
from paceline.refit.transports.http.server import (
    HttpObjectServer,
    HttpServerOptions,
    HttpTlsFiles,
)
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.refit.transports.protocol import ObjectReader, TransferRecord
from paceline.system import system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.faults import CorruptingReader, Fault, FaultyProxy
from paceline.testing.payloads import full_payload
from refit.conftest import SMALL_DISK_BYTES

TOKEN = "of-this-test"  # noqa: S105 - not a secret
CHUNK_BYTES = 50_000


def payload(num_elements: int = 300_000) -> tuple[Manifest, bytes]:
    data = np.random.default_rng(3).integers(0, 2**16, num_elements, dtype=np.uint16)
    tensors = [
        TensorBuffer(
            name=f"w{index}",
            dtype="U16",
            shape=(len(part),),
            data=memoryview(part.tobytes()),
        )
        for index, part in enumerate(np.array_split(data, 3))
    ]
    return full_payload(tensors, chunk_bytes=CHUNK_BYTES)


MANIFEST, DATA = payload()
OBJECT = MANIFEST.objects[0]


def shard(endpoint: str, worker: str = "t") -> Shard:
    return Shard(
        version_id="v",
        source_slot_id="s",
        worker_id=worker,
        tensor_count=3,
        total_bytes=len(DATA),
        manifest_digest="",
        manifest_endpoint=f"{endpoint}/v1/manifests/v/s",
    )


def http_reader(*, streams: int = 1, trusted: bytes | None = None) -> HttpObjectReader:
    return HttpObjectReader(
        token=lambda: TOKEN,
        clock=system_clock(),
        chance=lambda: 0.0,
        options=HttpReaderOptions(
            retry=RetryPolicy(attempts=4, first_delay_s=0.001, jitter=0.0),
            streams=streams,
            trusted=trusted,
        ),
    )


LIMITS = FetchLimits(read_timeout_s=20, hedge_after_s=15, window_bytes=4 * CHUNK_BYTES)


def fetch(
    reader: ObjectReader,
    endpoints: Sequence[str],
    *,
    limits: FetchLimits = LIMITS,
    records: list[TransferRecord] | None = None,
    manifest: Manifest = MANIFEST,
) -> bytes:
    parts = FetchParts(
        clock=system_clock(),
        limits=limits,
        on_record=(lambda record: None) if records is None else records.append,
    )
    sources = [shard(each, f"t{index}") for index, each in enumerate(endpoints)]
    found = Fetcher(reader, parts).fetch_objects(manifest, sources, bytes_max=2**30)
    return bytes(found[manifest.objects[0].object_id])


@pytest.fixture(scope="module")
def server() -> Iterator[HttpObjectServer]:
    server = HttpObjectServer(token=lambda: TOKEN)
    server.serve_object(OBJECT.object_id, [memoryview(DATA)])
    yield server
    server.close()


def target_of(server: HttpObjectServer) -> tuple[str, int]:
    parts = urlsplit(server.endpoint)
    return parts.hostname or "", parts.port or 0


EXAMPLES = settings(
    max_examples=max(10, settings().max_examples // 5),  # each takes real time
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
WINDOWS = [4 * CHUNK_BYTES, CHUNK_BYTES - 7]
"""The second is smaller than a chunk."""
OFFSETS = st.integers(0, 3 * CHUNK_BYTES)
FAULTS = st.one_of(
    st.builds(Fault, cut_at=OFFSETS),
    st.builds(Fault, flip_at=OFFSETS),
    st.builds(Fault, drop_at=OFFSETS),
    st.builds(Fault, repeat_at=OFFSETS),
    st.builds(Fault, stall_at=OFFSETS),
    st.builds(Fault, delay_s=st.floats(0, 0.01), cut_at=OFFSETS),
    st.just(Fault(busy=True)),
    st.just(Fault()),
)


@settings(EXAMPLES)
@given(
    faults=st.lists(FAULTS, max_size=6),
    streams=st.sampled_from([1, 3]),
    window=st.sampled_from(WINDOWS),
)
def test_whatever_happens_on_the_way(
    server: HttpObjectServer, faults: list[Fault], streams: int, window: int
) -> None:
    """Through a faulty line, with a good source behind it, exactly the right bytes come out."""
    limits = FetchLimits(read_timeout_s=0.5, hedge_after_s=0.05, window_bytes=window)
    proxy = FaultyProxy(target_of(server), faults)
    reader = http_reader(streams=streams)
    try:
        assert fetch(reader, [proxy.endpoint, server.endpoint], limits=limits) == DATA
    finally:
        reader.close()
        proxy.close()


@settings(EXAMPLES)
@given(faults=st.lists(FAULTS, min_size=1, max_size=3), window=st.sampled_from(WINDOWS))
def test_with_one_source_it_is_all_or_an_error(
    server: HttpObjectServer, faults: list[Fault], window: int
) -> None:
    """Without another source the fetch ends in the right bytes or in a typed error, in time."""
    limits = FetchLimits(read_timeout_s=0.3, window_bytes=window)
    proxy = FaultyProxy(target_of(server), faults)
    reader = http_reader()
    try:
        assert fetch(reader, [proxy.endpoint], limits=limits) == DATA
    except (FetchError, VerifyError):
        pass
    finally:
        reader.close()
        proxy.close()


@pytest.mark.parametrize("window", WINDOWS)
def test_a_liar_is_named_and_asked_no_more(window: int) -> None:
    """Wrong bytes blame their source; the range comes from elsewhere, and so does the rest."""
    limits = replace(LIMITS, window_bytes=window)
    server = MemoryObjectServer()
    server.serve_object(OBJECT.object_id, [memoryview(DATA)])
    lying = CorruptingReader(MemoryObjectReader(), at=2 * CHUNK_BYTES + 7)
    records: list[TransferRecord] = []
    asked: list[str] = []

    class TwoWays(MemoryObjectReader):
        """``lie`` is read through the liar, everything else is not."""

        def plan_read(self, endpoint, parts, *, timeout_s):  # type: ignore[no-untyped-def]
            asked.append(endpoint)
            if endpoint == "memory://lie":
                return lying.plan_read(server.endpoint, parts, timeout_s=timeout_s)
            return super().plan_read(server.endpoint, parts, timeout_s=timeout_s)

    sources = ["memory://lie", "memory://true"]
    assert fetch(TwoWays(), sources, limits=limits, records=records) == DATA
    told = [record.problem for record in records if record.problem]
    assert len(told) == 1
    assert "memory://lie is to be avoided" in told[0]
    assert "chunk 2 does not have its hash" in told[0]
    assert "memory://lie" not in asked[asked.index("memory://true") :]
    with pytest.raises(LyingSourceError) as caught:
        fetch(TwoWays(), ["memory://lie"], limits=limits)
    assert caught.value.source == "memory://lie"
    assert caught.value.wanted is not None
    assert caught.value.wanted.offset == 2 * CHUNK_BYTES


@pytest.mark.parametrize("window", WINDOWS)
def test_a_slow_source_is_hedged(server: HttpObjectServer, window: int) -> None:
    """When nothing comes for a while, a second source is asked and its bytes are used."""
    stalled = FaultyProxy(target_of(server), [Fault(stall_at=CHUNK_BYTES + 999)] * 9)
    limits = FetchLimits(read_timeout_s=20, hedge_after_s=0.1, window_bytes=window)
    records: list[TransferRecord] = []
    reader = http_reader()
    started = system_clock().monotonic()
    assert (
        fetch(reader, [stalled.endpoint, server.endpoint], limits=limits, records=records) == DATA
    )
    assert system_clock().monotonic() - started < 10
    assert {record.source for record in records} == {stalled.endpoint, server.endpoint}
    reader.close()
    stalled.close()


def test_what_is_missing_is_not_counted_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of very many tiny tensors takes as long as its pieces, not as their square."""
    monkeypatch.setattr(Attempt, "missing", property(lambda self: pytest.fail("counted")))
    source = MemoryObjectServer()
    source.serve_object(OBJECT.object_id, [memoryview(DATA)])
    assert fetch(MemoryObjectReader(), [source.endpoint, "memory://spare"]) == DATA


def test_silence_has_an_end(server: HttpObjectServer) -> None:
    """A source that says nothing for the time of one chunk is given up, and named."""
    stalled = FaultyProxy(target_of(server), [Fault(stall_at=10)] * 9)
    limits = FetchLimits(read_timeout_s=0.3, window_bytes=4 * CHUNK_BYTES)
    reader = http_reader()
    with pytest.raises(FetchError, match=r"nothing came for 0\.3 s") as caught:
        fetch(reader, [stalled.endpoint], limits=limits)
    assert caught.value.source == stalled.endpoint
    reader.close()
    stalled.close()


def test_records_tell_what_happened(server: HttpObjectServer) -> None:
    """Each window leaves a record with source, bytes, stages and retries."""
    proxy = FaultyProxy(target_of(server), [Fault(cut_at=CHUNK_BYTES), Fault(busy=True)])
    records: list[TransferRecord] = []
    reader = http_reader()
    fetch(reader, [proxy.endpoint], records=records)
    assert sum(record.num_bytes for record in records) == len(DATA)
    assert sum(record.retries for record in records) == 2
    assert all(set(record.stages) == {"move", "prove"} for record in records)
    assert all(record.bytes_per_s > 0 for record in records)
    reader.close()
    proxy.close()


def test_by_content_is_the_same_payload() -> None:
    """Tensor by tensor or chunk by chunk: the pieces cover every byte once."""
    for by_content in (False, True):
        pieces = list(pieces_of(MANIFEST, by_content=by_content))
        end = 0
        for piece in pieces:
            assert piece.wanted.offset == end
            end += piece.wanted.size
            prove(piece, memoryview(DATA)[piece.wanted.offset : end])
        assert end == len(DATA)
        proven = [piece for piece in pieces if piece.wanted.size > 64]
        wrong = bytearray(DATA[proven[0].wanted.offset :][: proven[0].wanted.size])
        wrong[-1] ^= 1
        with pytest.raises(VerifyError):
            prove(proven[0], memoryview(wrong))


def prove(piece: Piece, data: memoryview) -> None:
    proof = piece.begin()
    proof.update(data)
    proof.finish()


def test_a_full_disk_is_an_error_before_the_first_byte(small_disk: Path) -> None:
    """Where weights must wait there is no room: told before anything is fetched."""
    source = MemoryObjectServer()
    records: list[TransferRecord] = []
    manifest, data = payload(SMALL_DISK_BYTES)
    source.serve_object(manifest.objects[0].object_id, [memoryview(data)])
    limits = FetchLimits(window_bytes=2**20, spool_dir=small_disk)
    with pytest.raises(FetchError, match=r"is full: .* point TMPDIR elsewhere"):
        fetch(
            MemoryObjectReader(),
            [source.endpoint],
            limits=limits,
            records=records,
            manifest=manifest,
        )
    assert records == []
    assert list(small_disk.iterdir()) == []


def grow(fd: int, offset: int, size: int) -> None:
    """Give a file its size and no room, as some file systems do."""
    os.ftruncate(fd, offset + size)


def test_a_disk_that_breaks_its_word_is_nobodys_fault(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that was promised is not there: told at once, without asking the next source."""
    monkeypatch.setattr(os, "posix_fallocate", grow)
    source = MemoryObjectServer()
    records: list[TransferRecord] = []
    manifest, data = payload(SMALL_DISK_BYTES)
    source.serve_object(manifest.objects[0].object_id, [memoryview(data)])
    limits = FetchLimits(window_bytes=2**20, spool_dir=small_disk)
    with pytest.raises(NoRoomError, match="cannot be kept: No space left"):
        fetch(
            MemoryObjectReader(),
            [source.endpoint, "memory://another"],
            limits=limits,
            records=records,
            manifest=manifest,
        )
    assert {record.source for record in records} == {source.endpoint}
    assert not any(record.problem for record in records)
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("window", [4999, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 1, 10**7])
def test_windows_of_any_size(window: int, tmp_path: Path) -> None:
    """Pieces larger than a window come in stretches; the bytes are the same."""
    source = MemoryObjectServer()
    source.serve_object(OBJECT.object_id, [memoryview(DATA)])
    limits = FetchLimits(window_bytes=window, spool_dir=tmp_path)
    assert fetch(MemoryObjectReader(), [source.endpoint], limits=limits) == DATA
    assert list(tmp_path.iterdir()) == []


def test_large_payloads_wait_in_a_file_without_a_name(tmp_path: Path) -> None:
    """Above a window the bytes are on disk, and nobody else sees them."""
    source = MemoryObjectServer()
    source.serve_object(OBJECT.object_id, [memoryview(DATA)])
    limits = FetchLimits(window_bytes=2 * CHUNK_BYTES, spool_dir=tmp_path)
    assert fetch(MemoryObjectReader(), [source.endpoint], limits=limits) == DATA
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FetchError, match="cannot be used"):
        fetch(
            MemoryObjectReader(),
            [source.endpoint],
            limits=FetchLimits(window_bytes=1, spool_dir=tmp_path / "no"),
        )


def test_what_between_reads_raises_ends_the_fetch() -> None:
    """Whoever stops the receiver is obeyed between two pieces."""
    source, count = MemoryObjectServer(), iter(range(99))
    source.serve_object(OBJECT.object_id, [memoryview(DATA)])

    def stop() -> None:
        if next(count) == 3:
            raise KeyboardInterrupt

    parts = FetchParts(clock=FakeClock(), between_reads=stop, limits=LIMITS)
    with pytest.raises(KeyboardInterrupt):
        Fetcher(MemoryObjectReader(), parts).fetch_objects(
            MANIFEST, [shard(source.endpoint)], bytes_max=2**30
        )


class Tls:
    """Authorities and servers of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = datetime.now(UTC)  # noqa: TID251 - certificates live in real time
        self.authority = new_authority("run", now=self.now)

    def files(self, pair: KeyPair) -> HttpTlsFiles:
        files = HttpTlsFiles(certificate=self.folder / "c.pem", key=self.folder / "k.pem")
        files.certificate.write_bytes(pair.certificate)
        files.key.write_bytes(pair.key)
        return files

    def server(self, pair: KeyPair) -> HttpObjectServer:
        server = HttpObjectServer(
            token=lambda: TOKEN, options=HttpServerOptions(tls=self.files(pair))
        )
        server.serve_object(OBJECT.object_id, [memoryview(DATA)])
        return server


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return Tls(tmp_path)


@pytest.mark.parametrize("streams", [1, 3])
def test_over_tls(tls: Tls, streams: int) -> None:
    """With the run's authority the bytes come encrypted, over one stream or several."""
    server = tls.server(issue(tls.authority, ["127.0.0.1"], now=tls.now))
    assert server.endpoint.startswith("https://")
    reader = http_reader(streams=streams, trusted=tls.authority.certificate)
    assert fetch(reader, [server.endpoint]) == DATA
    reader.close()
    server.close()


CERTIFICATES: dict[str, Callable[[Tls], KeyPair]] = {
    "another authority": lambda tls: issue(
        new_authority("other", now=tls.now), ["127.0.0.1"], now=tls.now
    ),
    "another host": lambda tls: issue(tls.authority, ["10.9.9.9"], now=tls.now),
    "expired": lambda tls: issue(
        tls.authority, ["127.0.0.1"], now=tls.now - timedelta(days=9), days=1
    ),
    "not valid yet": lambda tls: issue(
        tls.authority, ["127.0.0.1"], now=tls.now + timedelta(days=9)
    ),
}


@pytest.mark.parametrize("name", CERTIFICATES)
def test_certificates_that_do_not_prove_it(tls: Tls, name: str) -> None:
    """A server that cannot prove its name gets no token and gives no byte; no try is repeated."""
    server = tls.server(CERTIFICATES[name](tls))
    reader = http_reader(trusted=tls.authority.certificate)
    with pytest.raises(FetchError, match="certificate is not trusted here"):
        fetch(reader, [server.endpoint])
    reader.close()
    server.close()


def test_one_side_without_tls(tls: Tls, server: HttpObjectServer) -> None:
    """Plain text to a TLS server, and TLS to a plain one, fail as errors of the source."""
    secret = tls.server(issue(tls.authority, ["127.0.0.1"], now=tls.now))
    reader = http_reader(trusted=tls.authority.certificate)
    for endpoint in (
        secret.endpoint.replace("https", "http"),
        server.endpoint.replace("http", "https"),
    ):
        with pytest.raises(FetchError):
            fetch(reader, [endpoint])
    reader.close()
    secret.close()


def test_certificates_are_replaced_while_serving(tls: Tls) -> None:
    """New files serve the next connection; half-written ones do not end the service."""
    server = tls.server(issue(tls.authority, ["10.9.9.9"], now=tls.now))
    (tls.folder / "c.pem").write_text("half")
    with ExitStack() as parts:
        parts.callback(server.close)
        reader = http_reader(trusted=tls.authority.certificate)
        parts.callback(reader.close)
        with pytest.raises(FetchError, match="not trusted"):
            fetch(reader, [server.endpoint])
        tls.files(issue(tls.authority, ["127.0.0.1"], now=tls.now))
        assert fetch(reader, [server.endpoint]) == DATA


def test_certificates_that_are_not_there(tls: Tls) -> None:
    """Without its files, or with files that do not fit, a server does not start, and says why."""
    missing = HttpTlsFiles(certificate=tls.folder / "c.pem", key=tls.folder / "k.pem")
    with pytest.raises(PreflightError, match=r"cannot read .*c\.pem"):
        HttpObjectServer(token=lambda: TOKEN, options=HttpServerOptions(tls=missing))
    files = tls.files(issue(tls.authority, ["127.0.0.1"], now=tls.now))
    files.key.write_bytes(issue(tls.authority, ["127.0.0.1"], now=tls.now).key)
    with pytest.raises(PreflightError, match="no certificate with its key"):
        HttpObjectServer(token=lambda: TOKEN, options=HttpServerOptions(tls=files))
