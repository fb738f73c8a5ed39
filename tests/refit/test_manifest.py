"""Manifests: one canonical form, and everything else refused with a reason."""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.digest import content_digest, root_digest
from paceline.refit.errors import ParseError, ParseReason, VerifyError
from paceline.refit.kernels.registry import process_tools
from paceline.refit.manifest.fit import check_layout
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.payload import (
    CHUNK_BYTES,
    CHUNK_BYTES_MIN,
    CHUNKS_WANTED,
    check_header,
    chunk_bytes_for,
    describe_object,
    render_header,
    verify_object,
)
from paceline.refit.manifest.render import render_manifest
from paceline.refit.manifest.v1 import Lora, LoraModule, Manifest
from paceline.refit.model import TensorBuffer, TensorEntry, WeightPayloadFormat
from paceline.testing.payloads import delta_payload, full_payload, tensor_entry

VECTORS = Path(__file__).parents[1] / "vectors" / "manifest"


def buffer(name: str, data: bytes, dtype: str = "U8") -> TensorBuffer:
    """A one-dimensional tensor of bytes."""
    return TensorBuffer(name=name, dtype=dtype, shape=(len(data),), data=memoryview(data))


def sample() -> Manifest:
    """A delta of two tensors, one of which changes, with a tie."""
    base = {"a": buffer("a", bytes(100)), "b": buffer("b", b"same")}
    new = {"a": buffer("a", bytes(99) + b"\1"), "b": buffer("b", b"same")}
    return delta_payload(base, new, aliases=[("head", "a")], chunk_bytes=16)[0]


def lora_tensor(name: str, shape: tuple[int, ...]) -> TensorBuffer:
    """A LoRA's tensor of single bytes."""
    data = memoryview(bytes(math.prod(shape)))
    return TensorBuffer(name=f"base_model.model.{name}", dtype="U8", shape=shape, data=data)


def lora_sample() -> Manifest:
    """A LoRA of a linear module and of an embedding, of two ranks."""
    tensors = [
        lora_tensor("layers.0.q.lora_A.weight", (2, 5)),
        lora_tensor("layers.0.q.lora_B.weight", (4, 2)),
        lora_tensor("embed.lora_embedding_A", (3, 9)),
        lora_tensor("embed.lora_embedding_B", (5, 3)),
    ]
    modules = (
        LoraModule(name="embed", rank=3, alpha="16"),
        LoraModule(name="layers.0.q", rank=2, alpha="0.5"),
    )
    lora = Lora(model_root="ab" * 32, is_rank_stabilised=False, modules=modules)
    return replace(full_payload(tensors, chunk_bytes=16)[0], lora=lora)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(st.dictionaries(names, st.binary(max_size=70), min_size=1, max_size=5), st.integers(1, 99))
def test_full_round_trip(contents: dict[str, bytes], chunk_bytes: int) -> None:
    """Parse(render(manifest)) is the manifest, whatever the names and sizes."""
    tensors = [buffer(name, data) for name, data in contents.items()]
    manifest, _ = full_payload(tensors, chunk_bytes=chunk_bytes)
    assert parse_manifest(render_manifest(manifest)) == manifest


def test_delta_round_trip() -> None:
    """A delta with aliases and an unchanged tensor survives too; so does an empty one."""
    manifest = sample()
    assert parse_manifest(render_manifest(manifest)) == manifest
    same = {"b": buffer("b", b"same")}
    empty, data = delta_payload(same, same)
    assert empty.segments == ()
    assert len(data) > 0
    assert parse_manifest(render_manifest(empty)) == empty


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    """No bytes crash the parser."""
    with pytest.raises(ParseError):
        parse_manifest(data)


@given(st.data())
def test_flipped_bytes_are_refused(data: st.DataObject) -> None:
    """No single damaged byte of a manifest with everything proven gets through unnoticed.

    Names of slots and offsets are covered by the manifest digest alone, hence equality.
    """
    good = render_manifest(sample())
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ParseError):
        assert render_manifest(parse_manifest(bytes(bad))) == bad


