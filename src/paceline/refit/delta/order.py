"""Words, and their order by value, so that a small step of a weight is a small number.

A word is one element's bits as an unsigned integer; floats are never compared or converted, so
NaN payloads and signed zeros are ordinary values here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.refit.model import DTYPE_BITS

Buffer: TypeAlias = bytes | bytearray | memoryview
Words: TypeAlias = npt.NDArray[Any]
"""Unsigned little-endian integers of 1, 2, 4 or 8 bytes; numpy's own types lose that in shifts."""
Positions: TypeAlias = npt.NDArray[np.int64]
"""Element indices, strictly ascending."""

CHUNK_BYTES = 8 * 2**20
"""Tensors are cut into chunks of this size: threads share them, and temporaries stay bounded."""
WIDTHS = (1, 2, 4, 8)

_EXPONENTS = {
    "F8_E4M3": (3, 4),
    "F8_E5M2": (2, 5),
    "F16": (10, 5),
    "BF16": (7, 8),
    "F32": (23, 8),
    "F64": (52, 11),
}
"""Float dtype -> bits below its exponent field, bits of the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordKind:
    """What the codec needs to know of a dtype."""

    width: int
    is_sign_magnitude: bool
    """Floats: the top bit is a sign. Everything else is read as an unsigned integer."""
    exponent_shift: int = 0
    exponent_bits: int = 0
    """Zero for what has no exponent field."""

    @property
    def chunk_elements(self) -> int:
        """Elements of every chunk but the last."""
        return CHUNK_BYTES // self.width

    @property
    def mask_of_exponent(self) -> int:
        """The exponent field once it was shifted down."""
        return (1 << self.exponent_bits) - 1

    @property
    def mask(self) -> int:
        """A word with all bits set."""
        return (1 << 8 * self.width) - 1


def kind_of(dtype: str) -> WordKind:
    """Return the kind of a safetensors dtype word. Raises ValueError for an unknown one."""
    if dtype not in DTYPE_BITS:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(sorted(DTYPE_BITS))}")
    shift, bits = _EXPONENTS.get(dtype, (0, 0))
    return WordKind(
        width=DTYPE_BITS[dtype] // 8,
        is_sign_magnitude=bits > 0,
        exponent_shift=shift,
        exponent_bits=bits,
    )


def as_words(data: Buffer, width: int) -> Words:
    """View a buffer as little-endian words, writable if the buffer is; nothing is copied."""
    if width not in WIDTHS:
        raise ValueError(f"element width {width} is not one of {WIDTHS}")
    return np.frombuffer(data, dtype=f"<u{width}")


def chunks(num_elements: int, kind: WordKind) -> Iterator[slice]:
    """Cut a tensor into the slices that are coded one by one; none for an empty one."""
    for start in range(0, num_elements, kind.chunk_elements):
        yield slice(start, min(start + kind.chunk_elements, num_elements))


def exponents(words: Words, kind: WordKind) -> Words:
    """Return the exponent field of each word of a float."""
    field: Words = words >> kind.exponent_shift & kind.mask_of_exponent
    return field


def rank(words: Words, kind: WordKind) -> Words:
    """Map each word to its place in the order of values: a bijection, NaN payloads included."""
    if not kind.is_sign_magnitude:
        return words
    top = _top_bit(words)
    negative = _spread(words >> (kind.width * 8 - 1))
    return words ^ (negative | top)


def unrank(ranks: Words, kind: WordKind) -> Words:
    """Take ``rank`` back."""
    if not kind.is_sign_magnitude:
        return ranks
    top = _top_bit(ranks)
    negative = ~_spread(ranks >> (kind.width * 8 - 1))
    return ranks ^ (negative | top)


def zigzag(differences: Words) -> Words:
    """Map 0, -1, 1, -2, 2 ... (modulo the word size) to 0, 1, 2, 3, 4 ..."""
    return (differences << 1) ^ _spread(differences >> (differences.itemsize * 8 - 1))


def unzigzag(codes: Words) -> Words:
    """Take ``zigzag`` back."""
    return (codes >> 1) ^ _spread(codes & 1)


def rotated(words: Words, kind: WordKind) -> Words:
    """Move a float's sign to the low bit, so that the exponent fills whole bytes."""
    if not kind.is_sign_magnitude:
        return words
    return (words << 1) | (words >> (kind.width * 8 - 1))


def unrotated(words: Words, kind: WordKind) -> Words:
    """Take ``rotated`` back."""
    if not kind.is_sign_magnitude:
        return words
    return (words >> 1) | (words << (kind.width * 8 - 1))


def _top_bit(words: Words) -> Words:
    top: Words = np.left_shift(words.dtype.type(1), words.itemsize * 8 - 1, dtype=words.dtype)
    return top


def _spread(bits: Words) -> Words:
    """Return all ones where the bit is 1, zero where it is 0."""
    spread: Words = np.negative(bits)
    return spread
