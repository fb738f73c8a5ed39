"""Versions as stock receivers read them: checkpoints and canonical deltas beside an index object.

A full version is an ordinary Hugging Face checkpoint; a delta is the canonical format (see
``docs/formats/canonical.md``). Shards are there before the index, and the index is what a version's
URI names, so a version is visible whole or not at all. Keys are written once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from paceline.refit.delta.canonical import (
    CanonicalTensor,
    FullTensor,
    decode_canonical,
    delta_shard_name,
    encode_canonical,
    full_shard_name,
    parse_delta_index,
    parse_delta_shard,
    parse_full_index,
    parse_full_shard,
    render_delta_index,
    render_delta_shard,
    render_full_index,
    render_full_shard,
)
from paceline.refit.errors import FetchError, VerifyError
from paceline.refit.model import TensorBuffer

INDEX: Final = "model.safetensors.index.json"
INDEX_BYTES_MAX: Final = 64 * 2**20
SHARD_BYTES: Final = 256 * 2**20
"""Tensors per shard of a checkpoint, unless one alone is larger."""
_SHARD_BYTES_MAX: Final = 64 * 2**30


class Documents(Protocol):
    """Keys that are written once; a Bucket is one."""

    def put_new(self, key: str, parts: Sequence[memoryview]) -> None:
        """Write a key that never changes. Raises PublishError."""
        ...

    def read(self, key: str, *, size_max: int) -> bytes | None:
        """Return a key's bytes, None if it is not there. Raises FetchError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One tensor before and after."""

    name: str
    base: memoryview
    new: memoryview


def write_checkpoint(
    documents: Documents,
    folder: str,
    tensors: Iterable[TensorBuffer],
    *,
    beside: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a full version and return the key of its index.

    Args:
        documents: where.
        folder: of the version, without a slash at the end.
        tensors: the distinct ones; of tied tensors the one that the model saves.
        beside: further files by name, such as ``config.json``.
        shard_bytes: tensors per shard.

    Raises:
        ValueError: there are no tensors.
        PublishError: the store does not take it; the version is not visible.
    """
    shards = list(_sharded(tensors, shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards):
        name = full_shard_name(index, len(shards))
        rows = {
            item.name: FullTensor(dtype=item.dtype, shape=item.shape, data=item.data)
            for item in shard
        }
        documents.put_new(f"{folder}/{name}", [memoryview(render_full_shard(rows))])
        weight_map |= dict.fromkeys(rows, name)
        total += sum(len(item.data) for item in shard)
    for name, data in (beside or {}).items():
        documents.put_new(f"{folder}/{name}", [memoryview(data)])
    key = f"{folder}/{INDEX}"
    documents.put_new(key, [memoryview(render_full_index(weight_map, total_size=total))])
    return key


def read_checkpoint(documents: Documents, index_key: str) -> dict[str, FullTensor]:
    """Return the tensors of a full version, proven where it has checksums.

    Raises:
        FetchError: a part of it is not there.
        ParseError: it breaks its format.
    """
    weight_map = parse_full_index(_read(documents, index_key, INDEX_BYTES_MAX))
    found: dict[str, FullTensor] = {}
    for shard, names in _by_shard(weight_map).items():
        data = _read(documents, _beside(index_key, shard), _SHARD_BYTES_MAX)
        found |= parse_full_shard(memoryview(data), names)
    return found


def write_delta(
    documents: Documents,
    folder: str,
    changes: Sequence[Change],
    *,
    version: str,
    base_version: str,
    threads: int = 1,
) -> str:
    """Write what changed between two versions and return the key of the index.

    Raises:
        ValueError: a tensor changed its size, for which the format has no word.
        PublishError: the store does not take it; the version is not visible.
    """
    with ThreadPoolExecutor(threads) as pool:
        encoded = pool.map(lambda item: encode_canonical(item.base, item.new), changes)
        changed: dict[str, CanonicalTensor] = {
            item.name: found
            for item, found in zip(changes, encoded, strict=True)
            if found is not None
        }
    shard = delta_shard_name(0, 1)
    if changed:
        documents.put_new(f"{folder}/{shard}", [memoryview(render_delta_shard(changed))])
    index = render_delta_index(
        dict.fromkeys(changed, shard), version=version, base_version=base_version
    )
    key = f"{folder}/{INDEX}"
    documents.put_new(key, [memoryview(index)])
    return key


def read_delta(
    documents: Documents,
    index_key: str,
    base: Mapping[str, memoryview],
    *,
    version: str,
    base_version: str,
) -> dict[str, bytes]:
    """Return the new bytes of every tensor that a delta changes; ``base`` stays as it is.

    Raises:
        FetchError: a part of it is not there.
        ParseError: it breaks its format, or belongs to other versions or other base bytes.
        VerifyError: it changes a tensor that the base does not have.
    """
    index = _read(documents, index_key, INDEX_BYTES_MAX)
    weight_map = parse_delta_index(index, version=version, base_version=base_version)
    unknown = sorted(weight_map.keys() - base.keys())
    if unknown:
        raise VerifyError(f"{index_key} changes {unknown[:5]}, which the base does not have")
    found: dict[str, bytes] = {}
    for shard, names in _by_shard(weight_map).items():
        data = _read(documents, _beside(index_key, shard), _SHARD_BYTES_MAX)
        for name, item in parse_delta_shard(memoryview(data), names).items():
            updates = decode_canonical(item, base[name])
            found[name] = b"".join(bytes(memoryview(update.new)) for update in updates)  # type: ignore[arg-type]
    return found


def _sharded(tensors: Iterable[TensorBuffer], limit: int) -> Iterator[list[TensorBuffer]]:
    shard: list[TensorBuffer] = []
    size = 0
    for item in sorted(tensors, key=lambda each: each.name):
        if shard and size + len(item.data) > limit:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += len(item.data)
    if shard:
        yield shard


def _by_shard(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, shard in sorted(weight_map.items()):
        found.setdefault(shard, []).append(name)
    return found


def _beside(index_key: str, name: str) -> str:
    folder, _, _ = index_key.rpartition("/")
    return f"{folder}/{name}" if folder else name


def _read(documents: Documents, key: str, size_max: int) -> bytes:
    data = documents.read(key, size_max=size_max)
    if data is None:
        raise FetchError(f"{key} is not there (any more)")
    return data
