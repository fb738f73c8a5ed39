"""The delta codec: bit-exact in every scheme, strict towards whatever comes from outside."""

import contextlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.delta import dense, gap
from paceline.refit.delta.change import (
    BLOCK_BYTES,
    Change,
    apply_change,
    as_words,
    check_inside,
    compose,
    diff,
    inverse,
)
from paceline.refit.delta.codec import decode_tensor, encode_tensor
from paceline.refit.delta.order import kind_of, rank, rotated, unrank, unrotated, unzigzag, zigzag
from paceline.refit.delta.stream import Cursor, new_compressor, render_u32
from paceline.refit.errors import ParseError, ParseReason
from paceline.refit.manifest.v1 import Scheme
from paceline.refit.model import DTYPE_BITS
from paceline.testing.corpus import Case, corpus

CASES = corpus()
VECTORS = Path(__file__).parents[1] / "vectors" / "delta"
DTYPES = sorted(DTYPE_BITS)


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, bytes, bytes]:
    """Two states of a tensor: unrelated, close in value, or equal in most elements."""
    dtype = draw(st.sampled_from(DTYPES))
    width = DTYPE_BITS[dtype] // 8
    count = draw(st.integers(0, 60))
    base = draw(st.binary(min_size=count * width, max_size=count * width))
    words = np.frombuffer(base, dtype=f"<u{width}").copy()
    kind = kind_of(dtype)
    for at in draw(st.lists(st.integers(0, max(count - 1, 0)), max_size=count)):
        step = draw(st.sampled_from([1, 2, 3, 127, 128, 200]))
        one = words[at : at + 1]
        words[at : at + 1] = unrank(rank(one, kind) + one.dtype.type(step), kind)
    return dtype, base, words.tobytes()


def decoded(data: bytes | memoryview, scheme: Scheme, base: bytes, dtype: str) -> bytes:
    """What a receiver ends up with."""
    found = decode_tensor(memoryview(data), scheme=scheme, base=base, dtype=dtype)
    if not isinstance(found, Change):
        return bytes(found)
    target = bytearray(base)
    apply_change(target, found)
    return bytes(target)


def encoded_block(scheme: Scheme, dtype: str, base: bytes, new: bytes) -> bytes:
    """One block by one scheme, whatever ``encode_tensor`` would have chosen."""
    kind = kind_of(dtype)
    old, now = as_words(base, kind.width), as_words(new, kind.width)
    if scheme is Scheme.GAP:
        found = np.flatnonzero(old != now)
        return gap.encode_block(old, now, found, kind=kind, zstd=new_compressor())
    return dense.encode_block(old, now, tag=dense.Dense.XOR, kind=kind, zstd=new_compressor())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_corpus_goes_through_encode_and_decode(case: Case) -> None:
    """Each corpus case arrives bit for bit, by the scheme that was measured smallest."""
    found = encode_tensor(case.base, case.new, dtype=case.dtype)
    if case.base == case.new:
        assert found is None
        return
    assert found is not None
    assert decoded(memoryview(found.data), found.scheme, case.base, case.dtype) == case.new
    assert len(found.data) <= len(case.new)


@pytest.mark.parametrize("case", [c for c in CASES if c.base], ids=lambda case: case.name)
@pytest.mark.parametrize("scheme", [Scheme.GAP, Scheme.DENSE])
def test_corpus_goes_through_every_scheme(case: Case, scheme: Scheme) -> None:
    """Each scheme alone can carry each corpus case."""
    data = encoded_block(scheme, case.dtype, case.base, case.new)
    assert decoded(data, scheme, case.base, case.dtype) == case.new


@given(steps())
def test_round_trip(step: tuple[str, bytes, bytes]) -> None:
    """Decode(encode(base, new)) is new, in every dtype."""
    dtype, base, new = step
    found = encode_tensor(base, new, dtype=dtype)
    if found is None:
        assert base == new
    else:
        assert decoded(memoryview(found.data), found.scheme, base, dtype) == new