def edited(change: Callable[[dict[str, Any]], object], manifest: Manifest | None = None) -> bytes:
    """The sample with one edit, still written canonically."""
    document = json.loads(render_manifest(manifest or sample()))
    change(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _set(path: str, value: object) -> Callable[[dict[str, Any]], object]:
    def change(document: dict[str, Any]) -> None:
        target: Any = document
        *keys, last = path.split(".")
        for key in keys:
            target = target[int(key) if key.isdigit() else key]
        target[int(last) if last.isdigit() else last] = value

    return change


R = ParseReason
EDITS: list[tuple[str, Callable[[dict[str, Any]], object], ParseReason]] = [
    ("other schema", _set("schema", "paceline.manifest.v2"), R.UNKNOWN_SCHEMA),
    ("missing key", lambda d: d.pop("objects"), R.MISSING_FIELD),
    ("unknown key", _set("extra", 1), R.UNKNOWN_FIELD),
    ("unknown key inside", _set("tensors.0.extra", 1), R.UNKNOWN_FIELD),
    ("tensor is no object", _set("tensors.0", 1), R.WRONG_TYPE),
    ("tensors is no list", _set("tensors", {}), R.WRONG_TYPE),
    ("size is text", _set("tensors.0.num_bytes", "4"), R.WRONG_TYPE),
    ("size is true", _set("tensors.0.num_bytes", True), R.WRONG_TYPE),
    ("size is float", _set("tensors.0.num_bytes", 4.0), R.WRONG_TYPE),
    ("size is negative", _set("tensors.0.num_bytes", -4), R.OUT_OF_RANGE),
    ("size is huge", _set("tensors.0.num_bytes", 2**53), R.OUT_OF_RANGE),
    ("size is not shape x dtype", _set("tensors.0.num_bytes", 4), R.INCONSISTENT),
    ("shape overflows", _set("tensors.0.shape", [2**40, 2**40]), R.INCONSISTENT),
    ("shape has too many", _set("tensors.0.shape", [1] * 33), R.OUT_OF_RANGE),
    ("unknown dtype", _set("tensors.0.dtype", "F4"), R.OUT_OF_RANGE),
    ("name is empty", _set("tensors.0.name", ""), R.OUT_OF_RANGE),
    ("name is long", _set("tensors.0.name", "x" * 2000), R.OUT_OF_RANGE),
    ("name is half a pair", _set("tensors.0.name", "\ud800"), R.OUT_OF_RANGE),
    ("name is a number", _set("tensors.0.name", 1), R.WRONG_TYPE),
    ("same tensor twice", lambda d: d["tensors"].append(d["tensors"][1]), R.DUPLICATE_KEY),
    ("tensors not sorted", lambda d: d["tensors"].reverse(), R.NOT_CANONICAL),
    ("no tensors", _set("tensors", []), R.OUT_OF_RANGE),
    ("digest is upper case", _set("tensors.0.digest", "A" * 32), R.OUT_OF_RANGE),
    ("tensor digest altered", _set("tensors.0.digest", "0" * 32), R.DIGEST_MISMATCH),
    ("root altered", _set("root_digest", "0" * 64), R.DIGEST_MISMATCH),
    ("full with base", _set("payload_format", "FULL_TENSOR"), R.INCONSISTENT),
    ("delta without base", _set("base_root", None), R.INCONSISTENT),
    ("other payload format", _set("payload_format", "UNSPECIFIED"), R.OUT_OF_RANGE),
    ("alias of nothing", _set("aliases", [["head", "z"]]), R.INCONSISTENT),
    ("alias of itself", _set("aliases", [["a", "a"]]), R.INCONSISTENT),
    ("alias is no pair", _set("aliases", [["head"]]), R.WRONG_TYPE),
    ("object without hash", _set("objects.0.chunk_sha256", []), R.INCONSISTENT),
    ("object hash altered", _set("objects.0.chunk_sha256.0", "0" * 64), R.DIGEST_MISMATCH),
    ("object is empty", _set("objects.0.num_bytes", 0), R.OUT_OF_RANGE),
    ("chunks of nothing", _set("objects.0.chunk_bytes", 0), R.OUT_OF_RANGE),
    ("chunks are huge", _set("objects.0.chunk_bytes", 2**40), R.OUT_OF_RANGE),
    ("segment of nothing", _set("segments.0.tensor", "z"), R.INCONSISTENT),
    ("segment in nothing", _set("segments.0.object_id", "0" * 64), R.INCONSISTENT),
    ("segment past its object", _set("segments.0.offset", 10**6), R.OUT_OF_RANGE),
    ("unknown scheme", _set("segments.0.scheme", "zip"), R.OUT_OF_RANGE),
    ("raw of another size", _set("segments.0.scheme", "raw"), R.INCONSISTENT),
    ("changes nothing", _set("segments.0.changed_elements", 0), R.OUT_OF_RANGE),
    ("changes too much", _set("segments.0.changed_elements", 101), R.OUT_OF_RANGE),
]


@pytest.mark.parametrize(("name", "change", "reason"), EDITS, ids=[edit[0] for edit in EDITS])
def test_edits_are_refused(
    name: str, change: Callable[[dict[str, Any]], object], reason: ParseReason
) -> None:
    """Each inconsistent edit is refused for its own reason."""
    with pytest.raises(ParseError) as refused:
        parse_manifest(edited(change))
    assert refused.value.reason is reason


def test_overlap_is_refused() -> None:
    """Two tensors may not share bytes of an object."""
    manifest, _ = full_payload([buffer("a", b"12345678"), buffer("b", b"12345678")])
    first, second = manifest.segments
    overlapping = replace(manifest, segments=(first, replace(second, offset=first.offset + 4)))
    with pytest.raises(ParseError, match="overlap"):
        parse_manifest(render_manifest(overlapping))


def test_full_names_every_tensor() -> None:
    """A full payload that leaves a tensor out, or compresses one, is refused."""
    manifest, _ = full_payload([buffer("a", b"12345678"), buffer("b", b"12345678")])
    with pytest.raises(ParseError, match="every tensor"):
        parse_manifest(render_manifest(replace(manifest, segments=manifest.segments[:1])))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", R.NOT_JSON),
        (b"\xff", R.NOT_UTF8),
        (b'{"a":1,"a":2}', R.DUPLICATE_KEY),
        (b"NaN", R.WRONG_TYPE),
        (b"[" * 10**6, R.TOO_LARGE),
        (b"1" * 10**4, R.NOT_JSON),
        (b"[]", R.WRONG_TYPE),
    ],
)
def test_not_even_a_document(data: bytes, reason: ParseReason) -> None:
    """Bytes that are no JSON object are refused by kind."""
    with pytest.raises(ParseError) as refused:
        parse_manifest(data)
    assert refused.value.reason is reason


