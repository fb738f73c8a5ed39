"""What a file of weights was before a version is written into it, kept until that is done.

Order of events: every chunk that will be overwritten is kept and made safe, the journal is sealed
and that is made safe, then the first word is written; the weights are made safe, then the journal
goes. So whenever the process or the machine dies, either there is no sealed journal and the weights
are untouched, or there is one and ``recover`` puts the old words back, as often as it takes.

File: 16 bytes of magic and schema, then records, then one empty record, the seal. Record: u32
length of the name, u64 first element of the chunk, u8 width, u64 gap bytes, u64 bytes of words, u64
XXH3-64 of the words between those that are kept (0 where all are), u64 XXH3-64 of all else in the
record, then name, gaps (as in ``delta.steps``; none: every word from the first element on), words.
"""

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import numpy as np
import xxhash

from paceline.refit.delta.order import WIDTHS, Positions, Words, as_words, kind_of
from paceline.refit.delta.steps import Steps, positions_of
from paceline.refit.errors import ApplyError, ParseError, ParseReason, UncertainStateError
from paceline.refit.model import TensorBuffer

_MAGIC: Final = b"PACELINE-UNDO\0\0\2"
_HEAD: Final = struct.Struct("<IQBQQQQ")
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

    def __init__(
        self, path: Path, *, live: Mapping[str, TensorBuffer], flush: Callable[[], None]
    ) -> None:
        """Start a journal.

        Args:
            path: must not exist: a journal that is there has to be recovered from first.
            live: the weights, as they are before the first write.
            flush: returns once everything written into the weights is safe.

        Raises:
            FileExistsError: see ``path``.
            ApplyError: there can be no file; nothing was written.
        """
        self._path = path
        self._live = live
        self._flush = flush
        self._is_sealed = False
        try:
            self._file = path.open("xb")
        except FileExistsError:
            raise
        except OSError as exc:
            raise ApplyError(
                f"no journal can be kept in {path.parent} ({exc}); make room or let us write there"
            ) from exc
        self._file.write(_MAGIC)

    def keep(self, name: str, start: int, steps: Steps | None, old: Words) -> None:
        """Keep the words of one chunk: those at the steps, or all from ``start`` on."""
        gaps = b"" if steps is None else steps.gaps.tobytes()
        record = _Record(name=name, start=start, gaps=gaps, words=old, between=0)
        between = _between(record, self._live[name]) if gaps else 0
        self._file.write(_render(record, between))

    def seal(self) -> None:
        """Make what is kept safe, then the seal: whoever finds a seal finds all before it."""
        self._sync()
        self._file.write(_SEAL)
        self._sync()
        self._file.close()
        _sync_folder(self._path)
        self._is_sealed = True

    def finish(self) -> None:
        """Make the weights safe and drop the journal. Before the seal, no word was written.

        Raises:
            UncertainStateError: the disk refuses; the journal stays.
        """
        with suppress(OSError):  # of a full disk: what it holds is not wanted any more
            self._file.close()
        with _refusals(self._path):
            if self._is_sealed:
                self._flush()
            self._path.unlink(missing_ok=True)
            _sync_folder(self._path)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def recover(path: Path, live: Mapping[str, TensorBuffer], *, flush: Callable[[], None]) -> bool:
    """Put back what a crashed install has overwritten; say whether there was anything.

    Call it before the weights are used. Afterwards they are what they were before that install.

    Raises:
        UncertainStateError: the journal is of other weights, damaged after it was sealed, or of
            another schema; nothing was written, and it stays.
    """
    if not path.exists():
        return False
    with _refusals(path):
        is_sealed = _is_sealed(path)
        if is_sealed:
            for record in _records(path):
                _check_fits(live, record)
            for record in _records(path):
                here = as_words(live[record.name].data, record.words.itemsize)
                here[record.places] = record.words
            flush()
        path.unlink()
        _sync_folder(path)
    return is_sealed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Record:
    """The words of one chunk before they were overwritten."""

    name: str
    start: int
    gaps: bytes
    words: Words
    between: int
    """Of the words that stay, up to the last one that does not; it is known to be the same file."""

    @property
    def places(self) -> slice | Positions:
        """Where the words belong in their tensor."""
        if not self.gaps:
            return slice(self.start, self.start + len(self.words))
        return self.start + positions_of(np.frombuffer(self.gaps, dtype=np.uint8))