@given(steps())
def test_full_planes_round_trip(step: tuple[str, bytes, bytes]) -> None:
    """The dense form that holds new words, not their XOR, is exact too."""
    dtype, base, new = step
    kind = kind_of(dtype)
    if not base:
        return
    old, now = as_words(base, kind.width), as_words(new, kind.width)
    data = dense.encode_block(old, now, tag=dense.Dense.FULL, kind=kind, zstd=new_compressor())
    assert decoded(data, Scheme.DENSE, base, dtype) == new


@given(steps(), st.data())
def test_damage_is_refused_or_harmless(step: tuple[str, bytes, bytes], data: st.DataObject) -> None:
    """A truncated or flipped payload raises ParseError or decodes within the tensor."""
    dtype, base, new = step
    if base == new:
        return
    scheme = data.draw(st.sampled_from([Scheme.GAP, Scheme.DENSE]))
    good = encoded_block(scheme, dtype, base, new)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    del bad[data.draw(st.integers(0, len(bad))) :]
    with contextlib.suppress(ParseError):
        assert len(decoded(bytes(bad), scheme, base, dtype)) == len(base)


@given(steps(), st.integers(1, 40))
def test_trailing_bytes_are_refused(step: tuple[str, bytes, bytes], more: int) -> None:
    """A payload ends where its blocks end."""
    dtype, base, new = step
    if base == new:
        return
    for scheme in (Scheme.GAP, Scheme.DENSE):
        data = encoded_block(scheme, dtype, base, new) + bytes(more)
        with pytest.raises(ParseError) as refused:
            decode_tensor(memoryview(data), scheme=scheme, base=base, dtype=dtype)
        assert refused.value.reason is ParseReason.TRAILING_BYTES


@given(steps())
def test_change_is_its_own_inverse(step: tuple[str, bytes, bytes]) -> None:
    """Applying a change and its inverse restores the old bits."""
    dtype, base, new = step
    change = diff(base, new, width=DTYPE_BITS[dtype] // 8)
    target = bytearray(base)
    apply_change(target, change)
    assert target == new
    apply_change(target, inverse(change))
    assert target == base


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 30), st.data())
def test_compose_equals_direct(width: int, count: int, data: st.DataObject) -> None:
    """Composing a->b and b->c gives exactly the change a->c, without c or a at hand."""
    word = st.binary(min_size=width, max_size=width)
    pool = data.draw(st.lists(word, min_size=1, max_size=3))
    states = [
        b"".join(data.draw(st.lists(st.sampled_from(pool), min_size=count, max_size=count)))
        for _ in range(3)
    ]
    first, second, direct = (
        diff(states[a], states[b], width=width) for a, b in ((0, 1), (1, 2), (0, 2))
    )
    composed = compose(first, second)
    assert composed.positions.tolist() == direct.positions.tolist()
    assert composed.xor.tolist() == direct.xor.tolist()


def test_compose_refuses_other_widths() -> None:
    """Changes of different element widths are different tensors."""
    with pytest.raises(ValueError, match="widths"):
        compose(diff(b"\0", b"\1", width=1), diff(b"\0\0", b"\1\0", width=2))


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "U16", "I8"])
def test_order_is_a_bijection(dtype: str) -> None:
    """Rank, zigzag and rotation map all words of a width onto themselves and back."""
    kind = kind_of(dtype)
    words = np.arange(2 ** (8 * kind.width), dtype=f"<u{kind.width}")
    assert np.array_equal(unrank(rank(words, kind), kind), words)
    assert np.array_equal(unzigzag(zigzag(words)), words)
    assert np.array_equal(unrotated(rotated(words, kind), kind), words)
    assert len(np.unique(rank(words, kind))) == len(words)


def test_rank_follows_values() -> None:
    """Ranks of bf16 ascend with the value, and -0 comes right before +0."""
    kind = kind_of("BF16")
    words = np.array([0xFF80, 0xBF80, 0x8001, 0x8000, 0x0000, 0x0001, 0x3F80], dtype="<u2")
    ranks = rank(words, kind)
    assert np.all(np.diff(ranks.astype(int)) > 0)
    assert ranks[3:5].tolist() == [0x7FFF, 0x8000]