def test_only_the_canonical_form() -> None:
    """The same document with a space is another byte string, and refused."""
    good = render_manifest(sample())
    with pytest.raises(ParseError) as refused:
        parse_manifest(good.replace(b":", b": ", 1))
    assert refused.value.reason is ParseReason.NOT_CANONICAL


def test_size_is_bounded() -> None:
    """A document above the limit is not even decoded."""
    with pytest.raises(ParseError) as refused:
        parse_manifest(render_manifest(sample()), size_max=100)
    assert refused.value.reason is ParseReason.TOO_LARGE


entries = st.builds(
    TensorEntry,
    name=st.sampled_from(["a", "b", "a,b", '"', "a\nb"]),
    dtype=st.sampled_from(["U8", "I8"]),
    shape=st.lists(st.integers(0, 12), max_size=2).map(tuple),
    digest=st.sampled_from(["0" * 32, "1" * 32]),
    num_bytes=st.just(0),
)


def _unique(found: list[TensorEntry]) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in found}


@given(st.lists(entries, max_size=4).map(_unique), st.lists(entries, max_size=4).map(_unique))
def test_roots_differ_iff_tensors_differ(
    one: dict[str, TensorEntry], two: dict[str, TensorEntry]
) -> None:
    """Equal sets of tensors have one root digest in any order; different ones do not."""
    assert root_digest(one.values()) == root_digest(reversed(one.values()))
    assert (root_digest(one.values()) == root_digest(two.values())) == (one == two)


