"""NIXL for real, over UCX's shared memory and TCP on this computer: no stand-in."""

import base64
import hashlib
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.retry import RetryPolicy
from paceline.refit.errors import FetchError, PublishError
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import ObjectRange, Shard, TensorBuffer, WeightVersionShardManifest
from paceline.refit.receiver.fetch import Fetcher, FetchLimits, FetchParts, spool_of
from paceline.refit.trainers.protocol import NixlMetadataProvider
from paceline.refit.transports.http.reader import HttpObjectReader, HttpReaderOptions
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.refit.transports.nixl.agent import NixlAgent, Region, region_of
from paceline.refit.transports.nixl.reader import (
    BATCH_BYTES,
    NixlObjectReader,
    _batches_of,
    _descriptors,
    _Move,
)
from paceline.refit.transports.nixl.server import NixlObjectServer
from paceline.refit.transports.nixl.table import Stretch, Table, parse_table, render_table
from paceline.refit.transports.protocol import Part, Terms, TransferRecord, read_object, read_parts
from paceline.system import environ, system_clock
from paceline.testing.contracts.transport import Link, TransportContract
from paceline.testing.payloads import full_payload

TOKEN = "of-this-test"  # noqa: S105 - not a secret
_names = itertools.count()


def agent(role: str) -> NixlAgent:
    return NixlAgent(f"test-{os.getpid()}-{role}-{next(_names)}")


def server() -> NixlObjectServer:
    return NixlObjectServer(agent("source"), HttpObjectServer(token=lambda: TOKEN))


def reader() -> NixlObjectReader:
    door = HttpObjectReader(
        token=lambda: TOKEN,
        clock=system_clock(),
        chance=lambda: 0.5,
        options=HttpReaderOptions(retry=RetryPolicy(attempts=2, first_delay_s=0.01)),
    )
    return NixlObjectReader(agent("reader"), door, clock=system_clock())


class TestNixl(TransportContract):
    """Two agents in one process."""

    def make(self) -> Link:
        return Link(server=server(), reader=reader())


SIZE = 40 * 2**20


class Process:
    """One end in a process of its own."""

    def __init__(self, *words: str, tls: str | None = None) -> None:
        env = {key: value for key, value in environ().items() if key != "UCX_TLS"}
        if tls:
            env["UCX_TLS"] = tls
        self.popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nixl_process.py")), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def say(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def tell(self, line: str = "") -> dict[str, object]:
        self.say(line)
        return self.listen()

    def listen(self) -> dict[str, object]:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:  # NIXL prints too
            if line.startswith("{"):
                found: dict[str, object] = json.loads(line)
                return found
        raise AssertionError("the process ended")

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


def two_ends(tls: str | None) -> tuple[Process, Process]:
    """A source and a reader of it, which start side by side: most of their time goes into that."""
    source, sink = Process("serve", str(SIZE), tls=tls), Process("read", str(SIZE), "60", tls=tls)
    sink.say(str(source.listen()["endpoint"]))
    return source, sink


@pytest.fixture(params=["", "tcp"], ids=["shared memory", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Process, Process]]:
    source, sink = two_ends(request.param or None)
    yield source, sink
    source.end()
    sink.end()


def expected() -> str:
    data = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)
    return hashlib.sha256(data.tobytes()).hexdigest()


def test_between_processes(ends: tuple[Process, Process]) -> None:
    """Bytes arrive, again after other memory came and went; gone is gone; death is an error."""
    source, sink = ends
    first = sink.tell()
    assert first.get("sha256") == expected(), first
    source.tell("other")
    again = sink.tell()
    assert again.get("sha256") == expected(), again
    source.tell("withdraw")
    assert "not served there any more" in str(sink.tell()["error"])
    source.end()
    answer = sink.tell()
    assert answer["error"]
    assert str(answer["source"]).startswith("nixl+http://127.0.0.1:")


def test_source_dies_under_a_plan() -> None:
    """A planned read of a process that was killed fails soon, and names it."""
    source = Process("serve", str(SIZE))
    endpoint = str(source.listen()["endpoint"])
    sink = reader()
    wanted = ObjectRange(object_id="ab", offset=0, size=SIZE)
    part = Part(wanted=wanted, target=memoryview(bytearray(SIZE)))
    plan = sink.plan_read(endpoint, [part], timeout_s=60)
    plan.run(Terms(timeout_s=60))
    assert hashlib.sha256(part.target).hexdigest() == expected()
    source.end()
    with pytest.raises(FetchError) as caught:
        plan.run(Terms(timeout_s=60))
    assert caught.value.source == endpoint
    assert caught.value.wanted == wanted
    plan.close()
    sink.close()