def test_tensors_of_several_blocks() -> None:
    """A tensor larger than a block arrives exactly, sparse with changes at the seam, and dense."""
    per_block = BLOCK_BYTES // 2
    base = np.random.default_rng(4).integers(0, 2**16, per_block + 1000, dtype=np.uint16)
    sparse, equal = base.copy(), np.full_like(base, 7)
    sparse[[0, per_block - 1, per_block, -1]] += 1
    for new, scheme in ((sparse, Scheme.GAP), (equal, Scheme.DENSE)):
        found = encode_tensor(base.tobytes(), new.tobytes(), dtype="BF16")
        assert found is not None
        assert found.scheme is scheme
        data = memoryview(found.data)
        assert decoded(data, found.scheme, base.tobytes(), "BF16") == new.tobytes()
    assert len(diff(base.tobytes(), sparse.tobytes(), width=2)) == 4


def test_sparse_steps_are_small() -> None:
    """One percent of changed bf16 elements by one step costs under two bytes each."""
    random = np.random.default_rng(5)
    base = random.integers(0x3C00, 0x3F80, 400_000, dtype=np.uint16)
    new = base.copy()
    at = random.choice(len(base), 4000, replace=False)
    new[at] += 1
    found = encode_tensor(base.tobytes(), new.tobytes(), dtype="BF16")
    assert found is not None
    assert (found.scheme, found.changed_elements) == (Scheme.GAP, 4000)
    assert len(found.data) < 2 * 4000


def test_random_bits_stay_raw() -> None:
    """What does not compress is sent as it is, without a copy."""
    random = np.random.default_rng(6)
    base, new = random.bytes(4000), random.bytes(4000)
    found = encode_tensor(base, new, dtype="F32")
    assert found is not None
    assert found.scheme is Scheme.RAW
    assert found.data is new


def test_sizes_must_agree() -> None:
    """A delta never changes a size, and a buffer holds whole elements of a known dtype."""
    with pytest.raises(ValueError, match="keeps the size"):
        encode_tensor(b"ab", b"abcd", dtype="U8")
    with pytest.raises(ValueError, match="keeps the size"):
        diff(b"ab", b"abcd", width=1)
    with pytest.raises(ValueError, match="unknown dtype"):
        encode_tensor(b"", b"", dtype="F4")
    with pytest.raises(ValueError, match="width 3"):
        as_words(b"", 3)


@pytest.mark.parametrize("positions", [[0, 0], [1, 0], [-1, 0], [0, 3], [0]])
def test_positions_are_checked_before_writing(positions: list[int]) -> None:
    """A change that does not fit its tensor is refused and the tensor stays."""
    bad = Change(positions=np.array(positions), xor=np.array([1, 1], dtype="u1"))
    target = bytearray(3)
    with pytest.raises(ValueError, match="positions"):
        apply_change(target, bad)
    assert target == bytes(3)
    check_inside(diff(b"", b"", width=1), 0)


def frame(data: bytes) -> bytes:
    """One zstd frame."""
    return zstandard.ZstdCompressor(level=1).compress(data)


def gap_record(entries: int, escapes: int, *streams: bytes) -> bytes:
    """A GAP record by hand."""
    frames = [frame(stream) for stream in streams]
    return render_u32(entries, escapes, *(len(item) for item in frames)) + b"".join(frames)