def test_root_refuses_duplicates() -> None:
    """Two tensors of one name have no root."""
    entry = tensor_entry(buffer("a", b"x"))
    with pytest.raises(ValueError, match="listed twice"):
        root_digest([entry, replace(entry, digest="0" * 32)])


def test_content_digest_is_xxh3_128() -> None:
    """The digest of nothing is the published XXH3-128 of nothing."""
    assert content_digest(b"") == "99aa06d3014798d86001c324468d497f"


@given(st.binary(min_size=1, max_size=300), st.integers(1, 50), st.data())
def test_objects_prove_their_bytes(data: bytes, chunk_bytes: int, draw: st.DataObject) -> None:
    """An object is the same however its parts are cut, and no altered byte passes."""
    cut = draw.draw(st.integers(0, len(data)))
    view = memoryview(data)
    item = describe_object([view[:cut], view[cut:]], chunk_bytes=chunk_bytes)
    assert item == describe_object([view], chunk_bytes=chunk_bytes)
    threads = process_tools(2)
    assert item == describe_object([view], chunk_bytes=chunk_bytes, run=threads.run)
    verify_object(item, view)
    bad = bytearray(data)
    bad[draw.draw(st.integers(0, len(data) - 1))] ^= 1
    for wrong in (bytes(bad), data + b"\0", data[:-1]):
        with pytest.raises(VerifyError):
            verify_object(item, memoryview(wrong))


def test_headers() -> None:
    """A payload object says what it is; each lie has a reason."""
    full, delta = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
    good = render_header(delta)
    check_header(memoryview(good), delta)
    for bad, reason in (
        (good[:-1], ParseReason.TRUNCATED),
        (b"X" + good[1:], ParseReason.BAD_MAGIC),
        (good[:8] + b"\2" + good[9:], ParseReason.UNKNOWN_SCHEMA),
        (render_header(full), ParseReason.INCONSISTENT),
        (good[:-1] + b"\1", ParseReason.NOT_CANONICAL),
    ):
        with pytest.raises(ParseError) as refused:
            check_header(memoryview(bad), delta)
        assert refused.value.reason is reason


def test_vectors() -> None:
    """The language-neutral vectors parse, or are refused, as they say."""
    cases = json.loads((VECTORS / "cases.json").read_text())
    assert {"error" in case for case in cases} == {True, False}
    for case in cases:
        data = case["manifest"].encode()
        if "error" in case:
            with pytest.raises(ParseError) as refused:
                parse_manifest(data)
            assert refused.value.reason.value == case["error"], case["name"]
        else:
            assert parse_manifest(data).root_digest == case["root_digest"]


