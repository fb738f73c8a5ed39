"""Bytes from outside -> Manifest: strict and bounded, or a ParseError with reason and place.

Whatever passes here can be planned and allocated from without further checks: sizes agree with
dtype and shape, segments lie inside their objects and apart from each other, object ids prove
their chunk hashes, and the root digest proves the tensors.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from paceline.refit.digest import root_digest
from paceline.refit.errors import ParseError, ParseReason
from paceline.refit.manifest.payload import object_id_of
from paceline.refit.manifest.region import region_problem, whole_of
from paceline.refit.manifest.render import render_manifest
from paceline.refit.manifest.v1 import (
    LORA_PARTS,
    LORA_PREFIX,
    RANK_MAX,
    SCHEMA,
    Lora,
    LoraModule,
    Manifest,
    PayloadObject,
    Scheme,
    Segment,
    alpha_problem,
    shape_problem,
    text_problem,
)
from paceline.refit.model import (
    DTYPE_BITS,
    FULL_FORMATS,
    Region,
    TensorEntry,
    WeightPayloadFormat,
)

MANIFEST_BYTES_MAX = 64 * 2**20
INTEGER_MAX = 2**53 - 1
"""Largest integer in a document: every JSON reader keeps it exact."""
CHUNK_BYTES_MAX = 64 * 2**20

_SHA256 = re.compile(r"[0-9a-f]{64}")
_XXH128 = re.compile(r"[0-9a-f]{32}")
_TOP = "aliases base_root objects payload_format root_digest schema segments source_slot_id tensors"
_TOP_MAY = "lora"
_TENSOR = "digest dtype name num_bytes shape"
_REGION = "global_shape offsets"
_OBJECT = "chunk_bytes chunk_sha256 num_bytes object_id"
_LORA = "is_rank_stabilised model_root modules"
_LORA_MODULE = "alpha name rank"
_SEGMENT = "changed_elements num_bytes object_id offset scheme tensor"


def parse_manifest(data: bytes, *, size_max: int = MANIFEST_BYTES_MAX) -> Manifest:
    """Return the manifest that ``data`` is the canonical form of.

    Raises:
        ParseError: anything else, with the reason and the place in the document.
    """
    if len(data) > size_max:
        raise ParseError(ParseReason.TOO_LARGE, "manifest", f"{len(data)} > {size_max} bytes")
    top = load_object(data, where="manifest", keys=_TOP, may=_TOP_MAY)
    if top["schema"] != SCHEMA:
        raise ParseError(ParseReason.UNKNOWN_SCHEMA, "schema", repr(top["schema"])[:80])
    base_root = top["base_root"]
    manifest = Manifest(
        payload_format=_payload_format(top["payload_format"]),
        source_slot_id=_text(top["source_slot_id"], "source_slot_id"),
        base_root=None if base_root is None else _hex(base_root, "base_root", _SHA256),
        root_digest=_hex(top["root_digest"], "root_digest", _SHA256),
        tensors=tuple(_tensor(*item) for item in _items(top["tensors"], "tensors")),
        aliases=tuple(_alias(*item) for item in _items(top["aliases"], "aliases")),
        objects=tuple(_object(*item) for item in _items(top["objects"], "objects")),
        segments=tuple(_segment(*item) for item in _items(top["segments"], "segments")),
        lora=_lora(top["lora"], "lora") if "lora" in top else None,
    )
    check_manifest(manifest)
    if render_manifest(manifest) != data:
        raise ParseError(ParseReason.NOT_CANONICAL, "manifest")
    return manifest


def load_object(data: bytes, *, where: str, keys: str, may: str = "") -> Mapping[str, object]:
    """Return a strict JSON object of these ``keys``, separated by spaces, and of some of ``may``.

    Raises:
        ParseError: no UTF-8, no JSON, a number that is no integer, other keys.
    """
    return _fields(_load(data, where), where, keys, may)


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest whose parts do not agree with each other. Raises ParseError."""
    _check_order(manifest)
    _check_base(manifest)
    _check_aliases(manifest)
    _check_segments(manifest)
    _check_overlaps(manifest)
    if manifest.lora is not None:
        _check_lora(manifest, manifest.lora)
    if root_digest(manifest.tensors) != manifest.root_digest:
        raise ParseError(ParseReason.DIGEST_MISMATCH, "root_digest")