HOSTILE = {
    "more entries than elements": (gap_record(9, 0), ParseReason.OUT_OF_RANGE),
    "more escapes than entries": (gap_record(1, 2), ParseReason.OUT_OF_RANGE),
    "position past the end": (
        gap_record(1, 0, b"\x08", b"\0", b"\2", b""),
        ParseReason.OUT_OF_RANGE,
    ),
    "filler that is none": (
        gap_record(2, 0, b"\1\1", b"\0\0", b"\0\2", b""),
        ParseReason.NOT_CANONICAL,
    ),
    "ends in a filler": (gap_record(1, 0, b"\1", b"\0", b"\0", b""), ParseReason.NOT_CANONICAL),
    "escape missing": (gap_record(1, 0, b"\1", b"\0", b"\xff", b""), ParseReason.INCONSISTENT),
    "escape too many": (gap_record(1, 1, b"\1", b"\0", b"\1", b"ab"), ParseReason.INCONSISTENT),
    "escape for a small value": (
        gap_record(1, 1, b"\1", b"\0", b"\xff", b"\1\0"),
        ParseReason.NOT_CANONICAL,
    ),
    "stream of another size": (
        gap_record(1, 0, b"\1\1", b"\0", b"\2", b""),
        ParseReason.INCONSISTENT,
    ),
    "no frame": (render_u32(1, 0, 3, 0, 0, 0) + b"abc", ParseReason.INCONSISTENT),
    "cut": (gap_record(1, 0, b"\1", b"\0", b"\2", b"")[:-3], ParseReason.TRUNCATED),
    "empty": (b"", ParseReason.TRUNCATED),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_gap_records(name: str) -> None:
    """Each way a GAP record can lie is refused with its reason."""
    data, reason = HOSTILE[name]
    with pytest.raises(ParseError) as refused:
        decode_tensor(memoryview(data), scheme=Scheme.GAP, base=bytes(16), dtype="BF16")
    assert refused.value.reason is reason


def test_bombs_are_not_expanded() -> None:
    """A frame that declares more, or hides more, than the tensor holds is refused."""
    bomb = frame(bytes(10**7))
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10**6))
    lying = bytearray(frame(bytes(200)))
    lying[5] = 16  # the frame's own content size, one byte in this layout
    for payload in (bomb, hidden, bytes(lying), frame(bytes(16)) + b"\0"):
        data = bytes([0]) + render_u32(len(payload)) + payload
        with pytest.raises(ParseError) as refused:
            decode_tensor(memoryview(data), scheme=Scheme.DENSE, base=bytes(16), dtype="BF16")
        assert refused.value.reason is ParseReason.INCONSISTENT


def test_hostile_dense_and_raw() -> None:
    """Unknown dense tags and raw payloads of another size are refused."""
    for data, scheme, reason in (
        (b"\2" + render_u32(0), Scheme.DENSE, ParseReason.OUT_OF_RANGE),
        (b"\0" + render_u32(99), Scheme.DENSE, ParseReason.TRUNCATED),
        (b"abc", Scheme.RAW, ParseReason.TRUNCATED),
        (b"abcde", Scheme.RAW, ParseReason.TRAILING_BYTES),
    ):
        with pytest.raises(ParseError) as refused:
            decode_tensor(memoryview(data), scheme=scheme, base=bytes(4), dtype="F32")
        assert refused.value.reason is reason


def test_escapes_only_in_two_byte_elements() -> None:
    """Other widths carry their values whole and must not name escapes."""
    with pytest.raises(ParseError) as refused:
        gap.decode_block(
            Cursor(memoryview(render_u32(1, 1)), where="x"),
            as_words(bytes(4), 1),
            kind=kind_of("U8"),
        )
    assert refused.value.reason is ParseReason.INCONSISTENT


def test_vectors() -> None:
    """The language-neutral vectors decode, or are refused, as they say."""
    cases = json.loads((VECTORS / "cases.json").read_text())
    assert {case["scheme"] for case in cases} == {"raw", "dense", "gap"}
    for case in cases:
        data, base = (bytes.fromhex(case[key]) for key in ("payload", "base"))
        scheme = Scheme(case["scheme"])
        if "error" in case:
            with pytest.raises(ParseError) as refused:
                decode_tensor(memoryview(data), scheme=scheme, base=base, dtype=case["dtype"])
            assert refused.value.reason.value == case["error"], case["name"]
        else:
            assert decoded(data, scheme, base, case["dtype"]).hex() == case["new"], case["name"]


def test_schemes_agree_pairwise() -> None:
    """All schemes of one step decode to the same bytes."""
    base = np.arange(100, dtype="<u2").tobytes()
    new = (np.arange(100, dtype="<u2") ^ np.uint16(3)).tobytes()
    results = [
        decoded(encoded_block(scheme, "U16", base, new), scheme, base, "U16")
        for scheme in (Scheme.GAP, Scheme.DENSE)
    ]
    assert all(a == b for a, b in itertools.pairwise([*results, new]))
