"""Payload objects: their header, their chunk hashes, and the proof that bytes are an object."""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from paceline.refit.errors import ParseError, ParseReason, VerifyError
from paceline.refit.manifest.v1 import PayloadObject
from paceline.refit.model import WeightPayloadFormat

RunHashes: TypeAlias = Callable[
    [Callable[[list[memoryview]], str], Iterable[list[memoryview]]], Iterable[str]
]

HEADER_BYTES = 64
ALIGNMENT = 64
"""Offsets of full tensors inside an object, so that they can be used where they lie."""
CHUNK_BYTES = 4 * 2**20
"""What a publisher uses at most: small enough to retry cheaply, large enough for few hashes."""
CHUNK_BYTES_MIN = 512 * 2**10
CHUNKS_WANTED = 32

_MAGIC = b"PACELINE"
_SCHEMA = 1
_KINDS = {WeightPayloadFormat.FULL_TENSOR: 0, WeightPayloadFormat.XOR_DELTA: 1}
_HEADER = struct.Struct("<8sHH")


def chunk_bytes_for(num_bytes: int) -> int:
    """Return the chunk size of a payload of so many bytes.

    Receivers serve each other by chunks, so a small payload has small ones: there must be enough
    for all of them to be useful to each other, and few enough not to be all overhead.
    """
    wanted = -(-num_bytes // CHUNKS_WANTED)
    rounded = -(-wanted // CHUNK_BYTES_MIN) * CHUNK_BYTES_MIN
    return min(CHUNK_BYTES, max(CHUNK_BYTES_MIN, rounded))


def render_header(payload_format: WeightPayloadFormat) -> bytes:
    """Return the 64 bytes that every payload object starts with."""
    head = _HEADER.pack(_MAGIC, _SCHEMA, _KINDS[payload_format])
    return head.ljust(HEADER_BYTES, b"\0")


def check_header(data: memoryview, payload_format: WeightPayloadFormat) -> None:
    """Refuse an object that is not of this schema and payload format. Raises ParseError.

    Files of a checkpoint have a header of their own, which nobody here needs: segments say where
    the tensors are.
    """
    if payload_format is WeightPayloadFormat.FULL_HF_CHECKPOINT:
        return
    where = "payload.header"
    if len(data) < HEADER_BYTES:
        raise ParseError(ParseReason.TRUNCATED, where, f"{len(data)} bytes")
    magic, schema, kind = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ParseError(ParseReason.BAD_MAGIC, where)
    if schema != _SCHEMA:
        raise ParseError(ParseReason.UNKNOWN_SCHEMA, where, f"schema {schema}")
    if kind != _KINDS[payload_format]:
        raise ParseError(ParseReason.INCONSISTENT, where, f"kind {kind} in {payload_format.value}")
    if any(data[_HEADER.size : HEADER_BYTES]):
        raise ParseError(ParseReason.NOT_CANONICAL, where, "reserved bytes are not zero")


def describe_object(
    parts: Sequence[memoryview], *, chunk_bytes: int | None = None, run: RunHashes = map
) -> PayloadObject:
    """Hash the concatenation of ``parts`` chunk by chunk, without joining them.

    ``run`` is ``map``, or what shares the chunks among threads.
    """
    num_bytes = sum(part.nbytes for part in parts)
    chunk_bytes = chunk_bytes or chunk_bytes_for(num_bytes)
    hashes = tuple(run(_hash_chunk, _cut(parts, chunk_bytes)))
    return PayloadObject(
        object_id=object_id_of(hashes),
        num_bytes=num_bytes,
        chunk_bytes=chunk_bytes,
        chunk_sha256=hashes,
    )


def object_id_of(chunk_sha256: Sequence[str]) -> str:
    """Return the id that proves these chunk hashes: SHA-256 over their binary forms in order."""
    return hashlib.sha256(b"".join(bytes.fromhex(text) for text in chunk_sha256)).hexdigest()


def verify_chunk(item: PayloadObject, index: int, data: memoryview) -> None:
    """Refuse bytes that are not chunk ``index`` of the object. Raises VerifyError."""
    expect_chunk(item, index, hashlib.sha256(data).hexdigest())


def expect_chunk(item: PayloadObject, index: int, sha256: str) -> None:
    """Refuse a hash that is not that of chunk ``index`` of the object. Raises VerifyError."""
    if sha256 != item.chunk_sha256[index]:
        raise VerifyError(
            f"object {item.object_id[:12]}: chunk {index} does not have its hash; "
            "fetch it again from another source"
        )


def verify_object(item: PayloadObject, data: memoryview) -> None:
    """Refuse bytes that are not the whole object. Raises VerifyError."""
    if data.nbytes != item.num_bytes:
        raise VerifyError(
            f"object {item.object_id[:12]}: {data.nbytes} bytes instead of {item.num_bytes}"
        )
    edges = [*range(0, item.num_bytes, item.chunk_bytes), item.num_bytes]
    for index, (start, stop) in enumerate(pairwise(edges)):
        verify_chunk(item, index, data[start:stop])


def _cut(parts: Sequence[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """Yield what each chunk is made of."""
    found: list[memoryview] = []
    room = chunk_bytes
    for part in parts:
        flat, start = part.cast("B"), 0
        while start < len(flat):
            piece = flat[start : start + room]
            found.append(piece)
            start += len(piece)
            room -= len(piece)
            if not room:
                yield found
                found, room = [], chunk_bytes
    if found:
        yield found


def _hash_chunk(pieces: Iterable[memoryview]) -> str:
    hasher = hashlib.sha256()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()