def test_a_source_that_stands_still_is_left() -> None:
    """Over TCP a stopped process answers nothing: the deadline ends the wait, not the peer."""
    source, sink = two_ends("tcp")
    assert sink.tell()["sha256"] == expected()
    sink.tell("plan")
    source.popen.send_signal(signal.SIGSTOP)
    answer = sink.tell("run 1.5")
    source.popen.send_signal(signal.SIGCONT)
    assert "not done after 1.5 s" in str(answer["error"])
    assert 1.5 <= float(str(answer["seconds"])) < 30
    source.end()
    sink.end()


def test_parts_of_a_batch_and_above() -> None:
    """Parts larger than a batch, and many small ones, are told of once, when they are whole."""
    source, sink = server(), reader()
    data = np.random.default_rng(1).integers(0, 256, 2 * BATCH_BYTES + 1000, dtype=np.uint8)
    source.serve_object("ab", [data.data])
    cuts = [0, 7, 7, 4096, 4096 + BATCH_BYTES + 5, *range(4096 + BATCH_BYTES + 5, len(data), 99991)]
    edges = sorted({*cuts, len(data)})
    target = bytearray(len(data))
    parts = [
        Part(
            wanted=ObjectRange(object_id="ab", offset=start, size=stop - start),
            target=memoryview(target)[start:stop],
        )
        for start, stop in itertools.pairwise(edges)
    ]
    told: list[int] = []
    record = read_parts(sink, source.endpoint, parts, Terms(timeout_s=60, on_part=told.append))
    assert bytes(target) == data.tobytes()
    assert sorted(told) == list(range(len(parts)))
    assert set(record.stages) == {"plan", "move"}
    source.close()
    sink.close()


def test_an_agent_at_rest_takes_no_core() -> None:
    """NIXL's thread waits for what comes; as its own front sets it up it would never sleep."""
    source = Process("serve", "4096")
    source.listen()
    used: list[int] = []
    for _ in range(2):
        fields = Path(f"/proc/{source.popen.pid}/stat").read_text().rsplit(")", 1)[1].split()
        used.append(int(fields[11]) + int(fields[12]))
        if len(used) == 1:
            system_clock().sleep(0.5)
    source.end()
    assert used[1] - used[0] < 0.1 * os.sysconf("SC_CLK_TCK")


class CountingDoor(HttpObjectReader):
    """Counts what is asked for."""

    asked = 0

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        self.asked += 1
        return super().read_manifest(address, size_max=size_max, timeout_s=timeout_s)


def counting_reader() -> tuple[NixlObjectReader, NixlAgent, CountingDoor]:
    door = CountingDoor(token=lambda: TOKEN, clock=system_clock(), chance=lambda: 0.5)
    found = agent("reader")
    return NixlObjectReader(found, door, clock=system_clock()), found, door


def test_a_session_asks_once_and_its_window_stays_registered() -> None:
    """Plans of a session know where objects are; the next session has the same window again."""
    data = np.random.default_rng(1).integers(0, 256, 10_000, dtype=np.uint8).tobytes()
    source = server()
    source.serve_object("ab", [memoryview(data)])
    sink, found, door = counting_reader()
    known: set[int] = set()
    for session in range(3):
        with sink.session(window_bytes=4000 - session) as opened:
            known.add(region_of(opened.window).address)
            for offset in range(0, 10_000, 2000):
                part = Part(
                    wanted=ObjectRange(object_id="ab", offset=offset, size=2000),
                    target=opened.window[:2000],
                )
                read_parts(opened.reader, source.endpoint, [part], Terms(timeout_s=60))
                assert bytes(part.target) == data[offset : offset + 2000]
            assert door.asked == session + 1
    assert len(known) == 1
    with sink.session(window_bytes=2000) as one, sink.session(window_bytes=2000) as other:
        assert region_of(one.window).address != region_of(other.window).address
    bare = len(agent("bare").nixl_metadata)
    assert len(found.nixl_metadata) > bare
    sink.close()
    assert found._registered == {}
    source.close()


def test_a_session_asks_anew_when_a_read_has_failed() -> None:
    """What a source said is believed until it does not hold."""
    source = server()
    source.serve_object("ab", [memoryview(bytes(range(200)))])
    sink, _, door = counting_reader()
    with sink.session(window_bytes=200) as opened:
        wanted = ObjectRange(object_id="ab", offset=0, size=200)
        part = Part(wanted=wanted, target=opened.window)
        read_parts(opened.reader, source.endpoint, [part], Terms(timeout_s=60))
        with pytest.raises(FetchError, match="not done"):
            read_parts(opened.reader, source.endpoint, [part], Terms(timeout_s=-1))
        read_parts(opened.reader, source.endpoint, [part], Terms(timeout_s=60))
        assert bytes(opened.window) == bytes(range(200))
        assert door.asked == 2
    sink.close()
    source.close()


