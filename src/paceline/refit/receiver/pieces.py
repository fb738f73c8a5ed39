"""What a payload is fetched in: ranges that can each be proven alone. No I/O."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

import xxhash

from paceline.refit.errors import VerifyError
from paceline.refit.manifest.payload import expect_chunk
from paceline.refit.manifest.v1 import Manifest, PayloadObject, Segment
from paceline.refit.model import ObjectRange, TensorEntry


class Hasher(Protocol):
    """What ``hashlib`` and ``xxhash`` make."""

    def update(self, data: memoryview, /) -> None:
        """Take the next bytes, in their order."""
        ...

    def hexdigest(self) -> str:
        """Return the hash of what was taken."""
        ...

    def copy(self) -> Self:
        """Return one that has taken the same."""
        ...


class Proof:
    """The bytes of one piece, hashed as they come."""

    def __init__(self, hasher: Hasher, judge: Callable[[str], None]) -> None:
        """``judge`` raises VerifyError for the hash of other bytes than the piece has."""
        self._hasher = hasher
        self._judge = judge
        self.update = hasher.update

    def fork(self) -> "Proof":
        """Return one that goes on from here by itself."""
        return Proof(self._hasher.copy(), self._judge)

    def told(self, judge: Callable[[str], None]) -> "Proof":
        """Return this one under another judge."""
        return Proof(self._hasher, judge)

    def finish(self) -> None:
        """Raise VerifyError for other bytes than the piece has."""
        self._judge(self._hasher.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A range of an object, and the proof of its bytes."""

    wanted: ObjectRange
    begin: Callable[[], Proof]
    keep: Callable[[int, memoryview], None] | None = None
    """Puts proven bytes where they wait, by their place in the object; None leaves them where they
    are. Raises NoRoomError."""

    def settle(self, data: memoryview) -> None:
        """Prove bytes that have come, and keep them. Raises VerifyError, NoRoomError."""
        proof = self.begin()
        proof.update(data)
        proof.finish()
        if self.keep is not None:
            self.keep(self.wanted.offset, data)


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


class Stretches:
    """A piece that is larger than a window, window by window, and proven at its end.

    All of them come from one source: it is known then who is to blame.
    """

    def __init__(self, piece: Piece, size: int) -> None:
        self._piece = piece
        self._size = size
        self._so_far = piece.begin()

    def __iter__(self) -> Iterator[Piece]:
        """Yield the stretches; each is read and finished before the next."""
        whole = self._piece.wanted
        for start in range(0, whole.size, self._size):
            wanted = replace(
                whole,
                offset=whole.offset + start,
                size=min(self._size, whole.size - start),
            )
            yield replace(self._piece, wanted=wanted, begin=self._begin)

    def finish(self) -> None:
        """Raise VerifyError for other bytes than the piece has."""
        self._so_far.finish()

    def _begin(self) -> Proof:
        proof = self._so_far.fork()

        def go_on(_: str) -> None:
            self._so_far = proof

        return proof.told(go_on)


def _by_chunk(item: PayloadObject) -> Iterator[Piece]:
    for index, offset in enumerate(range(0, item.num_bytes, item.chunk_bytes)):
        size = min(item.chunk_bytes, item.num_bytes - offset)
        yield Piece(
            wanted=ObjectRange(object_id=item.object_id, offset=offset, size=size),
            begin=partial(_chunk_proof, item, index),
        )


def _chunk_proof(item: PayloadObject, index: int) -> Proof:
    return Proof(hashlib.sha256(), partial(expect_chunk, item, index))


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
    wanted = ObjectRange(object_id=segment.object_id, offset=segment.offset, size=segment.num_bytes)
    return Piece(wanted=wanted, begin=partial(_tensor_proof, entry))


def _tensor_proof(entry: TensorEntry) -> Proof:
    def judge(found: str) -> None:
        if found != entry.digest:
            raise VerifyError(f"tensor {entry.name!r} has digest {found} instead of {entry.digest}")

    return Proof(xxhash.xxh3_128(), judge)


def _between(item: PayloadObject, start: int, stop: int) -> Piece:
    wanted = ObjectRange(object_id=item.object_id, offset=start, size=stop - start)
    return Piece(wanted=wanted, begin=_no_proof)


def _no_proof() -> Proof:
    """Return what takes any bytes: these mean nothing."""
    return Proof(_NoHash(), lambda found: None)


class _NoHash:
    """Signs Hasher."""

    def update(self, data: memoryview, /) -> None:
        pass

    def hexdigest(self) -> str:
        return ""

    def copy(self) -> Self:
        return self
