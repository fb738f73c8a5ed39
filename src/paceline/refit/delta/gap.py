"""Schemes GAP and CLASSED: one record per chunk with its steps, compressed stream by stream.

CLASSED sorts the elements of the chunk into groups by the exponent of the word before the
change: both sides have that word, small weights change far more often than large ones, and gaps
counted within a group of one density take fewer bytes. GAP is one group of all.

Layout: u64 total, u32 escapes, u32 bytes of the escape frame, u16 groups, then one u16 for every
group but the first: the smallest exponent in it. Then per group u32 codes, u32 gap bytes, u32
bytes of either frame. Then the frames: escapes (byte planes, low byte first), and per group its
gaps and its codes. A frame of nothing has no bytes. A chunk without changes is an empty record.
"""

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import zstandard

from paceline.refit.delta.loops import (
    WHERE,
    Bytes,
    Group,
    Loops,
    check_counts,
    check_escapes,
)
from paceline.refit.delta.order import WordKind, Words, exponents
from paceline.refit.delta.steps import ESCAPE, Steps, positions_of
from paceline.refit.delta.stream import Cursor, expand, new_compressor, new_expander
from paceline.refit.errors import ParseError, ParseReason

GROUPS_MAX: Final = 64
_CROWD: Final = 128
"""Fewer changes than this do not pay for the lengths and frames of a group of their own."""
_THOROUGH: Final = 13
"""Codes carry little more than a bit each. Quick levels of zstd spend bytes on short matches
there; one that weighs them against its entropy coder saves a fifth of the stream."""
_HEAD: Final = struct.Struct("<QIIH")
_GROUP: Final = struct.Struct("<IIII")
_U16: Final = struct.Struct("<H")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    codes: int
    gap_bytes: int
    gap_frame: int
    code_frame: int


def render(steps: Steps, zstd: zstandard.ZstdCompressor) -> bytes:
    """Return the GAP record of a chunk."""
    if not len(steps):
        return b""
    return _render(steps, [(steps.gaps, steps.codes)], [], (zstd, zstd))


def render_classed(steps: Steps, old: Words, kind: WordKind, *, loops: Loops) -> bytes:
    """Return the CLASSED record of a chunk of floats."""
    if not len(steps):
        return b""
    bounds = _group_bounds(exponents(old[positions_of(steps.gaps)], kind), kind)
    groups = loops.split(steps, old, kind, _table(bounds, kind))
    return _render(steps, groups, bounds, (new_compressor(), new_compressor(_THOROUGH)))


def parse(
    record: memoryview, old: Words, kind: WordKind, *, first: int, loops: Loops, keep: bool = False
) -> Steps:
    """Return the steps of a GAP record, checked against the chunk. Raises ParseError.

    Streams are expanded only after their sizes were found possible for this chunk.
    """
    cursor = Cursor(record, where=WHERE)
    steps = _ungrouped(cursor, len(old), kind)
    return loops.check(steps, old, kind, first=first, keep=keep)


def parse_classed(
    record: memoryview, old: Words, kind: WordKind, *, first: int, loops: Loops, keep: bool = False
) -> Steps:
    """Return the steps of a CLASSED record, checked against the chunk. Raises ParseError."""
    cursor = Cursor(record, where=WHERE)
    head, bounds, sizes = _parse_head(cursor, len(old), kind)
    escapes, groups = _parse_streams(cursor, head, sizes, kind)
    joined = loops.join(groups, escapes, old, kind, _table(bounds, kind))
    steps = Steps(gaps=joined.gaps, codes=joined.codes, escapes=escapes, total=head[0])
    return loops.check(steps, old, kind, first=first, keep=keep)


def changes_declared(record: memoryview, num_elements: int, kind: WordKind) -> int:
    """Return how many changes a record speaks of, at most ``num_elements``. Raises ParseError."""
    if not len(record):
        return 0
    _, _, sizes = _parse_head(Cursor(record, where=WHERE), num_elements, kind)
    return sum(size.codes for size in sizes)


def parse_unchecked(record: memoryview, num_elements: int, kind: WordKind) -> Steps:
    """Return the steps of a GAP record without the chunk they apply to. Raises ParseError."""
    cursor = Cursor(record, where=WHERE)
    steps = _ungrouped(cursor, num_elements, kind)
    check_counts(steps.gaps, steps.codes, num_elements)
    check_escapes([steps.codes], steps.escapes)
    return steps


def empty_steps(kind: WordKind) -> Steps:
    """Return the steps of a chunk that does not change."""
    nothing = np.empty(0, dtype=np.uint8)
    escapes = np.empty(0, dtype=f"<u{kind.width}")
    return Steps(gaps=nothing, codes=nothing, escapes=escapes, total=0)