def _check_order(manifest: Manifest) -> None:
    if not manifest.tensors:
        raise ParseError(ParseReason.OUT_OF_RANGE, "tensors", "at least one tensor")
    columns = {
        "tensors": [entry.name for entry in manifest.tensors],
        "aliases": [name for name, _ in manifest.aliases],
        "objects": [item.object_id for item in manifest.objects],
        "segments": [segment.tensor for segment in manifest.segments],
        "lora.modules": [module.name for module in manifest.lora.modules] if manifest.lora else [],
    }
    for where, names in columns.items():
        for index, (before, after) in enumerate(pairwise(names)):
            place = f"{where}[{index + 1}]"
            if before == after:
                raise ParseError(ParseReason.DUPLICATE_KEY, place, after)
            if before > after:
                raise ParseError(ParseReason.NOT_CANONICAL, place, "not sorted")


def _check_base(manifest: Manifest) -> None:
    is_files = manifest.payload_format is WeightPayloadFormat.FULL_HF_CHECKPOINT
    parts = [index for index, entry in enumerate(manifest.tensors) if entry.region is not None]
    if is_files and parts:
        where = f"tensors[{parts[0]}].region"
        raise ParseError(
            ParseReason.INCONSISTENT, where, "files of a checkpoint have whole tensors"
        )
    is_delta = manifest.payload_format is WeightPayloadFormat.XOR_DELTA
    if is_delta != (manifest.base_root is not None):
        raise ParseError(
            ParseReason.INCONSISTENT, "base_root", f"with {manifest.payload_format.value}"
        )


def _check_aliases(manifest: Manifest) -> None:
    names = {entry.name for entry in manifest.tensors}
    for index, (alias, canonical) in enumerate(manifest.aliases):
        if alias in names or canonical not in names:
            raise ParseError(
                ParseReason.INCONSISTENT, f"aliases[{index}]", f"{alias} -> {canonical}"
            )


def _check_segments(manifest: Manifest) -> None:
    entries = {entry.name: entry for entry in manifest.tensors}
    objects = {item.object_id: item for item in manifest.objects}
    is_full = manifest.is_full
    if is_full and len(manifest.segments) != len(entries):
        raise ParseError(ParseReason.INCONSISTENT, "segments", "a full payload names every tensor")
    for index, segment in enumerate(manifest.segments):
        where = f"segments[{index}]"
        entry, item = entries.get(segment.tensor), objects.get(segment.object_id)
        if entry is None or item is None:
            what = "tensor" if entry is None else "object_id"
            raise ParseError(ParseReason.INCONSISTENT, f"{where}.{what}", "names nothing")
        if segment.offset + segment.num_bytes > item.num_bytes:
            raise ParseError(ParseReason.OUT_OF_RANGE, where, "reaches past its object")
        if segment.scheme is Scheme.RAW and segment.num_bytes != entry.num_bytes:
            raise ParseError(ParseReason.INCONSISTENT, f"{where}.num_bytes")
        if is_full and segment.scheme is not Scheme.RAW:
            raise ParseError(ParseReason.INCONSISTENT, f"{where}.scheme", "not raw in a full one")
        _check_changed(segment, math.prod(entry.shape), where=where, is_full=is_full)


def _check_changed(segment: Segment, elements: int, *, where: str, is_full: bool) -> None:
    least = elements if is_full else 1
    if not least <= segment.changed_elements <= elements:
        raise ParseError(ParseReason.OUT_OF_RANGE, f"{where}.changed_elements")


def _check_overlaps(manifest: Manifest) -> None:
    taken = sorted(
        (segment.object_id, segment.offset, segment.offset + segment.num_bytes)
        for segment in manifest.segments
        if segment.num_bytes
    )
    for (object_id, _, stop), (next_id, start, _) in pairwise(taken):
        if object_id == next_id and start < stop:
            raise ParseError(
                ParseReason.INCONSISTENT, "segments", f"overlap at {start} in {object_id[:12]}"
            )


