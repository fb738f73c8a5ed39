"""The object-storage format of ModelExpress 0.7 and slime, as bytes: what stock receivers read.

A delta version is an index object (canonical JSON) and shards (safetensors) beside it. A shard
holds, per changed tensor, one zstd frame of old XOR new as a one-dimensional U8 tensor, and in
its metadata the Adler-32 of the tensor's new bytes. A full version holds the tensors themselves.
Neither dtype nor shape of a changed tensor is said: only its length and checksum are proven.
"""

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from paceline.refit.delta.codec import Update, decode_tensor, encode_as
from paceline.refit.delta.order import Buffer
from paceline.refit.errors import ParseError, ParseReason
from paceline.refit.manifest.v1 import Scheme
from paceline.refit.model import DTYPE_BITS

HEADER_BYTES_MAX: Final = 64 * 2**20
_SHARD_NAME: Final = re.compile(r"[^/\\]+\.safetensors", re.ASCII)
_CHECKSUM: Final = re.compile(r"[0-9a-f]{8}", re.ASCII)
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalTensor:
    """One changed tensor: the frame of its XOR, and what comes out."""

    frame: Buffer
    adler32: str
    """Of the new bytes, 8 lower-case hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullTensor:
    """One whole tensor of a full version."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


def encode_canonical(base: Buffer, new: Buffer) -> CanonicalTensor | None:
    """Encode what turns ``base`` into ``new``, or return None if they are equal.

    Raises:
        ValueError: the sizes differ; the format has no word for that.
    """
    if base == new:
        return None
    frame = encode_as(Scheme.XOR, base, new, dtype="U8")
    return CanonicalTensor(frame=frame, adler32=f"{zlib.adler32(new):08x}")


def decode_canonical(item: CanonicalTensor, base: Buffer) -> Iterator[Update]:
    """Yield the new bytes chunk by chunk; ``base`` must stay as it is until the end.

    Raises:
        ParseError: the frame is damaged or of another length, or the checksum says that this is
            not the base. Nothing should be written before the iteration has ended.
    """
    checksum = 1
    updates = decode_tensor(memoryview(item.frame), scheme=Scheme.XOR, base=base, dtype="U8")
    for update in updates:
        checksum = zlib.adler32(cast("Buffer", update.new), checksum)
        yield update
    if f"{checksum:08x}" != item.adler32:
        detail = f"adler32 {checksum:08x} instead of {item.adler32}"
        raise ParseError(ParseReason.DIGEST_MISMATCH, "canonical", detail)


def delta_shard_name(index: int, total: int) -> str:
    """Return the name of a delta's shard; ``index`` counts from 0 over ranks with changes."""
    return f"model-{index:05d}-of-{total:05d}.safetensors"


def full_shard_name(index: int, total: int) -> str:
    """Return the name of a full version's shard; here the first one is number 1."""
    return f"model-{index + 1:05d}-of-{total:05d}.safetensors"


def render_delta_index(weight_map: Mapping[str, str], *, version: str, base_version: str) -> bytes:
    """Return the index of a delta: changed tensors and the shard that each is in."""
    metadata = {
        "base_version": base_version,
        "checksum_format": "adler32",
        "compression_format": "zstd",
        "delta_encoding": "xor",
        "version": version,
    }
    return _json({"metadata": metadata, "weight_map": dict(weight_map)})


def render_full_index(weight_map: Mapping[str, str], *, total_size: int) -> bytes:
    """Return the index of a full version: every tensor. Raises ValueError if there is none."""
    if not weight_map:
        raise ValueError("a full version has at least one tensor")
    metadata = {"checksum_format": "adler32", "total_size": total_size}
    return _json({"metadata": metadata, "weight_map": dict(weight_map)})


def render_delta_shard(tensors: Mapping[str, CanonicalTensor]) -> bytes:
    """Return one shard of a delta."""
    checksums = {name: item.adler32 for name, item in tensors.items()}
    rows: list[_Part] = [
        (name, "U8", (len(item.frame),), item.frame) for name, item in sorted(tensors.items())
    ]
    return b"".join(_shard_parts(rows, checksums))


