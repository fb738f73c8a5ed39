"""An additive digest of a tensor: a sum over its elements, so a change alone updates it.

    digest = sum over i of weight(i) * spread(word i)        modulo 2**64
    weight(i) = (x ^ x >> 32) | 1 with x = i * PLACE         i counts from the start of the tensor
    spread(w) = w + CURVE * w * w

``CURVE`` is even, so ``spread`` is a bijection, and weights are odd: another word in one place
always gives another digest. Because of the square it matters from which word a step is taken, so
steps that meet another base are found out. It guards against accidents and mistakes; against an
adversary stand the SHA-256 of the payload and the content digest of the whole tensor.
"""

import numpy as np
import numpy.typing as npt

from paceline.refit.delta.order import Positions, Words

PLACE = 0x9E3779B97F4A7C15
CURVE = 0x9FB21C651E98DF24
FOLD = 32
_BLOCK = 2**20


def digest_change(at: Positions, old: Words, new: Words) -> int:
    """Return digest(new) - digest(old), modulo 2**64, of elements at places in the tensor."""
    before, after = old.astype(np.uint64), new.astype(np.uint64)
    slope = (before + after) * np.uint64(CURVE) + np.uint64(1)
    return int(np.sum((after - before) * slope * _weights(at), dtype=np.uint64))


def additive_digest(words: Words, *, first: int = 0) -> int:
    """Return the digest of ``words``, which lie in their tensor from element ``first`` on."""
    total = 0
    for start in range(0, len(words), _BLOCK):
        part = words[start : start + _BLOCK].astype(np.uint64)
        at = np.arange(first + start, first + start + len(part))
        spread = part + part * part * np.uint64(CURVE)
        total += int(np.sum(spread * _weights(at), dtype=np.uint64))
    return total % 2**64


def _weights(at: Positions) -> npt.NDArray[np.uint64]:
    keyed = at.astype(np.uint64) * np.uint64(PLACE)
    return (keyed ^ keyed >> np.uint64(FOLD)) | np.uint64(1)