def _check_lora(manifest: Manifest, lora: Lora) -> None:
    """Refuse tensors that belong to no module of the LoRA, or to one of another rank."""
    ranks = {
        f"{LORA_PREFIX}{module.name}{part}": (module.rank, dimension)
        for module in lora.modules
        for part, dimension in LORA_PARTS.items()
    }
    for index, entry in enumerate(manifest.tensors):
        rank, dimension = ranks.get(entry.name, (0, 0))
        shape = whole_of(entry)
        if len(shape) <= dimension or shape[dimension] != rank:
            raise ParseError(
                ParseReason.INCONSISTENT, f"tensors[{index}]", f"{entry.name}: not of the LoRA"
            )


def _load(data: bytes, where: str) -> object:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ParseError(ParseReason.NOT_UTF8, where, f"byte {exc.start}") from exc
    try:
        loaded: object = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_float=_no_float,
            parse_constant=_no_float,
        )
    except RecursionError as exc:
        raise ParseError(ParseReason.TOO_LARGE, where, "nested too deep") from exc
    except ValueError as exc:
        raise ParseError(ParseReason.NOT_JSON, where, str(exc)[:80]) from exc
    return loaded


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ParseError(ParseReason.DUPLICATE_KEY, "manifest", twice[:80])
    return found


def _no_float(text: str) -> NoReturn:
    raise ParseError(ParseReason.WRONG_TYPE, "manifest", f"{text[:20]} is not an integer")


def _fields(value: object, where: str, keys: str, may: str = "") -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ParseError(ParseReason.WRONG_TYPE, where, "not an object")
    wanted = set(keys.split())
    if missing := sorted(wanted - value.keys()):
        raise ParseError(ParseReason.MISSING_FIELD, f"{where}.{missing[0]}")
    if unknown := sorted(value.keys() - wanted - set(may.split())):
        raise ParseError(ParseReason.UNKNOWN_FIELD, f"{where}.{unknown[0][:80]}")
    return value


