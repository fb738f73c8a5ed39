"""What a payload is fetched in: ranges that can each be proven alone. No I/O."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import xxhash

from paceline.refit.errors import VerifyError
from paceline.refit.manifest.payload import verify_chunk
from paceline.refit.manifest.v1 import Manifest, PayloadObject, Segment
from paceline.refit.model import ObjectRange, TensorEntry


class Proof(Protocol):
    """The bytes of one piece, hashed as they come."""

    def update(self, data: memoryview, /) -> None:
        """Take the next bytes, in their order."""
        ...

    def finish(self) -> None:
        """Raise VerifyError for other bytes than the piece has."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A range of an object, and the proof of its bytes."""

    wanted: ObjectRange
    check: Callable[[memoryview], None]
    """Raises VerifyError for other bytes."""
    begin: Callable[[], Proof] | None = None
    """Proves the same little by little; None where the hash is so slow that it belongs elsewhere
    than between two reads."""
    keep: Callable[[memoryview], None] | None = None
    """Puts proven bytes where they wait; None leaves them where they are. Raises NoRoomError."""


Target = tuple[Piece, memoryview]
"""A piece, and where its bytes arrive."""


def pieces_of(manifest: Manifest, *, by_content: bool) -> Iterator[Piece]:
    """Yield pieces that together are every object, in the order of their bytes.

    Args:
        manifest: what is to be fetched.
        by_content: prove full tensors by their content digests, at memory speed, instead of
            chunks by SHA-256: right against accidents, for sources inside one trusted network.
    """
    for item in manifest.objects:
        yield from (
            _by_tensor(item, manifest) if by_content and manifest.is_full else _by_chunk(item)
        )


def chunk_pieces(manifest: Manifest, wanted: Mapping[str, frozenset[int]]) -> Iterator[Piece]:
    """Yield some chunks of some objects, in the order of their bytes."""
    for item in manifest.objects:
        some = wanted.get(item.object_id, frozenset())
        yield from (piece for index, piece in enumerate(_by_chunk(item)) if index in some)


def windows_of(pieces: Sequence[Piece], *, bytes_max: int) -> Iterator[Sequence[Piece]]:
    """Cut pieces into windows of at most so many bytes, or of one piece if it is larger."""
    window: list[Piece] = []
    size = 0
    for piece in pieces:
        if window and size + piece.wanted.size > bytes_max:
            yield window
            window, size = [], 0
        window.append(piece)
        size += piece.wanted.size
    if window:
        yield window


def _by_chunk(item: PayloadObject) -> Iterator[Piece]:
    for index, offset in enumerate(range(0, item.num_bytes, item.chunk_bytes)):
        size = min(item.chunk_bytes, item.num_bytes - offset)
        wanted = ObjectRange(object_id=item.object_id, offset=offset, size=size)
        yield Piece(wanted=wanted, check=partial(verify_chunk, item, index))


def _by_tensor(item: PayloadObject, manifest: Manifest) -> Iterator[Piece]:
    """Yield one piece per tensor, and what lies between them: header and padding mean nothing."""
    entries = {entry.name: entry for entry in manifest.tensors}
    segments = [segment for segment in manifest.segments if segment.object_id == item.object_id]
    end = 0
    for segment in sorted(segments, key=lambda each: (each.offset, each.num_bytes)):
        if segment.offset > end:
            yield _between(item, end, segment.offset)
        yield _tensor(segment, entries[segment.tensor])
        end = segment.offset + segment.num_bytes
    if end < item.num_bytes:
        yield _between(item, end, item.num_bytes)


def _tensor(segment: Segment, entry: TensorEntry) -> Piece:
    def check(data: memoryview) -> None:
        proof = _TensorProof(entry)
        proof.update(data)
        proof.finish()

    wanted = ObjectRange(object_id=segment.object_id, offset=segment.offset, size=segment.num_bytes)
    return Piece(wanted=wanted, check=check, begin=partial(_TensorProof, entry))


class _TensorProof:
    """Signs Proof, by the content digest."""

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry
        self._hasher = xxhash.xxh3_128()
        self.update = self._hasher.update

    def finish(self) -> None:
        entry, found = self._entry, self._hasher.hexdigest()
        if found != entry.digest:
            raise VerifyError(f"tensor {entry.name!r} has digest {found} instead of {entry.digest}")


def _between(item: PayloadObject, start: int, stop: int) -> Piece:
    wanted = ObjectRange(object_id=item.object_id, offset=start, size=stop - start)
    return Piece(wanted=wanted, check=lambda data: None, begin=_NoProof)


class _NoProof:
    """Signs Proof, for bytes that mean nothing."""

    def update(self, data: memoryview, /) -> None:
        pass

    def finish(self) -> None:
        pass