def render_full_shard(tensors: Mapping[str, FullTensor]) -> bytes:
    """Return one shard of a full version."""
    return b"".join(full_shard_parts(dict(sorted(tensors.items()))))


def full_shard_parts(tensors: Mapping[str, FullTensor]) -> Sequence[Buffer]:
    """Return header and tensors of a shard, in the order given; no tensor is copied."""
    checksums = {name: f"{zlib.adler32(item.data):08x}" for name, item in tensors.items()}
    rows: list[_Part] = [
        (name, item.dtype, item.shape, item.data) for name, item in tensors.items()
    ]
    return _shard_parts(rows, checksums)


def versions_of(index: bytes) -> tuple[str, str]:
    """Return the version that a delta's index says it leads to, and the one that it applies to.

    Raises:
        ParseError: it says neither, so it is not the index of a delta.
    """
    metadata, _ = _parse_index(index)
    version, base_version = metadata.get("version"), metadata.get("base_version")
    if not isinstance(version, str) or not isinstance(base_version, str):
        raise ParseError(ParseReason.MISSING_FIELD, "index.metadata", "version, base_version")
    return version, base_version


def parse_delta_index(data: bytes, *, version: str, base_version: str) -> dict[str, str]:
    """Return tensor -> shard of a delta. Raises ParseError if it is not of these versions."""
    metadata, weight_map = _parse_index(data)
    expected = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": "xor",
        "checksum_format": "adler32",
        "compression_format": "zstd",
    }
    for key, value in expected.items():
        if metadata.get(key) != value:
            detail = f"{key} is {metadata.get(key)!r}, wanted {value!r}"
            raise ParseError(ParseReason.INCONSISTENT, "index.metadata", detail)
    return weight_map


def parse_full_index(data: bytes) -> dict[str, str]:
    """Return tensor -> shard of a full version, also of a plain Hugging Face checkpoint."""
    metadata, weight_map = _parse_index(data)
    if metadata.get("checksum_format", "adler32") != "adler32":
        detail = repr(metadata["checksum_format"])
        raise ParseError(ParseReason.UNKNOWN_FIELD, "index.metadata.checksum_format", detail)
    if not weight_map:
        raise ParseError(ParseReason.MISSING_FIELD, "index.weight_map", "no tensors")
    return weight_map


def parse_delta_shard(data: memoryview, names: Iterable[str]) -> dict[str, CanonicalTensor]:
    """Return the tensors of a shard, which must be exactly ``names``. Raises ParseError."""
    rows, checksums = _parse_shard(data)
    _check_names(rows, names)
    found = {}
    for name, (dtype, shape, frame) in rows.items():
        checksum = checksums.get(name)
        if dtype != "U8" or len(shape) != 1:
            raise ParseError(ParseReason.WRONG_TYPE, f"shard.{name}", f"{dtype}{list(shape)}")
        if checksum is None or not _CHECKSUM.fullmatch(checksum):
            raise ParseError(ParseReason.MISSING_FIELD, f"shard.__metadata__.{name}", "adler32")
        found[name] = CanonicalTensor(frame=frame, adler32=checksum)
    return found


def shard_names(data: memoryview) -> list[str]:
    """Return the names of the tensors in a shard. Raises ParseError."""
    return list(_parse_shard(data)[0])


def has_checksums(data: memoryview) -> bool:
    """Say whether a shard says what is in its tensors, so that they cannot be changed in place."""
    rows, checksums = _parse_shard(data)
    return not rows.keys().isdisjoint(checksums)


def parse_full_shard(data: memoryview, names: Iterable[str]) -> dict[str, FullTensor]:
    """Return the tensors of a shard, proven where it has checksums. Raises ParseError."""
    rows, checksums = _parse_shard(data)
    _check_names(rows, names)
    for name, (_, _, content) in rows.items():
        if name in checksums and checksums[name] != f"{zlib.adler32(content):08x}":
            raise ParseError(ParseReason.DIGEST_MISMATCH, f"shard.{name}", "adler32")
    return {
        name: FullTensor(dtype=dtype, shape=shape, data=content)
        for name, (dtype, shape, content) in rows.items()
    }