def _items(value: object, where: str) -> Sequence[tuple[object, str]]:
    if not isinstance(value, list):
        raise ParseError(ParseReason.WRONG_TYPE, where, "not a list")
    return [(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ParseError(ParseReason.WRONG_TYPE, where, "not a string")
    if problem := text_problem(value):
        raise ParseError(ParseReason.OUT_OF_RANGE, where, problem)
    return value


def _hex(value: object, where: str, pattern: re.Pattern[str]) -> str:
    text = _text(value, where)
    if not pattern.fullmatch(text):
        raise ParseError(ParseReason.OUT_OF_RANGE, where, "not a lower-case hex digest")
    return text


def _count(value: object, where: str, *, least: int = 0, most: int = INTEGER_MAX) -> int:
    if type(value) is not int:
        raise ParseError(ParseReason.WRONG_TYPE, where, "not an integer")
    if not least <= value <= most:
        raise ParseError(ParseReason.OUT_OF_RANGE, where)
    return value


def _payload_format(value: object) -> WeightPayloadFormat:
    text = _text(value, "payload_format")
    for known in (*FULL_FORMATS, WeightPayloadFormat.XOR_DELTA):
        if text == known.value:
            return known
    raise ParseError(ParseReason.OUT_OF_RANGE, "payload_format", text[:80])


def _tensor(value: object, where: str) -> TensorEntry:
    is_part = isinstance(value, dict) and "region" in value
    fields = _fields(value, where, f"{_TENSOR} region" if is_part else _TENSOR)
    dtype = _text(fields["dtype"], f"{where}.dtype")
    if dtype not in DTYPE_BITS:
        raise ParseError(ParseReason.OUT_OF_RANGE, f"{where}.dtype", dtype[:80])
    shape = _shape(fields["shape"], f"{where}.shape")
    num_bytes = _count(fields["num_bytes"], f"{where}.num_bytes")
    if num_bytes * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise ParseError(ParseReason.INCONSISTENT, f"{where}.num_bytes", "not shape x dtype")
    return TensorEntry(
        name=_text(fields["name"], f"{where}.name"),
        dtype=dtype,
        shape=shape,
        digest=_hex(fields["digest"], f"{where}.digest", _XXH128),
        num_bytes=num_bytes,
        region=_region(fields["region"], f"{where}.region", shape) if is_part else None,
    )


def _shape(value: object, where: str) -> tuple[int, ...]:
    shape = tuple(_count(*item) for item in _items(value, where))
    if problem := shape_problem(shape):
        raise ParseError(ParseReason.OUT_OF_RANGE, where, problem)
    return shape


def _region(value: object, where: str, shape: tuple[int, ...]) -> Region:
    fields = _fields(value, where, _REGION)
    region = Region(
        global_shape=_shape(fields["global_shape"], f"{where}.global_shape"),
        offsets=_shape(fields["offsets"], f"{where}.offsets"),
    )
    if problem := region_problem(region, shape):
        raise ParseError(ParseReason.INCONSISTENT, where, problem)
    return region


def _alias(value: object, where: str) -> tuple[str, str]:
    pair = _items(value, where)
    if len(pair) != 2:  # noqa: PLR2004 - a pair
        raise ParseError(ParseReason.WRONG_TYPE, where, "not a pair")
    return _text(*pair[0]), _text(*pair[1])


def _object(value: object, where: str) -> PayloadObject:
    fields = _fields(value, where, _OBJECT)
    num_bytes = _count(fields["num_bytes"], f"{where}.num_bytes", least=1)
    chunk_bytes = _count(
        fields["chunk_bytes"], f"{where}.chunk_bytes", least=1, most=CHUNK_BYTES_MAX
    )
    items = _items(fields["chunk_sha256"], f"{where}.chunk_sha256")
    if len(items) != -(-num_bytes // chunk_bytes):
        raise ParseError(ParseReason.INCONSISTENT, f"{where}.chunk_sha256", f"{len(items)} hashes")
    hashes = tuple(_hex(*item, _SHA256) for item in items)
    object_id = _hex(fields["object_id"], f"{where}.object_id", _SHA256)
    if object_id_of(hashes) != object_id:
        raise ParseError(ParseReason.DIGEST_MISMATCH, f"{where}.object_id")
    return PayloadObject(
        object_id=object_id, num_bytes=num_bytes, chunk_bytes=chunk_bytes, chunk_sha256=hashes
    )


def _segment(value: object, where: str) -> Segment:
    fields = _fields(value, where, _SEGMENT)
    scheme = _text(fields["scheme"], f"{where}.scheme")
    if scheme not in {known.value for known in Scheme}:
        raise ParseError(ParseReason.OUT_OF_RANGE, f"{where}.scheme", scheme[:80])
    return Segment(
        tensor=_text(fields["tensor"], f"{where}.tensor"),
        scheme=Scheme(scheme),
        object_id=_hex(fields["object_id"], f"{where}.object_id", _SHA256),
        offset=_count(fields["offset"], f"{where}.offset"),
        num_bytes=_count(fields["num_bytes"], f"{where}.num_bytes"),
        changed_elements=_count(fields["changed_elements"], f"{where}.changed_elements"),
    )


def _lora(value: object, where: str) -> Lora:
    fields = _fields(value, where, _LORA)
    if type(fields["is_rank_stabilised"]) is not bool:
        raise ParseError(ParseReason.WRONG_TYPE, f"{where}.is_rank_stabilised", "not true or false")
    modules = tuple(_lora_module(*item) for item in _items(fields["modules"], f"{where}.modules"))
    if not modules:
        raise ParseError(ParseReason.OUT_OF_RANGE, f"{where}.modules", "at least one module")
    return Lora(
        model_root=_hex(fields["model_root"], f"{where}.model_root", _SHA256),
        is_rank_stabilised=bool(fields["is_rank_stabilised"]),
        modules=modules,
    )


def _lora_module(value: object, where: str) -> LoraModule:
    fields = _fields(value, where, _LORA_MODULE)
    alpha = _text(fields["alpha"], f"{where}.alpha")
    if problem := alpha_problem(alpha):
        raise ParseError(ParseReason.OUT_OF_RANGE, f"{where}.alpha", problem)
    return LoraModule(
        name=_text(fields["name"], f"{where}.name"),
        rank=_count(fields["rank"], f"{where}.rank", least=1, most=RANK_MAX),
        alpha=alpha,
    )