LORA_EDITS: list[tuple[str, Callable[[dict[str, Any]], object], ParseReason]] = [
    ("missing key", lambda d: d["lora"].pop("model_root"), R.MISSING_FIELD),
    ("unknown key", _set("lora.extra", 1), R.UNKNOWN_FIELD),
    ("null", _set("lora", None), R.WRONG_TYPE),
    ("flag is a number", _set("lora.is_rank_stabilised", 1), R.WRONG_TYPE),
    ("root is no digest", _set("lora.model_root", "x"), R.OUT_OF_RANGE),
    ("no modules", _set("lora.modules", []), R.OUT_OF_RANGE),
    ("modules not sorted", lambda d: d["lora"]["modules"].reverse(), R.NOT_CANONICAL),
    ("module twice", _set("lora.modules.1.name", "embed"), R.DUPLICATE_KEY),
    ("rank of zero", _set("lora.modules.0.rank", 0), R.OUT_OF_RANGE),
    ("rank is huge", _set("lora.modules.0.rank", 2**20 + 1), R.OUT_OF_RANGE),
    ("another rank", _set("lora.modules.0.rank", 4), R.INCONSISTENT),
    ("a tensor of no module", _set("lora.modules.0.name", "a"), R.INCONSISTENT),
    ("alpha is a number", _set("lora.modules.0.alpha", 16), R.WRONG_TYPE),
    ("alpha is zero", _set("lora.modules.0.alpha", "0.0"), R.OUT_OF_RANGE),
    ("alpha is no number", _set("lora.modules.0.alpha", "nan"), R.OUT_OF_RANGE),
    ("alpha has a sign", _set("lora.modules.0.alpha", "-1"), R.OUT_OF_RANGE),
    ("alpha with an exponent", _set("lora.modules.0.alpha", "1e3"), R.OUT_OF_RANGE),
    ("alpha is long", _set("lora.modules.0.alpha", "1" * 21), R.OUT_OF_RANGE),
]


@pytest.mark.parametrize(
    ("change", "reason"), [pytest.param(*edit[1:], id=edit[0]) for edit in LORA_EDITS]
)
def test_a_lora_that_does_not_agree_is_refused(
    change: Callable[[dict[str, Any]], object], reason: ParseReason
) -> None:
    """What a version is a LoRA of is as strict as the rest."""
    with pytest.raises(ParseError) as refused:
        parse_manifest(edited(change, lora_sample()))
    assert refused.value.reason is reason


def test_a_lora_says_what_it_is_of() -> None:
    """It survives the round trip, and tells scales and the room that it needs."""
    manifest = parse_manifest(render_manifest(lora_sample()))
    assert manifest == lora_sample()
    assert manifest.lora is not None
    assert manifest.lora.rank_max == 3
    embed, query = manifest.lora.modules
    assert embed.scale(is_rank_stabilised=False) == 16 / 3
    assert query.scale(is_rank_stabilised=True) == 0.5 / math.sqrt(2)


def test_a_lora_and_a_model_are_not_each_other() -> None:
    """A whole model's engine refuses a LoRA, a LoRA's engine all but its own kind."""
    manifest = lora_sample()
    live = {
        entry.name: TensorBuffer(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            data=memoryview(bytes(entry.num_bytes)),
        )
        for entry in manifest.tensors
    }
    assert manifest.lora is not None
    check_layout(manifest, live, {}, lora=manifest.lora)
    with pytest.raises(VerifyError, match=r"LoRA alone.*publish merged"):
        check_layout(manifest, live, {})
    with pytest.raises(VerifyError, match="takes LoRAs"):
        check_layout(replace(manifest, lora=None), live, {}, lora=manifest.lora)
    with pytest.raises(VerifyError, match="other weights"):
        check_layout(manifest, live, {}, lora=replace(manifest.lora, model_root="cd" * 32))
    with pytest.raises(VerifyError, match="rank or alpha"):
        check_layout(manifest, live, {}, lora=replace(manifest.lora, is_rank_stabilised=True))


@given(st.integers(0, 2**40))
def test_chunks_are_enough_to_share_and_not_too_many(num_bytes: int) -> None:
    """Small payloads have small chunks, large ones those that are cheap to retry."""
    found = chunk_bytes_for(num_bytes)
    assert CHUNK_BYTES_MIN <= found <= CHUNK_BYTES
    assert found % CHUNK_BYTES_MIN == 0
    assert found == CHUNK_BYTES or -(-num_bytes // found) <= CHUNKS_WANTED
