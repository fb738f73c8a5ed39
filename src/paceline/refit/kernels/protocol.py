"""What the codec asks of the device that tensors live on: find, compact, write.

Words are tensors of signed integers of the element width, one-dimensional and contiguous: views of
the real tensors. Everything that is returned lives on the same device.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Tensor: TypeAlias = Any
"""A torch tensor; this module does not import torch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compacted:
    """The elements that differ: what leaves the device, and nothing else."""

    positions: Tensor
    """int64, strictly ascending."""
    old: Tensor
    new: Tensor


class DeviceLoops(Protocol):
    """Loops over tensors where they are."""

    name: str

    def compact(self, old: Tensor, new: Tensor) -> Compacted:
        """Return what differs, bit by bit. Nothing is written."""

    def move(self, words: Tensor, positions: Tensor, steps: Tensor, *, is_float: bool) -> None:
        """Write the words that are so many steps further in the order of values.

        Args:
            words: written at ``positions``, nowhere else.
            positions: inside ``words``, ascending.
            steps: of the dtype of ``words``; sums wrap around.
            is_float: words are sign and magnitude, see ``delta.order``.
        """
