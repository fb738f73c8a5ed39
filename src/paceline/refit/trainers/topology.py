"""Who of several trainer processes publishes what: computed alike by each, without a word. Pure.

A mesh has axes. A tensor is cut along some of them and copied along the others. Of copies exactly
one process publishes each, and those are shared out so that all have about as many bytes to do.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from paceline.refit.manifest.region import Box
from paceline.refit.model import Region

Coordinate = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxes:
    """The axes of all processes of a job, outermost first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def slot(self, at: Coordinate) -> str:
        """Return the name of a process's contribution; the same after a restart."""
        parts = (
            f"{name}{index}-of-{size}"
            for name, index, size in zip(self.names, at, self.sizes, strict=True)
        )
        return ":".join(("publisher", *parts))

    def coordinates(self) -> Iterator[Coordinate]:
        """Yield every process's coordinate, in row-major order."""
        yield from product(*map(range, self.sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One division of a tensor: along a mesh axis, of one of its dimensions."""

    axis: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """How one tensor lies on the mesh."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    num_bytes: int
    cuts: tuple[Cut, ...] = ()
    """In the order in which they are made: each divides what the one before has left."""

    def box_at(self, at: Coordinate, sizes: Sequence[int]) -> Box:
        """Return what a process holds of it: pieces of one size, the last ones smaller or empty."""
        start, stop = [0] * len(self.shape), list(self.shape)
        for cut in self.cuts:
            length = stop[cut.dim] - start[cut.dim]
            piece = -(-length // sizes[cut.axis])
            first = min(length, piece * at[cut.axis])
            stop[cut.dim] = start[cut.dim] + min(length, first + piece)
            start[cut.dim] += first
        return Box(tuple(start), tuple(stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """What each process publishes; see ``plan_ownership``."""

    axes: MeshAxes
    specs: Mapping[str, TensorSpec]
    owners: Mapping[str, Mapping[int, int]]
    """Of each tensor, by axis that it is copied along: the index there that publishes it."""

    def part(self, name: str, at: Coordinate) -> Box | None:
        """Return what a process publishes of a tensor; None for nothing."""
        if any(at[axis] != index for axis, index in self.owners[name].items()):
            return None
        spec = self.specs[name]
        box = spec.box_at(at, self.axes.sizes)
        # A tensor without elements is one all the same, and somebody has to say so.
        is_first = not any(at[cut.axis] for cut in spec.cuts)
        return box if box.size or (is_first and not math.prod(spec.shape)) else None

    def slots(self) -> tuple[str, ...]:
        """Return the slots of all who publish anything, sorted."""
        return tuple(
            sorted(
                self.axes.slot(at)
                for at in self.axes.coordinates()
                if any(self.part(name, at) is not None for name in self.specs)
            )
        )


def plan_ownership(axes: MeshAxes, specs: Mapping[str, TensorSpec]) -> Ownership:
    """Share out the tensors, the largest first, each to those who have least to do so far."""
    load = np.zeros(axes.sizes, dtype=np.float64)
    owners: dict[str, Mapping[int, int]] = {}
    weights = {name: _bytes_each(spec, axes) for name, spec in specs.items()}
    for name in sorted(specs, key=lambda each: (-weights[each], each)):
        cut = {item.axis for item in specs[name].cuts}
        copied = [axis for axis in range(len(axes.sizes)) if axis not in cut]
        busy = load.sum(axis=tuple(sorted(cut))) if cut else load
        least = np.unravel_index(int(np.argmin(busy)), busy.shape) if copied else ()
        owners[name] = {axis: int(at) for axis, at in zip(copied, least, strict=True)}
        place = tuple(owners[name].get(axis, slice(None)) for axis in range(len(axes.sizes)))
        load[place] += weights[name]
    return Ownership(axes=axes, specs=specs, owners=owners)


def region_of(box: Box, shape: tuple[int, ...]) -> Region | None:
    """Return a box as a part of its tensor; None if it is all of it."""
    return None if box.shape == shape else Region(global_shape=shape, offsets=box.start)


def _bytes_each(spec: TensorSpec, axes: MeshAxes) -> float:
    return spec.num_bytes / math.prod(axes.sizes[cut.axis] for cut in spec.cuts)
