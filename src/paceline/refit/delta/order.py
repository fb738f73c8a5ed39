"""Words in the order of their values, so that a small step of a weight is a small number."""

from dataclasses import dataclass

import numpy as np

from paceline.refit.delta.change import Words
from paceline.refit.model import DTYPE_BITS

_SIGN_MAGNITUDE = frozenset({"F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WordKind:
    """What the codec needs to know of a dtype."""

    width: int
    is_sign_magnitude: bool
    """Floats: the top bit is a sign. Everything else is read as an unsigned integer."""


def kind_of(dtype: str) -> WordKind:
    """Return the kind of a safetensors dtype word. Raises ValueError for an unknown one."""
    if dtype not in DTYPE_BITS:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(sorted(DTYPE_BITS))}")
    return WordKind(width=DTYPE_BITS[dtype] // 8, is_sign_magnitude=dtype in _SIGN_MAGNITUDE)


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
