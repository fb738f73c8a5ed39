"""What differs between two states of a tensor: positions and XOR words, over raw buffers.

A word is one element's bits as an unsigned integer; floats are never compared or converted, so
NaN payloads and signed zeros are ordinary values here. XOR makes a change its own inverse.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview
Words: TypeAlias = npt.NDArray[Any]
"""Unsigned little-endian integers of 1, 2, 4 or 8 bytes; numpy's own types lose that in shifts."""
Positions: TypeAlias = npt.NDArray[np.int64]

BLOCK_BYTES = 16 * 2**20
"""Large tensors are worked on in blocks of this size, so that temporaries stay bounded."""
WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """Elements that differ; everything else stays."""

    positions: Positions
    """Element indices, strictly ascending."""
    xor: Words
    """Old bits ^ new bits of each, never zero; the item size is the element width."""

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return self.xor.itemsize

    def __len__(self) -> int:
        return len(self.positions)


def as_words(data: Buffer, width: int) -> Words:
    """View a buffer as little-endian words, writable if the buffer is; nothing is copied."""
    if width not in WIDTHS:
        raise ValueError(f"element width {width} is not one of {WIDTHS}")
    return np.frombuffer(data, dtype=f"<u{width}")


def blocks(num_elements: int, width: int) -> Iterator[slice]:
    """Cut a tensor into the slices that are worked on one at a time; none for an empty one."""
    step = BLOCK_BYTES // width
    for start in range(0, num_elements, step):
        yield slice(start, min(start + step, num_elements))


def diff(base: Buffer, new: Buffer, *, width: int) -> Change:
    """Return the change that turns ``base`` into ``new``."""
    old, now = as_words(base, width), as_words(new, width)
    if len(old) != len(now):
        raise ValueError(f"{len(old)} elements against {len(now)}: a change keeps the size")
    found = [
        np.flatnonzero(old[part] != now[part]) + part.start for part in blocks(len(old), width)
    ]
    positions = _joined(found)
    return Change(positions=positions, xor=old[positions] ^ now[positions])


def apply_change(target: bytearray | memoryview, change: Change) -> None:
    """Flip the bits of the change in ``target``; doing it twice restores the old state."""
    words = as_words(target, change.width)
    check_inside(change, len(words))
    words[change.positions] ^= change.xor


def inverse(change: Change) -> Change:
    """Return what takes a change back: itself."""
    return change


def compose(first: Change, second: Change) -> Change:
    """Return the one change that equals ``first`` and then ``second``."""
    if first.width != second.width:
        raise ValueError(f"changes of widths {first.width} and {second.width} do not compose")
    positions = np.union1d(first.positions, second.positions)
    xor = np.zeros(len(positions), dtype=first.xor.dtype)
    for change in (first, second):
        xor[np.searchsorted(positions, change.positions)] ^= change.xor
    kept = np.flatnonzero(xor)
    return Change(positions=positions[kept], xor=xor[kept])


def check_inside(change: Change, num_elements: int) -> None:
    """Raise ValueError unless the positions ascend inside a tensor of this many elements."""
    positions = change.positions
    if len(positions) != len(change.xor):
        raise ValueError(f"{len(positions)} positions for {len(change.xor)} words")
    if len(positions) == 0:
        return
    if positions[0] < 0 or positions[-1] >= num_elements or np.any(np.diff(positions) <= 0):
        raise ValueError(f"positions do not ascend inside {num_elements} elements")


def _joined(found: list[Positions]) -> Positions:
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
