"""What a file of weights was before a version is written into it, kept until that is done.

Order of events: every chunk that will be overwritten is kept, the journal is made safe, then the
first word is written; the weights are made safe, then the journal goes. So whenever the process
or the machine dies, either there is no complete journal and the weights are untouched, or there
is one and ``recover`` puts the old words back, as often as it takes.

File: 16 bytes of magic and schema, then records, then one empty record. Record: u32 length of the
name, u64 first element of the chunk, u8 width, u64 gap bytes, u64 bytes of words, u64 XXH3-64 of
all else in the record, then name, gaps (as in ``delta.steps``; none: every word from the first
element on), words. The empty record says that the journal is complete.
"""

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import numpy as np
import xxhash

from paceline.refit.delta.order import WIDTHS, Words, as_words, kind_of
from paceline.refit.delta.steps import Steps, positions_of
from paceline.refit.errors import ParseError, ParseReason, UncertainStateError
from paceline.refit.model import TensorBuffer

_MAGIC: Final = b"PACELINE-UNDO\0\0\1"
_HEAD: Final = struct.Struct("<IQBQQQ")
_NAME_BYTES_MAX: Final = 2**16


class Journal(Protocol):
    """Keeps what is going to be overwritten where a crash cannot reach it."""

    def keep(self, name: str, start: int, steps: Steps | None, old: Words) -> None:
        """Keep the words of one chunk: those at the steps, or all from ``start`` on."""

    def seal(self) -> None:
        """Return once everything kept is safe; only then the first word is written."""

    def finish(self) -> None:
        """Return once the weights themselves are safe and the journal is gone."""


class FileJournal:
    """A journal in one file beside the weights; it exists while they are being written."""

    def __init__(self, path: Path, *, flush: Callable[[], None]) -> None:
        """Start a journal.

        Args:
            path: must not exist: a journal that is there has to be recovered from first.
            flush: returns once everything written into the weights is safe.

        Raises:
            FileExistsError: see ``path``.
        """
        self._path = path
        self._flush = flush
        self._file = path.open("xb")
        self._file.write(_MAGIC)

    def keep(self, name: str, start: int, steps: Steps | None, old: Words) -> None:
        """Keep the words of one chunk: those at the steps, or all from ``start`` on."""
        gaps = b"" if steps is None else steps.gaps.tobytes()
        self._file.write(_record(name.encode(), start, gaps, old))

    def seal(self) -> None:
        """Make the journal safe."""
        self._file.write(_record(b"", 0, b"", np.empty(0, dtype=np.uint8)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        _sync_folder(self._path)

    def finish(self) -> None:
        """Make the weights safe and drop the journal."""
        self._flush()
        self._file.close()
        self._path.unlink()
        _sync_folder(self._path)


def recover(path: Path, live: Mapping[str, TensorBuffer], *, flush: Callable[[], None]) -> bool:
    """Put back what a crashed install has overwritten; say whether there was anything.

    Call it before the weights are used. Afterwards they are what they were before that install.

    Raises:
        UncertainStateError: the journal is of other tensors; nothing was written.
    """
    if not path.exists():
        return False
    is_complete = True
    with path.open("rb") as file:
        try:
            records = list(_records(file, path.stat().st_size))
        except ParseError:
            is_complete = False  # died before it was sealed: no word has been written yet
    if is_complete:
        for name, start, gaps, words in records:
            _check_fits(live, name, start, gaps, words)
        for name, start, gaps, words in records:
            _put_back(live[name], start, gaps, words)
        flush()
    path.unlink()
    _sync_folder(path)
    return is_complete


def _record(name: bytes, start: int, gaps: bytes, words: Words) -> bytes:
    data = words.tobytes()
    body = b"".join((name, gaps, data))
    sizes = (len(name), start, words.itemsize, len(gaps), len(data))
    digest = xxhash.xxh3_64_intdigest(_HEAD.pack(*sizes, 0) + body)
    return _HEAD.pack(*sizes, digest) + body


def _records(file: BinaryIO, size: int) -> Iterator[tuple[str, int, bytes, Words]]:
    """Yield the records of a complete journal. Raises ParseError if it is not one."""
    where = "journal"
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ParseError(ParseReason.BAD_MAGIC, where)
    while True:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise ParseError(ParseReason.TRUNCATED, where)
        name_bytes, start, width, gap_bytes, word_bytes, digest = _HEAD.unpack(head)
        length = name_bytes + gap_bytes + word_bytes
        if name_bytes > _NAME_BYTES_MAX or length > size or width not in WIDTHS:
            raise ParseError(ParseReason.OUT_OF_RANGE, where)
        body = file.read(length)
        plain = _HEAD.pack(name_bytes, start, width, gap_bytes, word_bytes, 0)
        if xxhash.xxh3_64_intdigest(plain + body) != digest:
            raise ParseError(ParseReason.DIGEST_MISMATCH, where)
        if not length:
            return
        gaps = body[name_bytes : name_bytes + gap_bytes]
        words = np.frombuffer(body[name_bytes + gap_bytes :], dtype=f"<u{width}")
        yield body[:name_bytes].decode(), start, gaps, words


def _check_fits(
    live: Mapping[str, TensorBuffer], name: str, start: int, gaps: bytes, words: Words
) -> None:
    here = live.get(name)
    last = start + len(words)
    if gaps:
        last = start + int(positions_of(np.frombuffer(gaps, dtype=np.uint8))[-1]) + 1
    if here is None or kind_of(here.dtype).width != words.itemsize:
        raise UncertainStateError(f"the journal has {name!r}, the weights do not, or otherwise")
    if last * words.itemsize > len(here.data):
        raise UncertainStateError(f"the journal reaches past the end of {name!r}")


def _put_back(here: TensorBuffer, start: int, gaps: bytes, words: Words) -> None:
    live = as_words(here.data, words.itemsize)
    if not gaps:
        live[start : start + len(words)] = words
        return
    live[start + positions_of(np.frombuffer(gaps, dtype=np.uint8))] = words


def _sync_folder(path: Path) -> None:
    """Make a name that came or went safe."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