def weights() -> tuple[Manifest, bytes]:
    """Three tensors, of which one is larger than the windows below."""
    values = np.random.default_rng(5).integers(0, 256, 90_000, dtype=np.uint8)
    cuts = np.split(values, [20_000, 80_000])
    return full_payload(
        TensorBuffer(name=f"w{at}", dtype="U8", shape=(len(cut),), data=cut.data)
        for at, cut in enumerate(cuts)
    )


@pytest.mark.parametrize("num_kept", [0, 1])
@pytest.mark.parametrize("trouble", ["none", "lies", "lies in a large one", "gone", "goes"])
def test_a_receivers_fetch(trouble: str, num_kept: int) -> None:
    """Window after window over NIXL: a source that lies or leaves is made up for by the next.

    So it is where bytes go into the file that the version before was in.
    """
    manifest, data = weights()
    first, second = server(), server()
    wrong = bytearray(data)
    if trouble.startswith("lies"):
        wrong[100 if trouble == "lies" else 50_000] ^= 1
    object_id = manifest.objects[0].object_id
    first.serve_object(object_id, [memoryview(wrong)])
    second.serve_object(object_id, [memoryview(data)])
    if trouble == "gone":
        first.close()
    reads = itertools.count()

    def between_reads() -> None:
        assert len(sink._agent._registered) <= 1  # the window; never a file
        if trouble == "goes" and next(reads) == 3:
            first.close()

    records: list[TransferRecord] = []
    sink = reader()
    limits = FetchLimits(window_bytes=30_000, hedge_after_s=20)  # busy machines are slow
    spool = spool_of(limits, system_clock())
    spool.open(num_kept * len(data)).write(0, memoryview(bytes(num_kept * len(data))))
    parts = FetchParts(
        clock=system_clock(),
        limits=limits,
        on_record=records.append,
        between_reads=between_reads,
        spool=spool,
    )
    sources = [shard_of(each.endpoint) for each in (first, second)]
    found = Fetcher(sink, parts).fetch_objects(manifest, sources, bytes_max=2**20)
    assert bytes(found[object_id]) == data
    told = [record.problem for record in records if record.problem]
    if trouble.startswith("lies"):
        assert f"{first.endpoint} is to be avoided" in told[0]
    if trouble == "none":
        assert told == []
    for each in (sink, first, second):
        each.close()


def shard_of(endpoint: str) -> Shard:
    return Shard(
        version_id="v",
        source_slot_id="s",
        worker_id=endpoint,
        tensor_count=3,
        total_bytes=1,
        manifest_digest="",
        manifest_endpoint=f"{endpoint}/v1/manifests/v/s",
    )


def test_batches_take_as_few_descriptors_as_memory_is_apart() -> None:
    """Neighbours on both sides are one stretch; where either side jumps there are two."""

    def move(local: int, remote: int, size: int) -> _Move:
        return _Move(part=0, local=Region(local, size), remote=Region(remote, size))

    local, remote = _descriptors([move(0, 100, 10), move(10, 110, 5), move(15, 200, 5)])
    assert local == [Region(0, 15), Region(15, 5)]
    assert remote == [Region(100, 15), Region(200, 5)]
    local, remote = _descriptors([move(0, 100, 10), move(20, 110, 5)])
    assert (len(local), len(remote)) == (2, 2)


