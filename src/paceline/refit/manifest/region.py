"""Parts of tensors in one global coordinate system: where they lie, and whether they fit. Pure.

A part is a box, with as many offsets as the tensor has dimensions, or a run of elements in
row-major order, with one offset. Boxes are what meshes of devices make; runs are what a flat
parameter is cut into. Both are dense in their own memory, whatever they are in the whole tensor.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.refit.errors import VerifyError
from paceline.refit.model import Region, TensorEntry


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open range in each dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """How long it is in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def meet(self, other: "Box") -> "Box | None":
        """Return what both have in common; None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        is_there = all(a < b for a, b in zip(start, stop, strict=True))
        return Box(start, stop) if is_there else None


def is_run(region: Region) -> bool:
    """Say whether a part is a run of elements and not a box."""
    return len(region.offsets) == 1 != len(region.global_shape)


def region_problem(region: Region, shape: Sequence[int]) -> str:
    """Return why a part of this shape cannot be there; empty if it can."""
    whole = region.global_shape
    if not whole:
        return "a single element has no parts"
    if is_run(region):
        whole = (math.prod(whole),)
    if not len(whole) == len(region.offsets) == len(shape):
        return f"{len(region.offsets)} offsets and {len(shape)} lengths for {len(whole)} dimensions"
    if any(a + n > most for a, n, most in zip(region.offsets, shape, whole, strict=True)):
        return f"{list(shape)} at {list(region.offsets)} reaches past {list(whole)}"
    return ""


def boxes_of(region: Region, shape: Sequence[int]) -> Sequence[Box]:
    """Return the boxes that a part consists of, in row-major order: one, or what a run covers."""
    if is_run(region):
        start = region.offsets[0]
        return list(_boxes_of_run(region.global_shape, start, start + shape[0]))
    stop = tuple(a + n for a, n in zip(region.offsets, shape, strict=True))
    return [Box(region.offsets, stop)]


def whole_of(entry: TensorEntry) -> tuple[int, ...]:
    """Return the shape of the whole tensor that an entry is of."""
    return entry.shape if entry.region is None else entry.region.global_shape


def block_of(region: Region, shape: Sequence[int]) -> tuple[int, int] | None:
    """Return first element and count if the part is one stretch of the whole tensor's memory."""
    if is_run(region):
        return region.offsets[0], shape[0]
    whole, inside = region.global_shape, False
    for length, most in zip(shape, whole, strict=True):
        # Before the first dimension that is longer than one, everything is fixed; behind it,
        # everything must be complete.
        if inside and length != most:
            return None
        inside = inside or length != 1
    return position(region.offsets, whole), math.prod(shape)


def check_cover(name: str, entries: Sequence[TensorEntry]) -> None:
    """Refuse parts that are not exactly their tensor: a hole, or an element that is there twice.

    Raises:
        VerifyError: saying what is wrong.
    """
    first = entries[0]
    whole = whole_of(first)
    if any((whole_of(each), each.dtype) != (whole, first.dtype) for each in entries):
        raise VerifyError(f"the parts of tensor {name!r} are of different shapes or dtypes")
    if len(entries) == 1 and first.region is None:
        return
    boxes = [box for each in entries for box in boxes_held(each) if box.size]
    if _overlap(boxes):
        raise VerifyError(f"an element of tensor {name!r} is in two slots of the version")
    here, all_of_it = sum(box.size for box in boxes), math.prod(whole)
    if here != all_of_it:
        raise VerifyError(f"the version has {here} of {all_of_it} elements of tensor {name!r}")


def boxes_held(entry: TensorEntry) -> Sequence[Box]:
    """Return the boxes of a tensor that an entry has, in the order of its bytes."""
    if entry.region is None:
        return [Box((0,) * len(entry.shape), entry.shape)]
    return boxes_of(entry.region, entry.shape)


def _overlap(boxes: Sequence[Box]) -> bool:
    """Say whether two boxes have an element in common; a sweep along the first dimension."""
    active: list[Box] = []
    for box in sorted(boxes):
        active = [each for each in active if each.stop[:1] > box.start[:1] or not box.start]
        if any(each.meet(box) is not None for each in active):
            return True
        active.append(box)
    return False


def position(offsets: Sequence[int], whole: Sequence[int]) -> int:
    """Return which element in row-major order lies at these offsets."""
    at = 0
    for offset, length in zip(offsets, whole, strict=True):
        at = at * length + offset
    return at


def _boxes_of_run(whole: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut a run of a tensor's elements into boxes, in order."""
    if start >= stop:
        return
    if len(whole) == 1:
        yield Box((start,), (stop,))
        return
    row = math.prod(whole[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(whole, start // row, start % row, stop - start // row * row)
        return
    if start < first * row:
        yield from _in_row(whole, first - 1, start % row, row)
    if first < last:
        yield Box((first, *(0,) * (len(whole) - 1)), (last, *whole[1:]))
    if last * row < stop:
        yield from _in_row(whole, last, 0, stop - last * row)


def _in_row(whole: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in _boxes_of_run(whole[1:], start, stop):
        yield Box((row, *box.start), (row + 1, *box.stop))
