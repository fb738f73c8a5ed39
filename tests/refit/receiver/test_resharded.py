"""A reader of another layout reads the chunks that it needs, and no others, and proves them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.refit.digest import root_digest
from paceline.refit.errors import FetchError, VerifyError
from paceline.refit.manifest.region import Box
from paceline.refit.model import Region, Shard, TensorBuffer
from paceline.refit.plan.resharding import Want, want_fused, want_part
from paceline.refit.receiver.fetch import Fetcher, FetchLimits, FetchParts
from paceline.refit.receiver.resharded import SlotSource, read_wants
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.system import system_clock
from paceline.testing.payloads import full_payload

CHUNK_BYTES = 4096
ROWS, COLUMNS = 64, 128
WHOLE = {
    name: np.random.default_rng(seed).integers(0, 2**16, (ROWS, COLUMNS), dtype=np.uint16)
    for seed, name in enumerate(("q", "k", "v"))
}
TRAINERS = 4


@pytest.fixture
def slots() -> Iterator[list[SlotSource]]:
    """Four trainers, each with a quarter of the rows of every tensor."""
    servers, found = [], []
    for rank in range(TRAINERS):
        rows = slice(rank * ROWS // TRAINERS, (rank + 1) * ROWS // TRAINERS)
        parts = [
            TensorBuffer(
                name=name,
                dtype="U16",
                shape=(ROWS // TRAINERS, COLUMNS),
                data=memoryview(each[rows].tobytes()),
            )
            for name, each in WHOLE.items()
        ]
        manifest, data = full_payload(parts, chunk_bytes=CHUNK_BYTES)
        entries = tuple(
            replace(
                entry, region=Region(global_shape=(ROWS, COLUMNS), offsets=(int(rows.start), 0))
            )
            for entry in manifest.tensors
        )
        manifest = replace(
            manifest,
            source_slot_id=f"s{rank}",
            tensors=entries,
            root_digest=root_digest(entries),
        )
        server = MemoryObjectServer()
        servers.append(server)
        server.serve_object(manifest.objects[0].object_id, [memoryview(data)])
        parts_of = FetchParts(
            clock=system_clock(), limits=FetchLimits(window_bytes=2 * CHUNK_BYTES)
        )
        shard = Shard(
            version_id="v",
            source_slot_id=f"s{rank}",
            worker_id=f"t{rank}",
            tensor_count=3,
            total_bytes=len(data),
            manifest_digest="",
            manifest_endpoint=f"{server.endpoint}/v1/manifests/v/s{rank}",
        )
        fetcher = Fetcher(MemoryObjectReader(), parts_of)
        found.append(SlotSource(manifest=manifest, shards=[shard], fetcher=fetcher))
    yield found
    for server in servers:
        server.close()


def columns_of(name: str, start: int, stop: int) -> Want:
    region = Region(global_shape=(ROWS, COLUMNS), offsets=(0, start))
    return want_part(name, (ROWS, stop - start), region)


def test_a_worker_of_tensor_parallelism_gets_its_own(slots: Sequence[SlotSource]) -> None:
    """Fused rows of three tensors, and columns of one: bit for bit, from four trainers."""
    rows = dict.fromkeys(WHOLE, (16, 48))
    fused = want_fused([(name, Box((a, 0), (b, COLUMNS))) for name, (a, b) in rows.items()])
    wants = {"qkv": fused, "o": columns_of("v", 32, 96)}

    found = read_wants(wants, slots, bytes_max=2**20)

    expected = np.concatenate([WHOLE[name][16:48] for name in WHOLE])
    assert bytes(found.data["qkv"]) == expected.tobytes()
    assert bytes(found.data["o"]) == np.ascontiguousarray(WHOLE["v"][:, 32:96]).tobytes()


def test_only_what_is_needed_is_read(slots: Sequence[SlotSource]) -> None:
    """An eighth of one tensor costs its chunks, not the model."""
    region = Region(global_shape=(ROWS, COLUMNS), offsets=(16, 0))
    found = read_wants({"w": want_part("k", (8, COLUMNS), region)}, slots, bytes_max=2**20)
    assert bytes(found.data["w"]) == WHOLE["k"][16:24].tobytes()
    size = 8 * COLUMNS * 2
    assert size <= found.fetched_bytes <= size + 2 * CHUNK_BYTES


def test_other_bytes_and_too_much_are_refused(slots: list[SlotSource]) -> None:
    wants = {"w": columns_of("q", 0, COLUMNS)}
    with pytest.raises(VerifyError, match="at most 100"):
        read_wants(wants, slots, bytes_max=100)
    with pytest.raises(VerifyError, match="nobody has byte"):
        read_wants(wants, slots[1:], bytes_max=2**20)
    item = slots[0].manifest.objects[0]
    lied = replace(item, chunk_sha256=("0" * 64,) * len(item.chunk_sha256))
    slots[0] = replace(slots[0], manifest=replace(slots[0].manifest, objects=(lied,)))
    with pytest.raises((VerifyError, FetchError), match="chunk"):
        read_wants(wants, slots, bytes_max=2**20)