def _render(record: _Record, between: int) -> bytes:
    name, data = record.name.encode(), record.words.tobytes()
    body = b"".join((name, record.gaps, data))
    sizes = (len(name), record.start, record.words.itemsize, len(record.gaps), len(data), between)
    digest = xxhash.xxh3_64_intdigest(_HEAD.pack(*sizes, 0) + body)
    return _HEAD.pack(*sizes, digest) + body


_SEAL: Final = _render(
    _Record(name="", start=0, gaps=b"", words=np.empty(0, dtype=np.uint8), between=0), 0
)


def _is_sealed(path: Path) -> bool:
    """Say whether the journal was whole. Raises UncertainStateError if nobody can know."""
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
        file.seek(max(0, path.stat().st_size - len(_SEAL)))
        end = file.read()
    if magic != _MAGIC and (len(magic) == len(_MAGIC) and any(magic)):
        raise UncertainStateError(
            f"{path} is no journal of this release; apply with the release that wrote it, or "
            "put the weights there anew and delete it"
        )
    return magic == _MAGIC and end == _SEAL


def _records(path: Path) -> Iterator[_Record]:
    """Yield the records of a sealed journal. Raises UncertainStateError if it was damaged since."""
    try:
        with path.open("rb") as file:
            file.seek(len(_MAGIC))
            yield from _parsed(file, path.stat().st_size)
    except ParseError as exc:
        raise UncertainStateError(
            f"{path} was damaged after the crash ({exc}): the weights are partly new; put them "
            "there anew and delete it"
        ) from exc


def _parsed(file: BinaryIO, size: int) -> Iterator[_Record]:
    where = "journal"
    while True:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise ParseError(ParseReason.TRUNCATED, where)
        name_bytes, start, width, gap_bytes, word_bytes, between, digest = _HEAD.unpack(head)
        length = name_bytes + gap_bytes + word_bytes
        if name_bytes > _NAME_BYTES_MAX or length > size or width not in WIDTHS:
            raise ParseError(ParseReason.OUT_OF_RANGE, where)
        body = file.read(length)
        if xxhash.xxh3_64_intdigest(head[:-8] + bytes(8) + body) != digest:
            raise ParseError(ParseReason.DIGEST_MISMATCH, where)
        if not length:
            return
        gaps = body[name_bytes : name_bytes + gap_bytes]
        words = np.frombuffer(body[name_bytes + gap_bytes :], dtype=f"<u{width}")
        name = body[:name_bytes].decode()
        yield _Record(name=name, start=start, gaps=gaps, words=words, between=between)


def _check_fits(live: Mapping[str, TensorBuffer], record: _Record) -> None:
    here, name = live.get(record.name), record.name
    if here is None or kind_of(here.dtype).width != record.words.itemsize:
        raise UncertainStateError(f"the journal has {name!r}, the weights do not, or otherwise")
    places = record.places
    last = places.stop if isinstance(places, slice) else int(places[-1]) + 1
    if last * record.words.itemsize > len(here.data):
        raise UncertainStateError(f"the journal reaches past the end of {name!r}")
    if record.gaps and _between(record, here) != record.between:
        raise UncertainStateError(
            f"{name!r} is not the tensor that the journal was kept for; if the weights were put "
            "there anew, delete the journal"
        )


def _between(record: _Record, here: TensorBuffer) -> int:
    """Return the digest of what stays between the first word of the chunk and its last change."""
    places = record.places
    assert not isinstance(places, slice)  # noqa: S101 - asked for only where some words stay
    words = as_words(here.data, record.words.itemsize)[record.start : int(places[-1]) + 1].copy()
    words[places - record.start] = 0
    return xxhash.xxh3_64_intdigest(words.data)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Make ours what the disk refuses while the weights may be anything."""
    try:
        yield
    except OSError as exc:
        raise UncertainStateError(
            f"the weights beside {path} cannot be made safe ({exc}): apply a version again once "
            "the disk works"
        ) from exc


def _sync_folder(path: Path) -> None:
    """Make a name that came or went safe."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
