"""One tensor's change <-> payload bytes; the scheme is the smallest of those worth measuring.

``docs/formats/delta-v1.md`` is the specification. Encoders of GAP and DENSE write one record
per block of 16 MiB of the tensor, so that neither side holds more than a block beside its
result, and threads can share a tensor.
"""

from dataclasses import dataclass

import numpy as np

from paceline.refit.delta import dense, gap
from paceline.refit.delta.change import Buffer, Change, Words, as_words, blocks
from paceline.refit.delta.order import WordKind, kind_of
from paceline.refit.delta.stream import Cursor, new_compressor
from paceline.refit.errors import ParseError, ParseReason
from paceline.refit.manifest.v1 import Scheme

_GOOD = 4
"""DENSE costs a pass over the whole tensor; it is not tried once GAP is this many times smaller."""
_SMALL_BYTES = 2**16
"""Tensors up to this size are measured every way; that costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTensor:
    """One changed tensor on its way into a payload object."""

    scheme: Scheme
    data: Buffer
    changed_elements: int


def encode_tensor(base: Buffer, new: Buffer, *, dtype: str) -> EncodedTensor | None:
    """Encode what turns ``base`` into ``new``, or return None if they are equal.

    RAW data is ``new`` itself, not a copy.

    Raises:
        ValueError: the sizes differ, or the dtype is unknown.
    """
    kind = kind_of(dtype)
    old, now = as_words(base, kind.width), as_words(new, kind.width)
    if len(old) != len(now):
        raise ValueError(f"{len(old)} elements against {len(now)}: a delta keeps the size")
    sparse, changed = _encode_gap(old, now, kind)
    if not changed:
        return None
    found = [EncodedTensor(scheme=Scheme.RAW, data=new, changed_elements=changed)]
    if sparse is not None:
        found.append(EncodedTensor(scheme=Scheme.GAP, data=sparse, changed_elements=changed))
    if sparse is None or len(sparse) * _GOOD > now.nbytes or now.nbytes <= _SMALL_BYTES:
        data = _encode_dense(old, now, kind)
        found.append(EncodedTensor(scheme=Scheme.DENSE, data=data, changed_elements=changed))
    return min(found, key=lambda item: len(item.data))


def decode_tensor(
    data: memoryview, *, scheme: Scheme, base: Buffer, dtype: str
) -> Change | memoryview:
    """Return the change against ``base`` (GAP) or the tensor's new bytes (RAW, DENSE).

    Memory beside the result is a block. The size of the result is that of ``base``, whatever
    the payload says. That the result is the right one is for the caller's digest to say.

    Raises:
        ParseError: the payload breaks its format.
    """
    kind = kind_of(dtype)
    old = as_words(base, kind.width)
    if scheme is Scheme.GAP:
        return _decode_gap(data, old, kind)
    if scheme is Scheme.DENSE:
        return _decode_dense(data, old, kind)
    if len(data) != old.nbytes:
        reason = ParseReason.TRUNCATED if len(data) < old.nbytes else ParseReason.TRAILING_BYTES
        raise ParseError(reason, "payload", f"{len(data)} bytes, wanted {old.nbytes}")
    return data


def _encode_gap(old: Words, new: Words, kind: WordKind) -> tuple[bytes | None, int]:
    """Return the GAP form, or None once it is larger than the tensor so far, and the count."""
    zstd, records, written, changed = new_compressor(), [], 0, 0
    worth_it = True
    for part in blocks(len(old), kind.width):
        found = np.flatnonzero(old[part] != new[part])
        changed += len(found)
        if worth_it:
            record = gap.encode_block(old[part], new[part], found, kind=kind, zstd=zstd)
            records.append(record)
            written += len(record)
            worth_it = written <= part.stop * kind.width
    return (b"".join(records) if worth_it else None), changed


def _encode_dense(old: Words, new: Words, kind: WordKind) -> bytes:
    """Measure both planes on the first block and go on with the smaller."""
    zstd, records = new_compressor(), []
    tags = list(dense.Dense)
    for part in blocks(len(old), kind.width):
        tried = {
            tag: dense.encode_block(old[part], new[part], tag=tag, kind=kind, zstd=zstd)
            for tag in tags
        }
        best = min(tried, key=lambda tag: len(tried[tag]))
        records.append(tried[best])
        tags = [best]
    return b"".join(records)


def _decode_gap(data: memoryview, old: Words, kind: WordKind) -> Change:
    cursor = Cursor(data, where="payload.gap")
    positions, words = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=old.dtype)]
    for part in blocks(len(old), kind.width):
        change = gap.decode_block(cursor, old[part], kind=kind)
        positions.append(change.positions + part.start)
        words.append(change.xor)
    cursor.expect_end()
    return Change(positions=np.concatenate(positions), xor=np.concatenate(words))


def _decode_dense(data: memoryview, old: Words, kind: WordKind) -> memoryview:
    cursor = Cursor(data, where="payload.dense")
    new = np.empty(len(old), dtype=old.dtype)
    for part in blocks(len(old), kind.width):
        new[part] = dense.decode_block(cursor, old[part], kind=kind)
    cursor.expect_end()
    return new.data.cast("B")
