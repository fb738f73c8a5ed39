"""Compressed streams of known length, and a reader that never reads past its bytes."""

import struct
from typing import Final

import zstandard

from paceline.refit.errors import ParseError, ParseReason

_WINDOW_BYTES_MAX: Final = 32 * 2**20
_U32: Final = struct.Struct("<I")


def new_compressor() -> zstandard.ZstdCompressor:
    """Return a zstd level 1 compressor that writes content sizes; one per thread."""
    return zstandard.ZstdCompressor(level=1, write_content_size=True)


def expand(frame: memoryview, *, size: int, where: str) -> bytes:
    """Return the ``size`` bytes that one zstd frame holds.

    The size that the frame declares is compared before anything is allocated.

    Raises:
        ParseError: another size, damage, or bytes after the frame.
    """
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as exc:
        raise ParseError(ParseReason.INCONSISTENT, where, "not a zstd frame") from exc
    if declared != size:
        raise ParseError(ParseReason.INCONSISTENT, where, f"declares {declared}, wanted {size}")
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    try:
        data = reader.decompress(
            frame, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as exc:
        raise ParseError(ParseReason.INCONSISTENT, where, "damaged zstd frame") from exc
    if len(data) != size:
        raise ParseError(ParseReason.INCONSISTENT, where, f"{len(data)} bytes, wanted {size}")
    return data


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

    def expect_end(self) -> None:
        """Refuse bytes that nobody asked for."""
        left = len(self._data) - self._offset
        if left:
            raise ParseError(ParseReason.TRAILING_BYTES, self.where, f"{left} bytes")


def render_u32(*values: int) -> bytes:
    """Return the numbers as little-endian 32-bit words."""
    return b"".join(_U32.pack(value) for value in values)
