"""Any mesh reads any other, bit for bit, and nobody holds more than what it wants."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.errors import VerifyError
from paceline.refit.manifest.region import Box, boxes_of
from paceline.refit.model import Region, TensorEntry
from paceline.refit.plan.resharding import (
    Source,
    Want,
    chunks_needed,
    plan_copies,
    want_fused,
    want_part,
    want_stacked,
)
from paceline.refit.trainers.topology import Cut, TensorSpec

Part = tuple[Source, bytes]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Region, tuple[int, ...]]]:
    """Return how some mesh holds a tensor, each element once: boxes, or runs of a flat one."""
    if draw(st.booleans()):
        total = math.prod(shape)
        ends = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
        cuts = pairwise([0, *ends, total])
        return [(Region(global_shape=shape, offsets=(a,)), (b - a,)) for a, b in cuts]
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axes = draw(st.permutations(range(len(sizes))))
    cuts_made = tuple(Cut(axis=axis, dim=draw(st.integers(0, len(shape) - 1))) for axis in axes)
    spec = TensorSpec(shape=shape, num_bytes=0, cuts=cuts_made)
    boxes = [spec.box_at(tuple(at), sizes) for at in np.ndindex(*sizes)]
    return [(Region(global_shape=shape, offsets=box.start), box.shape) for box in boxes if box.size]


def held_by(whole: np.ndarray, region: Region, shape: tuple[int, ...]) -> bytes:
    """Return the bytes of a part, in its own order."""
    return b"".join(
        whole[tuple(map(slice, box.start, box.stop))].tobytes() for box in boxes_of(region, shape)
    )


def served(name: str, whole: np.ndarray, region: Region, shape: tuple[int, ...]) -> Part:
    """Return a source of one part, and its bytes."""
    data = held_by(whole, region, shape)
    entry = TensorEntry(
        name=name, dtype="U16", shape=shape, digest="", num_bytes=len(data), region=region
    )
    return Source(slot="s", entry=entry, object_id=f"{name}{region.offsets}", offset=64), data


def read(want: Want, parts: Sequence[Part]) -> bytes:
    """Fill a want as a reader does, with memory for that want alone."""
    target = bytearray(math.prod(want.shape) * 2)
    for copy in plan_copies(want, [source for source, _ in parts]):
        data = parts[copy.source][1][copy.source_offset : copy.source_offset + copy.size]
        assert len(data) == copy.size
        target[copy.target_offset : copy.target_offset + copy.size] = data
    return bytes(target)


@given(st.data())
def test_any_mesh_to_any_mesh(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    parts = [served("w", whole, *held) for held in data.draw(layouts(shape))]
    rebuilt = np.full(shape, 0xFFFF, dtype=np.uint16)

    for region, local in data.draw(layouts(shape)):
        if len(region.offsets) != len(shape):
            continue  # readers want boxes
        got = read(want_part("w", local, region), parts)
        assert got == held_by(whole, region, local)
        (box,) = boxes_of(region, local)
        view = rebuilt[tuple(map(slice, box.start, box.stop))]
        view[...] = np.frombuffer(got, dtype=np.uint16).reshape(local)
        assert np.array_equal(view, whole[tuple(map(slice, box.start, box.stop))])

    assert read(want_part("w", shape), parts) == whole.tobytes()


@given(st.data(), st.sampled_from([1, 2, 4]))
def test_fused_projections_by_declared_mapping(data: st.DataObject, ranks: int) -> None:
    """[q of mine, k of mine, v of mine], from sources that hold q, k and v however they do."""
    heads, columns = {"q": 8, "k": 4, "v": 4}, data.draw(st.integers(1, 5))
    whole = {
        name: np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns) + 1000 * index
        for index, (name, rows) in enumerate(heads.items())
    }
    parts = [
        served(name, each, *held)
        for name, each in whole.items()
        for held in data.draw(layouts(each.shape))
    ]
    for rank in range(ranks):
        own = {
            name: (rows // ranks * rank, rows // ranks * (rank + 1)) for name, rows in heads.items()
        }
        want = want_fused([(name, Box((a, 0), (b, columns))) for name, (a, b) in own.items()])
        expected = np.concatenate([whole[name][a:b] for name, (a, b) in own.items()])
        assert want.shape == expected.shape
        assert read(want, parts) == expected.tobytes()


@given(st.data())
def test_experts_are_stacked_and_fused(data: st.DataObject) -> None:
    """Gate and up of each expert of this rank, one expert behind another."""
    shape = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    names = [(f"e{index}.gate", f"e{index}.up") for index in range(4)]
    whole = {
        name: np.full(shape, 10 * index + at, dtype=np.uint16)
        for index, pair in enumerate(names)
        for at, name in enumerate(pair)
    }
    parts = [
        served(name, each, *held)
        for name, each in whole.items()
        for held in data.draw(layouts(shape))
    ]
    box = Box((0, 0), shape)
    mine = names[1:3]
    want = want_stacked([want_fused([(gate, box), (up, box)]) for gate, up in mine])
    expected = np.stack([np.concatenate([whole[gate], whole[up]]) for gate, up in mine])
    assert read(want, parts) == expected.tobytes()


def test_what_nobody_has_and_what_two_have_is_refused() -> None:
    whole = np.arange(12, dtype=np.uint16).reshape(4, 3)
    upper, lower = ((Region(global_shape=(4, 3), offsets=(at, 0)), (2, 3)) for at in (0, 2))
    parts = [served("w", whole, *held) for held in (upper, lower)]
    want = want_part("w", (4, 3))
    with pytest.raises(VerifyError, match="nobody has byte 12"):
        read(want, parts[:1])
    with pytest.raises(VerifyError, match="nobody has byte 0"):
        read(want, parts[1:])
    with pytest.raises(VerifyError, match="two sources have byte 0"):
        read(want, [*parts, parts[0]])
    with pytest.raises(VerifyError, match="2 dimensions"):
        read(want_part("w", (12,)), parts)


def test_only_chunks_with_wanted_bytes_are_read() -> None:
    """A reader of one row in four reads a quarter, and what shares its chunks."""
    whole = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    source, _ = served("w", whole, Region(global_shape=(64, 64), offsets=(0, 0)), (64, 64))
    region = Region(global_shape=(64, 64), offsets=(16, 0))
    copies = plan_copies(want_part("w", (16, 64), region), [source])
    assert [(copy.source_offset, copy.size) for copy in copies] == [(2048, 2048)]
    assert chunks_needed(copies, [source], {source.object_id: 1024}) == {
        source.object_id: frozenset({2, 3, 4})
    }
