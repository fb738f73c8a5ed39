"""Scheme DENSE for one block: all of it as byte planes in one zstd frame.

Layout: one tag byte, u32 length, zstd frame. Tag 0: the XOR against the base. Tag 1: the new
words themselves, floats rotated left by one so that the exponent fills whole bytes. Planes are
ordered low byte first.
"""

from enum import IntEnum

import numpy as np
import zstandard

from paceline.refit.delta.change import Words
from paceline.refit.delta.order import WordKind, rotated, unrotated
from paceline.refit.delta.stream import Cursor, expand, render_u32
from paceline.refit.errors import ParseError, ParseReason


class Dense(IntEnum):
    """What the planes are of."""

    XOR = 0
    FULL = 1


def encode_block(
    old: Words, new: Words, *, tag: Dense, kind: WordKind, zstd: zstandard.ZstdCompressor
) -> bytes:
    """Encode a whole block."""
    words = old ^ new if tag is Dense.XOR else rotated(new, kind)
    planes = words.view(np.uint8).reshape(-1, kind.width).T
    frame = zstd.compress(np.ascontiguousarray(planes).data)
    return b"".join((bytes([tag]), render_u32(len(frame)), frame))


def decode_block(cursor: Cursor, old: Words, *, kind: WordKind) -> Words:
    """Return the new words of the block. Raises ParseError."""
    tag, length = cursor.take(1)[0], cursor.take_u32()
    if tag not in set(Dense):
        raise ParseError(ParseReason.OUT_OF_RANGE, cursor.where, f"dense tag {tag}")
    data = expand(cursor.take(length), size=old.nbytes, where=cursor.where)
    planes = np.frombuffer(data, dtype=np.uint8).reshape(kind.width, -1)
    words: Words = np.ascontiguousarray(planes.T).reshape(-1).view(old.dtype)
    return old ^ words if tag == Dense.XOR else unrotated(words, kind)
