"""Identity of weights: a content digest per tensor, one root digest over all of them."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import pairwise

import xxhash

from paceline.refit.model import TensorEntry

_ROOT_DOMAIN = b"paceline.root.v1\n"
_SLOTS_DOMAIN = b"paceline.root.slots.v1\n"


def content_digest(data: bytes | bytearray | memoryview) -> str:
    """Return XXH3-128 of a tensor's row-major little-endian bytes, as 32 hex digits.

    It proves content against accidents, at memory speed. Against an adversary the chunk hashes
    and the manifest digest stand, which are SHA-256.
    """
    return xxhash.xxh3_128_hexdigest(data)


def root_digest(entries: Iterable[TensorEntry]) -> str:
    """Return SHA-256 hex over name, dtype, shape and content digest of every tensor.

    The order of ``entries`` does not matter. The encoding is ASCII JSON without spaces, sorted
    by name, behind a domain word, so that no two sets of tensors share one. A part of a tensor
    also says which part it is.

    Raises:
        ValueError: two entries have one name.
    """
    ordered = sorted(entries, key=lambda entry: entry.name)
    for before, after in pairwise(ordered):
        if before.name == after.name:
            raise ValueError(f"tensor {after.name!r} is listed twice")
    return _sha256_of(_ROOT_DOMAIN, [_row(entry) for entry in ordered])


def version_root(roots: Mapping[str, str]) -> str:
    """Return the root digest of a version from those of its slots, by slot.

    With one slot it is that slot's. With several, SHA-256 hex over ``[[slot, root], ...]`` sorted
    by slot, so that everybody who knows the parts can say it and nobody needs the whole weights.

    Raises:
        ValueError: there are none.
    """
    if not roots:
        raise ValueError("a version has at least one slot")
    if len(roots) == 1:
        return next(iter(roots.values()))
    return _sha256_of(_SLOTS_DOMAIN, [list(pair) for pair in sorted(roots.items())])


def _row(entry: TensorEntry) -> list[object]:
    row: list[object] = [entry.name, entry.dtype, list(entry.shape), entry.digest]
    if entry.region is not None:
        row += [list(entry.region.global_shape), list(entry.region.offsets)]
    return row


def _sha256_of(domain: bytes, rows: list[list[object]] | list[list[str]]) -> str:
    text = json.dumps(rows, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(domain + text.encode("ascii")).hexdigest()