@pytest.mark.parametrize(
    ("part", "count", "batches"),
    [
        (BATCH_BYTES * 3 // 4, 3, [BATCH_BYTES * 3 // 4] * 3),
        (BATCH_BYTES * 3 // 2, 2, [BATCH_BYTES, BATCH_BYTES // 2] * 2),
        (BATCH_BYTES // 16, 8, [BATCH_BYTES // 4] * 2),
        (9 * BATCH_BYTES // 4, 1, [BATCH_BYTES, BATCH_BYTES, BATCH_BYTES // 4]),
        (1000, 3, [3000]),
    ],
)
def test_batches_end_with_parts(part: int, count: int, batches: list[int]) -> None:
    """A part is told of with its last byte, unless it is so small that others go with it."""
    whole = mmap.mmap(-1, part * count)
    parts = [
        Part(
            wanted=ObjectRange(object_id="ab", offset=at * part, size=part),
            target=memoryview(whole)[at * part : (at + 1) * part],
        )
        for at in range(count)
    ]
    stretch = Stretch(address=4096, size=part * count, memory="DRAM", device=0)
    table = Table(agent_name="a", agent_metadata=b"", stretches=(stretch,))
    found = list(_batches_of(parts, {"ab": table}))
    assert [sum(move.local.size for move in moves) for _, moves in found] == batches
    assert {name for name, _ in found} == {"a"}


def test_agent_provides_what_the_trainer_contract_asks() -> None:
    """Registered tensors are in the metadata, and what lies inside them is not registered again."""
    arena = torch.arange(1000, dtype=torch.float32)
    found = agent("trainer")
    provider: NixlMetadataProvider = found
    before = provider.nixl_metadata
    after = provider.register_tensors({"arena": arena})
    assert provider.listen_port is None
    assert provider.agent_name in after.decode("latin-1")
    assert len(after) > len(before)
    source = NixlObjectServer(found, HttpObjectServer(token=lambda: TOKEN))
    source.serve_object("ab", [arena.numpy().data.cast("B")[100:300]])
    assert provider.nixl_metadata == after
    source.withdraw_object("ab")
    assert provider.nixl_metadata == after
    with pytest.raises(ValueError, match="dense"):
        provider.register_tensors({"w": arena.reshape(10, 100).t()})
    source.close()


def test_memory_is_let_go_when_nobody_needs_it() -> None:
    """Two objects over the same buffer keep it registered until the second one is withdrawn."""
    found = agent("source")
    bare = found.nixl_metadata
    source = NixlObjectServer(found, HttpObjectServer(token=lambda: TOKEN))
    buffer = memoryview(bytearray(5000))
    source.serve_object("ab", [buffer])
    source.serve_object("cd", [buffer])
    source.withdraw_object("ab")
    target = bytearray(5000)
    sink = reader()
    wanted = ObjectRange(object_id="cd", offset=0, size=5000)
    read_object(sink, source.endpoint, wanted, memoryview(target), timeout_s=60)
    source.withdraw_object("cd")
    assert len(found.nixl_metadata) == len(bare)
    sink.close()
    source.close()


def test_unregistered_memory_cannot_be_read() -> None:
    """A table that lies about addresses is refused by NIXL, not followed."""
    source, sink = server(), reader()
    buffer = memoryview(bytearray(4096))
    source.serve_object("ab", [buffer])
    with pytest.raises(PublishError, match="not registered"):
        source._agent.metadata_of([Region(region_of(buffer).address, 10**9)])
    lie = Table(
        agent_name=source._agent.agent_name,
        agent_metadata=source._agent.nixl_metadata,
        stretches=(Stretch(address=4096, size=4096, memory="DRAM", device=0),),
    )
    source._door.publish_manifest(
        version_id="nixl-table",
        source_slot_id="lie",
        manifest=WeightVersionShardManifest(
            data=render_table(lie), tensor_count=1, total_bytes=1, transport="NIXL"
        ),
    )
    wanted = ObjectRange(object_id="lie", offset=0, size=4096)
    with pytest.raises(FetchError):
        read_object(sink, source.endpoint, wanted, memoryview(bytearray(4096)), timeout_s=60)
    source.close()
    sink.close()


GOOD = json.loads(
    render_table(
        Table(
            agent_name="a",
            agent_metadata=b"m",
            stretches=(Stretch(address=1, size=2, memory="VRAM", device=3),),
        )
    )
)
BAD = {
    "no JSON": b"{",
    "a list": b"[]",
    "no UTF-8": b"\xff",
    "another schema": json.dumps({**GOOD, "schema": "x"}).encode(),
    "no agent": json.dumps({**GOOD, "agent_name": ""}).encode(),
    "no base64": json.dumps({**GOOD, "agent_meta_b64": "!"}).encode(),
    "negative": json.dumps({**GOOD, "stretches": [[-1, 2, "DRAM", 0]]}).encode(),
    "empty": json.dumps({**GOOD, "stretches": [[1, 0, "DRAM", 0]]}).encode(),
    "past the end": json.dumps({**GOOD, "stretches": [[2**64 - 1, 2, "DRAM", 0]]}).encode(),
    "unknown memory": json.dumps({**GOOD, "stretches": [[1, 2, "FILE", 0]]}).encode(),
    "bool": json.dumps({**GOOD, "stretches": [[1, True, "DRAM", 0]]}).encode(),
    "short": json.dumps({**GOOD, "stretches": [[1]]}).encode(),
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_tables_are_checked(name: str) -> None:
    """What is no table is a fetch error."""
    with pytest.raises(FetchError):
        parse_table(BAD[name])


def test_tables_round_trip() -> None:
    """Memory of a device keeps its kind and number: the same path, on hardware we do not have."""
    found = parse_table(json.dumps(GOOD).encode())
    assert found.stretches == (Stretch(address=1, size=2, memory="VRAM", device=3),)
    assert found.agent_metadata == base64.b64decode(GOOD["agent_meta_b64"])
    assert list(found.cut(1, 1)) == [Stretch(address=2, size=1, memory="VRAM", device=3)]


def test_garbage_for_metadata() -> None:
    """A source whose metadata NIXL cannot read is a source that failed."""
    sink = agent("reader")
    with pytest.raises(FetchError):
        sink.meet(b"garbage", "somebody")
