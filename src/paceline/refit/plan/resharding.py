"""Which ranges of whose bytes a reader of another layout needs. Pure.

Sources and wants are parts of tensors in one system of coordinates, so any mesh can be read by any
other. A want may be made of several tensors (fused projections, stacked experts), as declared: it
is then a list of places, each a box of one tensor's elements and where that lies in the want.

Nobody needs the whole of anything: what is planned for a want fits into it, and runs that follow
one another both where they are read and where they go are one copy.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from paceline.refit.errors import VerifyError
from paceline.refit.manifest.region import Box, boxes_held, boxes_of, position, whole_of
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import DTYPE_BITS, Region, TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A box of one tensor, and where it lies in what is wanted."""

    name: str
    box: Box
    """In the coordinates of the whole tensor."""
    at: tuple[int, ...]
    """Where its first element goes; a want may have more dimensions, in front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One dense local tensor that a reader needs."""

    shape: tuple[int, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Bytes of one source's part that go to a want."""

    source: int
    """Which of the sources, by its index."""
    source_offset: int
    """In the part's own bytes."""
    target_offset: int
    """In the bytes of what is wanted."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A part of a tensor that somebody serves."""

    slot: str
    entry: TensorEntry
    object_id: str
    offset: int
    """Of the part's first byte, in the object."""


def want_part(name: str, shape: tuple[int, ...], region: Region | None = None) -> Want:
    """Return the want of one tensor, or of a part of one, as it is."""
    if region is None:
        region = Region(global_shape=shape, offsets=(0,) * len(shape))
    (box,) = boxes_of(region, shape)
    return Want(shape=shape, places=(Place(name=name, box=box, at=(0,) * len(shape)),))


def want_fused(parts: Sequence[tuple[str, Box]], *, dim: int = 0) -> Want:
    """Return parts of several tensors one behind another, as fused projections are.

    A rank of tensor parallelism gives its own rows of each: ``[q of mine, k of mine, v of mine]``.
    """
    places, end = [], 0
    for name, box in parts:
        at = [0] * len(box.shape)
        at[dim] = end
        places.append(Place(name=name, box=box, at=tuple(at)))
        end += box.shape[dim]
    shape = list(parts[0][1].shape)
    shape[dim] = end
    return Want(shape=tuple(shape), places=tuple(places))


def want_stacked(wants: Sequence[Want]) -> Want:
    """Return equal wants along a new first dimension, as experts are stacked."""
    places = tuple(
        Place(name=place.name, box=place.box, at=(index, *place.at))
        for index, want in enumerate(wants)
        for place in want.places
    )
    return Want(shape=(len(wants), *wants[0].shape), places=places)


def sources_of(manifests: Iterable[Manifest]) -> Sequence[Source]:
    """Return every part that full shards serve.

    Raises:
        VerifyError: a manifest is of a delta, whose bytes are no ranges of tensors.
    """
    found = []
    for manifest in manifests:
        if not manifest.is_full:
            raise VerifyError(
                f"{manifest.source_slot_id} is a delta; read ranges of a full version"
            )
        entries = {entry.name: entry for entry in manifest.tensors}
        found += [
            Source(
                slot=manifest.source_slot_id,
                entry=entries[segment.tensor],
                object_id=segment.object_id,
                offset=segment.offset,
            )
            for segment in manifest.segments
        ]
    return found


def plan_copies(want: Want, sources: Sequence[Source]) -> Sequence[Copy]:
    """Return the copies that fill a want, in the order of its bytes.

    Raises:
        VerifyError: the sources do not have all of it, have some of it twice, or are of two dtypes.
    """
    by_name: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        by_name.setdefault(source.entry.name, []).append(index)
    found = [
        copy
        for place in want.places
        for index in by_name.get(place.name, [])
        for copy in _copies(index, sources[index].entry, place, want)
    ]
    copies = _joined(sorted(found, key=lambda copy: copy.target_offset))
    _check_filled(want, copies, sources)
    return copies


def chunks_needed(
    copies: Iterable[Copy], sources: Sequence[Source], chunk_bytes: Mapping[str, int]
) -> Mapping[str, frozenset[int]]:
    """Return which chunks of each object have to be read, by the size of its chunks."""
    found: dict[str, set[int]] = {}
    for copy in copies:
        source = sources[copy.source]
        size = chunk_bytes[source.object_id]
        start = source.offset + copy.source_offset
        chunks = range(start // size, -(-(start + copy.size) // size))
        found.setdefault(source.object_id, set()).update(chunks)
    return {object_id: frozenset(chunks) for object_id, chunks in found.items()}


def _copies(index: int, entry: TensorEntry, place: Place, want: Want) -> Iterator[Copy]:
    if len(place.box.start) != len(whole_of(entry)):
        raise VerifyError(
            f"tensor {place.name!r} has {len(whole_of(entry))} dimensions, "
            f"{len(place.box.start)} are wanted"
        )
    width, first = DTYPE_BITS[entry.dtype] // 8, 0
    for held in boxes_held(entry):
        common = held.meet(place.box)
        if common is not None:
            for start, target, count in _runs(common, held, place, want):
                yield Copy(
                    source=index,
                    source_offset=(first + start) * width,
                    target_offset=target * width,
                    size=count * width,
                )
        first += held.size


def _runs(common: Box, held: Box, place: Place, want: Want) -> Iterator[tuple[int, int, int]]:
    """Cut what a source and a place have in common into runs that are dense on both sides.

    Yields first element in the source's box, first element in the want, and how many.
    """
    lead = len(want.shape) - len(common.shape)
    inner, tail, count = want.shape[lead:], len(common.shape), 1
    while tail and common.shape[tail:] == held.shape[tail:] == inner[tail:]:
        tail -= 1
        count *= common.shape[tail]
    outer = [range(a, b) for a, b in zip(common.start, common.stop, strict=True)][:tail]
    for at in product(*outer):
        here = (*at, *common.start[tail:])
        local = [i - a for i, a in zip(here, held.start, strict=True)]
        there = [i - a for i, a in zip(here, place.box.start, strict=True)]
        target = [*place.at[:lead], *map(sum, zip(there, place.at[lead:], strict=True))]
        yield position(local, held.shape), position(target, want.shape), count


def _joined(copies: Sequence[Copy]) -> Sequence[Copy]:
    """Make one copy of those that follow one another on both sides."""
    found: list[Copy] = []
    for copy in copies:
        last = found[-1] if found else None
        if (
            last is not None
            and last.source == copy.source
            and last.source_offset + last.size == copy.source_offset
            and last.target_offset + last.size == copy.target_offset
        ):
            found[-1] = replace(last, size=last.size + copy.size)
        else:
            found.append(copy)
    return found


def _check_filled(want: Want, copies: Sequence[Copy], sources: Sequence[Source]) -> None:
    dtypes = {sources[copy.source].entry.dtype for copy in copies}
    names = ", ".join(sorted({place.name for place in want.places}))
    if len(dtypes) > 1:
        raise VerifyError(f"{names}: parts of dtypes {', '.join(sorted(dtypes))}")
    end = 0
    for copy in copies:
        if copy.target_offset != end:
            what = "nobody has" if copy.target_offset > end else "two sources have"
            raise VerifyError(
                f"{names}: {what} byte {min(end, copy.target_offset)} of what is wanted"
            )
        end += copy.size
    width = DTYPE_BITS[next(iter(dtypes))] // 8 if dtypes else 1
    if end != math.prod(want.shape) * width:
        raise VerifyError(f"{names}: nobody has byte {end} of what is wanted")
