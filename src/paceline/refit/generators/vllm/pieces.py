"""Where the elements of a checkpoint's tensors lie in an engine's parameters: arithmetic only.

An engine's loader cuts, fuses and shards, but almost always by views. So what it did to one tensor
is a few pairs of strided boxes: from here in the checkpoint, to there in the parameter.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from paceline.refit.delta.order import Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Elements of a flat storage, as a strided view names them."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many elements it names."""
        return prod(self.sizes)

    @property
    def is_dense(self) -> bool:
        """Whether the elements follow each other without a gap, in order."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def end(self) -> int:
        """One past the highest element."""
        spans = zip(self.sizes, self.strides, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One copy that a loader made; the boxes have the same sizes."""

    parameter: str
    """Name in the engine's model."""
    source: Box
    """In the checkpoint's tensor, which is dense."""
    target: Box
    """In the parameter's storage."""

    def place(self, positions: Positions) -> tuple[npt.NDArray[np.bool_], Positions]:
        """Return which positions of the checkpoint's tensor the piece takes, and where they go.

        Args:
            positions: flat, in the checkpoint's tensor.

        Returns:
            A mask over ``positions``, and the flat target of each that it keeps.
        """
        source, target = self.source, self.target
        rest = positions - source.offset
        goes = np.full(len(positions), target.offset, dtype=np.int64)
        inside = np.ones(len(positions), dtype=bool)
        for axis in _coarse_first(source):
            digit, rest = np.divmod(rest, source.strides[axis])
            inside &= (digit >= 0) & (digit < source.sizes[axis])
            goes += digit * target.strides[axis]
        inside &= rest == 0
        return inside, goes[inside]


def is_unambiguous(box: Box) -> bool:
    """Say whether no two indices of the box name one element, provably by its strides alone."""
    covered = 0
    for axis in reversed(_coarse_first(box)):
        if box.strides[axis] <= covered:
            return False
        covered += (box.sizes[axis] - 1) * box.strides[axis]
    return box.offset >= 0


def covers(pieces: "list[Piece]", num_elements: int) -> bool:
    """Say whether the sources of pieces are all of a tensor of so many elements.

    A sharded engine takes a part only; then it is False and that is fine.
    """
    return sum(piece.source.num_elements for piece in pieces) >= num_elements


def _coarse_first(box: Box) -> list[int]:
    """Return the axes that have more than one index, largest stride first."""
    axes = [axis for axis, size in enumerate(box.sizes) if size != 1]
    return sorted(axes, key=lambda axis: -box.strides[axis])