def _group_bounds(changed: Words, kind: WordKind) -> list[int]:
    """Start a new group at an exponent once the one before has enough changes."""
    counts = np.bincount(changed.astype(np.int64), minlength=1 << kind.exponent_bits)
    bounds: list[int] = []
    crowd = 0
    for exponent, count in enumerate(counts.tolist()):
        if crowd >= _CROWD and len(bounds) < GROUPS_MAX - 1:
            bounds.append(exponent)
            crowd = 0
        crowd += count
    if bounds and crowd < _CROWD:
        bounds.pop()
    return bounds


def _table(bounds: list[int], kind: WordKind) -> Bytes:
    fields = np.arange(1 << kind.exponent_bits)
    return np.searchsorted(np.array(bounds, dtype=np.int64), fields, side="right").astype(np.uint8)


def _render(
    steps: Steps,
    groups: list[Group],
    bounds: list[int],
    zstd: tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor],
) -> bytes:
    planes = np.ascontiguousarray(
        steps.escapes.view(np.uint8).reshape(-1, steps.escapes.itemsize).T
    )
    frames = [zstd[0].compress(planes.data) if planes.size else b""]
    sizes = []
    for gaps, codes in groups:
        pair = [
            coder.compress(stream.data) if len(stream) else b""
            for coder, stream in zip(zstd, (gaps, codes), strict=True)
        ]
        sizes.append(_GROUP.pack(len(codes), len(gaps), *(len(frame) for frame in pair)))
        frames += pair
    head = _HEAD.pack(steps.total, len(steps.escapes), len(frames[0]), len(groups))
    return b"".join((head, *(_U16.pack(bound) for bound in bounds), *sizes, *frames))


def _ungrouped(cursor: Cursor, num_elements: int, kind: WordKind) -> Steps:
    head, bounds, sizes = _parse_head(cursor, num_elements, kind)
    if bounds:
        raise ParseError(ParseReason.INCONSISTENT, cursor.where, "groups in a scheme without")
    escapes, [(gaps, codes)] = _parse_streams(cursor, head, sizes, kind)
    return Steps(gaps=gaps, codes=codes, escapes=escapes, total=head[0])


def _parse_head(
    cursor: Cursor, num_elements: int, kind: WordKind
) -> tuple[tuple[int, int, int], list[int], list[_Sizes]]:
    where = cursor.where
    total, escapes, escape_frame, count = _HEAD.unpack(cursor.take(_HEAD.size))
    if not 1 <= count <= GROUPS_MAX:
        raise ParseError(ParseReason.OUT_OF_RANGE, where, f"{count} groups")
    bounds = [_U16.unpack(cursor.take(_U16.size))[0] for _ in range(count - 1)]
    edges = [0, *bounds, 1 << kind.exponent_bits]
    if bounds and any(low >= high for low, high in pairwise(edges)):
        raise ParseError(ParseReason.OUT_OF_RANGE, where, "bounds of groups do not ascend")
    sizes = []
    for _ in range(count):
        codes, gaps, gap_frame, code_frame = _GROUP.unpack(cursor.take(_GROUP.size))
        sizes.append(
            _Sizes(codes=codes, gap_bytes=gaps, gap_frame=gap_frame, code_frame=code_frame)
        )
    changed = sum(size.codes for size in sizes)
    if not 0 < changed <= num_elements or escapes > changed:
        detail = f"{changed} changes, {escapes} escapes in {num_elements} elements"
        raise ParseError(ParseReason.OUT_OF_RANGE, where, detail)
    if any(size.gap_bytes > size.codes + num_elements // ESCAPE for size in sizes):
        raise ParseError(ParseReason.OUT_OF_RANGE, where, "more gap bytes than gaps can take")
    return (total, escapes, escape_frame), bounds, sizes


def _parse_streams(
    cursor: Cursor, head: tuple[int, int, int], sizes: list[_Sizes], kind: WordKind
) -> tuple[Words, list[Group]]:
    _, count, escape_frame = head
    reader = new_expander()
    planes = _stream(cursor, escape_frame, count * kind.width, reader)
    escapes = np.ascontiguousarray(planes.reshape(kind.width, -1).T).reshape(-1)
    groups = [
        (
            _stream(cursor, size.gap_frame, size.gap_bytes, reader),
            _stream(cursor, size.code_frame, size.codes, reader),
        )
        for size in sizes
    ]
    cursor.expect_end()
    return escapes.view(f"<u{kind.width}"), groups


def _stream(
    cursor: Cursor, frame_bytes: int, size: int, reader: zstandard.ZstdDecompressor
) -> Bytes:
    frame = cursor.take(frame_bytes)
    if not size:
        if frame_bytes:
            raise ParseError(ParseReason.NOT_CANONICAL, cursor.where, "a frame of nothing")
        return np.empty(0, dtype=np.uint8)
    data = expand(frame, size=size, where=cursor.where, reader=reader)
    return np.frombuffer(data, dtype=np.uint8)