_Rows = dict[str, tuple[str, tuple[int, ...], memoryview]]


_Part = tuple[str, str, tuple[int, ...], Buffer]


def _shard_parts(rows: Iterable[_Part], checksums: Mapping[str, str]) -> Sequence[Buffer]:
    header: dict[str, object] = {"__metadata__": dict(checksums)}
    end = 0
    for name, dtype, shape, data in rows:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + len(data)],
        }
        end += len(data)
    text = _json(header)
    text += b" " * (-len(text) % 8)
    return (_LENGTH.pack(len(text)) + text, *(data for _, _, _, data in rows))


def _parse_index(data: bytes) -> tuple[dict[str, object], dict[str, str]]:
    index = _load(data, "index")
    metadata, weight_map = index.get("metadata", {}), index.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise ParseError(ParseReason.WRONG_TYPE, "index", "metadata and weight_map are objects")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise ParseError(ParseReason.WRONG_TYPE, f"index.weight_map.{name}", repr(shard))
    return metadata, weight_map


def _parse_shard(data: memoryview) -> tuple[_Rows, dict[str, str]]:
    """Return the rows of a safetensors file; they must cover its data without a hole or overlap."""
    if len(data) < _LENGTH.size:
        raise ParseError(ParseReason.TRUNCATED, "shard")
    length = _LENGTH.unpack_from(data)[0]
    start = _LENGTH.size + length
    if length > HEADER_BYTES_MAX or start > len(data):
        raise ParseError(ParseReason.OUT_OF_RANGE, "shard", f"a header of {length} bytes")
    header = _load(bytes(data[_LENGTH.size : start]), "shard")
    checksums = header.pop("__metadata__", {})
    if not isinstance(checksums, dict) or not all(
        isinstance(value, str) for value in checksums.values()
    ):
        raise ParseError(ParseReason.WRONG_TYPE, "shard.__metadata__")
    spans = {name: _row(name, row) for name, row in header.items()}
    end = 0
    for name, (_, _, begin, stop) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin != end:
            raise ParseError(ParseReason.INCONSISTENT, f"shard.{name}", "overlaps or leaves a hole")
        end = stop
    if start + end != len(data):
        raise ParseError(ParseReason.TRAILING_BYTES, "shard", f"{len(data) - start - end} bytes")
    rows = {
        name: (dtype, shape, data[start + begin : start + stop])
        for name, (dtype, shape, begin, stop) in spans.items()
    }
    return rows, checksums


def _row(name: str, row: object) -> tuple[str, tuple[int, ...], int, int]:
    where = f"shard.{name}"
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise ParseError(ParseReason.WRONG_TYPE, where)
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if dtype not in DTYPE_BITS or not _are_sizes(shape) or not _are_sizes(offsets):
        raise ParseError(ParseReason.WRONG_TYPE, where)
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BITS[dtype] // 8:  # noqa: PLR2004
        raise ParseError(ParseReason.INCONSISTENT, where, "shape and offsets differ")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**48 for value in values
    )


def _check_names(rows: _Rows, names: Iterable[str]) -> None:
    differing = sorted(rows.keys() ^ set(names))
    if differing:
        raise ParseError(ParseReason.INCONSISTENT, "shard", f"not as the index: {differing[:5]}")


def _load(data: bytes, where: str) -> dict[str, object]:
    try:
        found = json.loads(data, object_pairs_hook=_unique)
    except UnicodeDecodeError as exc:
        raise ParseError(ParseReason.NOT_UTF8, where) from exc
    except (ValueError, RecursionError) as exc:
        raise ParseError(ParseReason.NOT_JSON, where, str(exc)) from exc
    if not isinstance(found, dict):
        raise ParseError(ParseReason.WRONG_TYPE, where, "not an object")
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ParseError(ParseReason.DUPLICATE_KEY, "canonical")
    return found


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
