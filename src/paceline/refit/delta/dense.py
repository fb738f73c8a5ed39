"""Schemes for tensors in which much changes: DENSE chunk by chunk, XOR as one frame.

DENSE record: one tag byte and one zstd frame of byte planes, low byte first. Tag 0: planes of
old XOR new. Tag 1: planes of the new words, floats rotated left by one so that the exponent
fills whole bytes. XOR is the frame that the canonical ModelExpress format carries: old XOR new
of the whole tensor, byte by byte.
"""

import io
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

import numpy as np
import zstandard

from paceline.refit.delta.order import WordKind, Words, chunks, rotated, unrotated
from paceline.refit.delta.stream import Cursor, expand, open_frame
from paceline.refit.errors import ParseError, ParseReason

_WHERE: Final = "payload.dense"


class Dense(IntEnum):
    """What the planes are of."""

    XOR = 0
    FULL = 1


def render(
    old: Words, new: Words, kind: WordKind, *, tag: Dense, zstd: zstandard.ZstdCompressor
) -> bytes:
    """Return the DENSE record of a chunk."""
    words = old ^ new if tag is Dense.XOR else rotated(new, kind)
    planes = words.view(np.uint8).reshape(-1, kind.width).T
    return bytes([tag]) + zstd.compress(np.ascontiguousarray(planes).data)


def parse(record: memoryview, old: Words, kind: WordKind) -> Words:
    """Return the new words of the chunk. Raises ParseError."""
    cursor = Cursor(record, where=_WHERE)
    tag = cursor.take(1)[0]
    if tag not in set(Dense):
        raise ParseError(ParseReason.OUT_OF_RANGE, _WHERE, f"tag {tag}")
    data = expand(cursor.take_rest(), size=old.nbytes, where=_WHERE)
    planes = np.frombuffer(data, dtype=np.uint8).reshape(kind.width, -1)
    words: Words = np.ascontiguousarray(planes.T).reshape(-1).view(old.dtype)
    return old ^ words if tag == Dense.XOR else unrotated(words, kind)


def render_xor(old: Words, new: Words, kind: WordKind) -> bytes:
    """Return one zstd frame, level 1, of the XOR of two tensors; memory is a chunk and it."""
    out = io.BytesIO()
    zstd = zstandard.ZstdCompressor(level=1, write_content_size=True)
    with zstd.stream_writer(out, size=old.nbytes, closefd=False) as writer:
        for part in chunks(len(old), kind):
            writer.write((old[part] ^ new[part]).data.cast("B"))
    return out.getvalue()


def parse_xor(data: memoryview, old: Words, kind: WordKind) -> Iterator[Words]:
    """Yield the new words chunk by chunk; the frame must hold the tensor exactly.

    Raises:
        ParseError: another size, damage, or bytes after the frame.
    """
    where = "payload.xor"
    with open_frame(data, size=old.nbytes, where=where) as read:
        for part in chunks(len(old), kind):
            before = old[part]
            yield before ^ np.frombuffer(read(before.nbytes), dtype=old.dtype)
