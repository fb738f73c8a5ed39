"""Compressed streams of known length, and a reader that never reads past its bytes."""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import zstandard

from paceline.refit.errors import ParseError, ParseReason

_WINDOW_BYTES_MAX: Final = 32 * 2**20
_U32: Final = struct.Struct("<I")


_QUICK: Final = zstandard.ZstdCompressionParameters.from_level(
    1, hash_log=6, min_match=7, write_content_size=True
)
"""Level 1 that hardly looks for matches: our streams have few, and short ones cost more bytes
than the entropy coder that they take the symbols from."""


def new_compressor(level: int | None = None) -> zstandard.ZstdCompressor:
    """Return a zstd compressor that writes content sizes, a quick one by default; not shared."""
    if level is None:
        return zstandard.ZstdCompressor(compression_params=_QUICK)
    return zstandard.ZstdCompressor(level=level, write_content_size=True)


def new_expander() -> zstandard.ZstdDecompressor:
    """Return a decompressor of bounded memory; not shared between threads."""
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)


def expand(
    frame: memoryview,
    *,
    size: int,
    where: str,
    reader: zstandard.ZstdDecompressor | None = None,
) -> bytes:
    """Return the ``size`` bytes that one zstd frame holds.

    Making a reader takes as long as a small frame: who has several frames passes one. The size
    that the frame declares is compared before anything is allocated.

    Raises:
        ParseError: another size, damage, or bytes after the frame.
    """
    _check_declared(frame, size=size, where=where)
    try:
        data = (reader or new_expander()).decompress(
            frame, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as exc:
        raise ParseError(ParseReason.INCONSISTENT, where, "damaged zstd frame") from exc
    if len(data) != size:
        raise ParseError(ParseReason.INCONSISTENT, where, f"{len(data)} bytes, wanted {size}")
    return data


@contextmanager
def open_frame(frame: memoryview, *, size: int, where: str) -> Iterator[Callable[[int], bytes]]:
    """Read a frame of ``size`` bytes piece by piece; whoever leaves early checks nothing.

    The function that is given returns exactly as many bytes as it is asked for.

    Raises:
        ParseError: another size, damage, or bytes after the frame.
    """
    _check_declared(frame, size=size, where=where)
    zstd = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).decompressobj()
    left = bytearray()
    fed = 0

    def feed() -> None:
        nonlocal fed
        piece = frame[fed : fed + _FEED_BYTES]
        if zstd.eof or not piece:
            raise ParseError(ParseReason.TRUNCATED, where, "the frame ends early")
        fed += len(piece)
        try:
            left.extend(zstd.decompress(piece))
        except zstandard.ZstdError as exc:
            raise ParseError(ParseReason.INCONSISTENT, where, "damaged zstd frame") from exc

    def read(wanted: int) -> bytes:
        while len(left) < wanted:
            feed()
        found = bytes(left[:wanted])
        del left[:wanted]
        return found

    yield read
    while not zstd.eof and not left:
        feed()
    if left or zstd.unused_data or fed < len(frame):
        raise ParseError(ParseReason.TRAILING_BYTES, where, "more than the tensor")


_FEED_BYTES: Final = 512
"""A block of zstd takes 4 bytes and becomes 128 KiB at most: a bomb expands to 16 MiB, not more."""


def _check_declared(frame: memoryview, *, size: int, where: str) -> None:
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as exc:
        raise ParseError(ParseReason.INCONSISTENT, where, "not a zstd frame") from exc
    if declared != size:
        raise ParseError(ParseReason.INCONSISTENT, where, f"declares {declared}, wanted {size}")


class Cursor:
    """Reads a payload from front to back; every length is checked before it is used."""

    def __init__(self, data: memoryview, *, where: str) -> None:
        self._data = data
        self._offset = 0
        self.where = where

    def take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes, without copying. Raises ParseError."""
        left = len(self._data) - self._offset
        if size > left:
            raise ParseError(ParseReason.TRUNCATED, self.where, f"{left} bytes left of {size}")
        found = self._data[self._offset : self._offset + size]
        self._offset += size
        return found

    def take_u32(self) -> int:
        """Return the next little-endian 32-bit number."""
        value: int = _U32.unpack(self.take(_U32.size))[0]
        return value

    def take_rest(self) -> memoryview:
        """Return everything that is left."""
        return self.take(len(self._data) - self._offset)

    def expect_end(self) -> None:
        """Refuse bytes that nobody asked for."""
        left = len(self._data) - self._offset
        if left:
            raise ParseError(ParseReason.TRAILING_BYTES, self.where, f"{left} bytes")


def render_u32(*values: int) -> bytes:
    """Return the numbers as little-endian 32-bit words."""
    return b"".join(_U32.pack(value) for value in values)
