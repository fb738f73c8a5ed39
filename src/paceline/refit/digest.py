"""Identity of weights: a content digest per tensor, one root digest over all of them."""

import hashlib
import json
from collections.abc import Iterable
from itertools import pairwise

import xxhash

from paceline.refit.model import TensorEntry

_ROOT_DOMAIN = b"paceline.root.v1\n"


def content_digest(data: bytes | bytearray | memoryview) -> str:
    """Return XXH3-128 of a tensor's row-major little-endian bytes, as 32 hex digits.

    It proves content against accidents, at memory speed. Against an adversary the chunk hashes
    and the manifest digest stand, which are SHA-256.
    """
    return xxhash.xxh3_128_hexdigest(data)


def root_digest(entries: Iterable[TensorEntry]) -> str:
    """Return SHA-256 hex over name, dtype, shape and content digest of every tensor.

    The order of ``entries`` does not matter. The encoding is ASCII JSON without spaces, sorted
    by name, behind a domain word, so that no two sets of tensors share one.

    Raises:
        ValueError: two entries have one name.
    """
    ordered = sorted(entries, key=lambda entry: entry.name)
    for before, after in pairwise(ordered):
        if before.name == after.name:
            raise ValueError(f"tensor {after.name!r} is listed twice")
    rows = [[entry.name, entry.dtype, list(entry.shape), entry.digest] for entry in ordered]
    text = json.dumps(rows, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(_ROOT_DOMAIN + text.encode("ascii")).hexdigest()
