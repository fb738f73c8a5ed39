"""Who publishes what is the same for everybody, covers everything once, and is fair."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.manifest.region import check_cover
from paceline.refit.model import TensorEntry
from paceline.refit.trainers.topology import (
    Cut,
    MeshAxes,
    TensorSpec,
    plan_ownership,
    region_of,
)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[MeshAxes, dict[str, TensorSpec]]:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axes = MeshAxes(names=tuple("abc"[: len(sizes)]), sizes=sizes)
    specs = {}
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        cut_axes = draw(st.lists(st.integers(0, len(sizes) - 1), unique=True)) if shape else []
        cuts = tuple(Cut(axis=a, dim=draw(st.integers(0, len(shape) - 1))) for a in cut_axes)
        specs[f"w{index}"] = TensorSpec(shape=shape, num_bytes=math.prod(shape), cuts=cuts)
    return axes, specs


@given(meshes())
def test_every_element_has_one_owner(mesh: tuple[MeshAxes, dict[str, TensorSpec]]) -> None:
    """Also of tensors that no axis divides, of scalars, and of tensors without elements."""
    axes, specs = mesh
    ownership = plan_ownership(axes, specs)
    filled = set()
    for name, spec in specs.items():
        parts = []
        for at in axes.coordinates():
            box = ownership.part(name, at)
            if box is not None:
                filled.add(axes.slot(at))
                entry = TensorEntry(
                    name=name,
                    dtype="U8",
                    shape=box.shape,
                    digest="",
                    num_bytes=box.size,
                    region=region_of(box, spec.shape),
                )
                parts.append(entry)
        check_cover(name, parts)
    assert ownership.slots() == tuple(sorted(filled))


def test_copies_are_shared_out_by_bytes() -> None:
    """Eight equal tensors on four processes are two each; a large one counts for many small."""
    axes = MeshAxes(names=("rank",), sizes=(4,))
    equal = {f"w{i}": TensorSpec(shape=(10,), num_bytes=10) for i in range(8)}
    owners = plan_ownership(axes, equal).owners
    assert sorted(owner[0] for owner in owners.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    mixed = {"big": TensorSpec(shape=(60,), num_bytes=60), **equal}
    owners = plan_ownership(axes, mixed).owners
    assert [owner[0] for owner in owners.values()].count(owners["big"][0]) == 1


def test_copies_of_cut_tensors_are_shared_out_too() -> None:
    """Of two copies of each quarter, every process publishes one: none has nothing to do."""
    axes = MeshAxes(names=("copy", "fsdp"), sizes=(2, 4))
    cut = (Cut(axis=1, dim=0),)
    specs = {f"w{i}": TensorSpec(shape=(8, 2), num_bytes=16, cuts=cut) for i in range(4)}
    ownership = plan_ownership(axes, specs)
    work = {
        at: sum(ownership.part(name, at) is not None for name in specs) for at in axes.coordinates()
    }
    assert set(work.values()) == {2}


def test_a_cut_of_a_cut_is_taken_of_what_the_first_has_left() -> None:
    """FSDP2 above tensor parallelism: rows by the inner axis first, then each by the outer."""
    spec = TensorSpec(shape=(8,), num_bytes=8, cuts=(Cut(axis=1, dim=0), Cut(axis=0, dim=0)))
    starts = [spec.box_at((dp, tp), (2, 2)).start for dp in range(2) for tp in range(2)]
    assert starts == [(0,), (4,), (2,), (6,)]


@pytest.mark.parametrize(
    ("at", "slot"),
    [
        ((0, 3), "publisher:dp0-of-2:tp3-of-4"),
        ((1, 0), "publisher:dp1-of-2:tp0-of-4"),
    ],
)
def test_a_slot_is_called_by_its_place(at: tuple[int, int], slot: str) -> None:
    assert MeshAxes(names=("dp", "tp"), sizes=(2, 4)).slot(at) == slot
