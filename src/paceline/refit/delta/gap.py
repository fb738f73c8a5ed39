"""Scheme GAP for one block: gaps between changed elements and their steps in value order.

Layout: u32 entries, u32 escapes; then, unless entries is 0, one u32 length per stream and the
streams, each a zstd frame: low and high bytes of the gaps, then the values. An entry is a
16-bit gap (unchanged elements since the entry before) and a value (zigzag of the rank
difference). A longer gap is written as filler entries: gap 65535, value 0. Values of 2-byte
elements are one byte, 255 meaning that the difference is the next word of the escape stream;
other widths have one stream per byte of the value, low byte first, and no escapes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from paceline.refit.delta.change import Change, Positions, Words
from paceline.refit.delta.order import WordKind, rank, unrank, unzigzag, zigzag
from paceline.refit.delta.stream import Cursor, expand, render_u32
from paceline.refit.errors import ParseError, ParseReason

GAP_MAX = 0xFFFF
ESCAPE = 0xFF
_ESCAPED_WIDTH = 2
_Bytes = npt.NDArray[np.uint8]


def encode_block(
    old: Words, new: Words, changed: Positions, *, kind: WordKind, zstd: zstandard.ZstdCompressor
) -> bytes:
    """Encode the elements at ``changed``, which are all that differ between the two blocks."""
    if len(changed) == 0:
        return render_u32(0, 0)
    steps = zigzag(rank(new[changed], kind) - rank(old[changed], kind))
    gaps, codes = _with_fillers(changed, steps)
    low, high = gaps.astype(np.uint8), (gaps >> 8).astype(np.uint8)
    values, escapes = _value_streams(codes, kind)
    streams = [zstd.compress(stream.tobytes()) for stream in (low, high, *values)]
    return b"".join(
        (render_u32(len(gaps), escapes, *(len(stream) for stream in streams)), *streams)
    )


def decode_block(cursor: Cursor, old: Words, *, kind: WordKind) -> Change:
    """Return the change of one block, everything checked, nothing written. Raises ParseError."""
    where = cursor.where
    entries, escapes = cursor.take_u32(), cursor.take_u32()
    if entries > len(old) or escapes > entries:
        raise ParseError(ParseReason.OUT_OF_RANGE, where, f"{entries} entries in {len(old)}")
    if entries == 0:
        return Change(positions=np.empty(0, dtype=np.int64), xor=np.empty(0, dtype=old.dtype))
    streams = _read_streams(cursor, _stream_sizes(entries, escapes, kind))
    gaps = streams[0].astype(np.int64) | (streams[1].astype(np.int64) << 8)
    codes = _codes(streams[2:], kind, where)
    positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= len(old):
        raise ParseError(ParseReason.OUT_OF_RANGE, where, "position past the end")
    filler = codes == 0
    if filler[-1] or np.any(gaps[filler] != GAP_MAX):
        raise ParseError(ParseReason.NOT_CANONICAL, where, "an entry that changes nothing")
    kept = positions[~filler]
    before = old[kept]
    after = unrank(rank(before, kind) + unzigzag(codes[~filler]), kind)
    return Change(positions=kept, xor=before ^ after)


def _with_fillers(changed: Positions, steps: Words) -> tuple[npt.NDArray[np.uint16], Words]:
    gaps = np.diff(changed, prepend=-1) - 1
    fillers = gaps // (GAP_MAX + 1)
    total = len(gaps) + int(fillers.sum())
    if total == len(gaps):
        return gaps.astype(np.uint16), steps
    at = np.arange(len(gaps)) + np.cumsum(fillers)
    all_gaps = np.full(total, GAP_MAX, dtype=np.uint16)
    all_gaps[at] = gaps % (GAP_MAX + 1)
    codes = np.zeros(total, dtype=steps.dtype)
    codes[at] = steps
    return all_gaps, codes


def _value_streams(codes: Words, kind: WordKind) -> tuple[list[npt.NDArray[Any]], int]:
    if kind.width != _ESCAPED_WIDTH:
        return [(codes >> (8 * i)).astype(np.uint8) for i in range(kind.width)], 0
    large = codes >= ESCAPE
    escaped = unzigzag(codes[large]).astype("<u2")
    return [np.where(large, ESCAPE, codes).astype(np.uint8), escaped], len(escaped)


def _stream_sizes(entries: int, escapes: int, kind: WordKind) -> list[int]:
    if kind.width == _ESCAPED_WIDTH:
        return [entries, entries, entries, 2 * escapes]
    if escapes:
        return []
    return [entries] * (2 + kind.width)


def _read_streams(cursor: Cursor, sizes: list[int]) -> list[_Bytes]:
    if not sizes:
        raise ParseError(ParseReason.INCONSISTENT, cursor.where, "escapes in an unescaped width")
    lengths = [cursor.take_u32() for _ in sizes]
    return [
        np.frombuffer(expand(cursor.take(length), size=size, where=cursor.where), dtype=np.uint8)
        for length, size in zip(lengths, sizes, strict=True)
    ]


def _codes(streams: list[_Bytes], kind: WordKind, where: str) -> Words:
    if kind.width != _ESCAPED_WIDTH:
        codes = np.zeros(len(streams[0]), dtype=f"<u{kind.width}")
        for i, plane in enumerate(streams):
            codes |= plane.astype(codes.dtype) << (8 * i)
        return codes
    codes = streams[0].astype("<u2")
    large = codes == ESCAPE
    escaped = zigzag(np.frombuffer(streams[1].tobytes(), dtype="<u2"))
    if np.count_nonzero(large) != len(escaped):
        raise ParseError(ParseReason.INCONSISTENT, where, f"{len(escaped)} escapes")
    if np.any(escaped < ESCAPE):
        raise ParseError(ParseReason.NOT_CANONICAL, where, "an escape for a small value")
    codes[large] = escaped
    return codes
