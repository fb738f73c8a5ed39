"""Parts of tensors: runs become boxes, blocks are found, and a version covers its tensors once."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.digest import root_digest, version_root
from paceline.refit.errors import ParseError, VerifyError
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.region import (
    block_of,
    boxes_of,
    check_cover,
    region_problem,
)
from paceline.refit.manifest.render import render_manifest
from paceline.refit.model import Region, TensorBuffer, TensorEntry
from paceline.testing.payloads import full_payload

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Region, tuple[int, ...]]:
    whole = draw(SHAPES)
    offsets = tuple(draw(st.integers(0, length - 1)) for length in whole)
    shape = tuple(draw(st.integers(1, most - at)) for at, most in zip(offsets, whole, strict=True))
    return Region(global_shape=whole, offsets=offsets), shape


@given(runs())
def test_a_run_is_its_boxes_in_order(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = run
    whole = np.arange(math.prod(shape)).reshape(shape)
    region = Region(global_shape=shape, offsets=(start,))

    found = [
        whole[tuple(map(slice, box.start, box.stop))].ravel()
        for box in boxes_of(region, (stop - start,))
    ]

    assert [int(i) for part in found for i in part] == list(range(start, stop))


@given(boxes())
def test_a_block_is_found_exactly_where_a_box_is_one(
    box: tuple[Region, tuple[int, ...]],
) -> None:
    region, shape = box
    whole = np.arange(math.prod(region.global_shape)).reshape(region.global_shape)
    view = whole[tuple(slice(a, a + n) for a, n in zip(region.offsets, shape, strict=True))]

    block = block_of(region, shape)

    first = int(view.flat[0])
    is_dense = view.ravel().tolist() == list(range(first, first + view.size))
    assert block == ((first, view.size) if is_dense else None)


def part(shape: tuple[int, ...], offsets: tuple[int, ...]) -> TensorEntry:
    whole = Region(global_shape=(4, 6), offsets=offsets)
    return TensorEntry(
        name="w",
        dtype="U8",
        shape=shape,
        digest="0" * 32,
        num_bytes=math.prod(shape),
        region=whole,
    )


def test_parts_that_are_the_tensor_pass() -> None:
    check_cover("w", [part((4, 2), (0, 0)), part((2, 4), (0, 2)), part((2, 4), (2, 2))])
    check_cover("w", [part((7,), (0,)), part((17,), (7,)), part((0, 6), (4, 0))])


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([part((4, 2), (0, 0)), part((4, 3), (0, 2))], "20 of 24"),
        ([part((4, 4), (0, 0)), part((4, 3), (0, 3))], "two slots"),
        ([part((13,), (0,)), part((2, 6), (2, 0))], "two slots"),
        ([replace(part((4, 6), (0, 0)), region=None)] * 2, "two slots"),
        (
            [part((2, 6), (0, 0)), replace(part((2, 6), (2, 0)), dtype="I8")],
            "shapes or dtypes",
        ),
    ],
)
def test_parts_that_are_not_the_tensor_are_refused(entries: list[TensorEntry], why: str) -> None:
    with pytest.raises(VerifyError, match=why):
        check_cover("w", entries)


@pytest.mark.parametrize(
    ("region", "shape"),
    [
        (Region(global_shape=(), offsets=()), ()),
        (Region(global_shape=(4, 6), offsets=(0, 0, 0)), (1, 1, 1)),
        (Region(global_shape=(4, 6), offsets=(3, 0)), (2, 6)),
        (Region(global_shape=(4, 6), offsets=(20,)), (5,)),
        (Region(global_shape=(4, 6), offsets=(0,)), (2, 6)),
    ],
)
def test_a_region_that_cannot_be_is_named(region: Region, shape: tuple[int, ...]) -> None:
    assert region_problem(region, shape)


def test_a_part_survives_the_manifest_and_changes_the_root() -> None:
    data = memoryview(bytes(range(12)))
    manifest, _ = full_payload([TensorBuffer(name="w", dtype="U8", shape=(12,), data=data)])
    whole = manifest.tensors[0]
    entry = replace(whole, region=Region(global_shape=(4, 6), offsets=(7,)))
    moved = replace(entry, region=Region(global_shape=(4, 6), offsets=(8,)))
    assert len({root_digest([each]) for each in (whole, entry, moved)}) == 3

    said = replace(manifest, tensors=(entry,), root_digest=root_digest([entry]))
    text = render_manifest(said)

    assert parse_manifest(text) == said
    for other in (b'"offsets":[13]', b'"offset":[7]'):
        with pytest.raises(ParseError, match=r"tensors\[0\].region"):
            parse_manifest(text.replace(b'"offsets":[7]', other))


def test_a_root_of_one_slot_is_its_own_and_of_several_depends_on_each() -> None:
    assert version_root({"a": "1"}) == "1"
    roots = [{"a": "1", "b": "2"}, {"a": "2", "b": "1"}, {"a": "1", "c": "2"}]
    assert len({version_root(each) for each in roots}) == 3
    assert version_root(dict(reversed(list(roots[0].items())))) == version_root(roots[0])
    with pytest.raises(ValueError, match="at least one slot"):
        version_root({})
