"""The delta codec: bit-exact in every scheme, strict towards whatever comes from outside."""

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.delta import choice, mixing
from paceline.refit.delta.choice import LOCAL, Link
from paceline.refit.delta.codec import (
    Tools,
    compose_tensors,
    decode_tensor,
    encode_as,
    encode_tensor,
)
from paceline.refit.delta.loops import Loops
from paceline.refit.delta.order import (
    CHUNK_BYTES,
    Buffer,
    as_words,
    kind_of,
    rank,
    rotated,
    unrank,
    unrotated,
    unzigzag,
    zigzag,
)
from paceline.refit.delta.steps import (
    Steps,
    compose,
    differences_of,
    inverse,
    positions_of,
)
from paceline.refit.delta.stream import render_u32
from paceline.refit.errors import ParseError, ParseReason
from paceline.refit.kernels.registry import load_loops
from paceline.refit.manifest.v1 import Scheme
from paceline.refit.model import DTYPE_BITS
from paceline.testing.corpus import Case, corpus

CASES = corpus()
VECTORS = Path(__file__).parents[1] / "vectors" / "delta"
DTYPES = sorted(DTYPE_BITS)
LOOPS = [load_loops("numpy"), load_loops("numba")]
SLOW = Link(bits_per_s=5e6)


def schemes_of(dtype: str) -> list[Scheme]:
    """Every scheme that can carry this dtype."""
    floats = kind_of(dtype).exponent_bits > 0
    return [scheme for scheme in Scheme if scheme is not Scheme.CLASSED or floats]


@st.composite
def changes(draw: st.DrawFn, *, states: int = 2) -> tuple[str, list[bytes]]:
    """States of a tensor one after another: unrelated, close in value, or mostly equal."""
    dtype = draw(st.sampled_from(DTYPES))
    width = DTYPE_BITS[dtype] // 8
    count = draw(st.sampled_from([0, 1, 2, 63, 64, 65, 300]))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    kind = kind_of(dtype)
    words = random.integers(0, 256, count * width, dtype=np.uint8).view(f"<u{width}")
    found = [words.tobytes()]
    for _ in range(states - 1):
        density = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
        reach = draw(st.sampled_from([1, 127, 128, 2**15]))
        mine = random.random(count) < density
        step = random.integers(-reach, reach + 1, count).astype(f"<i{width}").view(words.dtype)
        words = np.where(mine, unrank(rank(words, kind) + step, kind), words)
        found.append(words.tobytes())
    return dtype, found


def decoded(
    data: Buffer, scheme: Scheme, base: bytes, dtype: str, loops: Loops = LOOPS[0]
) -> bytes:
    """What a receiver ends up with."""
    kind = kind_of(dtype)
    updates = list(
        decode_tensor(
            memoryview(data), scheme=scheme, base=base, dtype=dtype, tools=Tools(loops=loops)
        )
    )
    target = as_words(bytearray(base), kind.width)
    for update in updates:
        if isinstance(update.new, Steps):
            loops.add(update.new, target[update.part], kind)
        else:
            target[update.part] = update.new
    return target.tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("link", [LOCAL, SLOW], ids=["local", "slow"])
def test_corpus_goes_through_encode_and_decode(case: Case, link: Link) -> None:
    """Each corpus case arrives bit for bit, by whatever scheme the link makes best."""
    found = encode_tensor(case.base, case.new, dtype=case.dtype, link=link)
    if case.base == case.new:
        assert found is None
        return
    assert found is not None
    assert decoded(memoryview(found.data), found.scheme, case.base, case.dtype) == case.new
    assert len(found.data) <= len(case.new)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.name)
def test_corpus_goes_through_every_scheme(case: Case, loops: Loops) -> None:
    """Each scheme alone can carry each corpus case, with all loops."""
    tools = Tools(loops=loops)
    for scheme in schemes_of(case.dtype):
        data = encode_as(scheme, case.base, case.new, dtype=case.dtype, tools=tools)
        assert decoded(data, scheme, case.base, case.dtype, loops) == case.new


@given(changes())
def test_all_loops_write_the_same_bytes(change: tuple[str, list[bytes]]) -> None:
    """Every scheme is a function of the two states alone, in every dtype, and exact."""
    dtype, (base, new) = change
    for scheme in schemes_of(dtype):
        one, other = (
            bytes(encode_as(scheme, base, new, dtype=dtype, tools=Tools(loops=loops)))
            for loops in LOOPS
        )
        assert one == other
        for loops in LOOPS:
            assert decoded(one, scheme, base, dtype, loops) == new


@given(changes())
def test_loops_agree_one_by_one(change: tuple[str, list[bytes]]) -> None:
    """Take, put, add and its reverse do the same in all loops, also on unaligned memory."""
    dtype, (base, new) = change
    kind = kind_of(dtype)
    old, now = as_words(base, kind.width), as_words(new, kind.width)
    shifted = bytearray(len(base) + 1)
    for loops in LOOPS:
        steps = loops.diff(old, now, kind, first=7, most=len(old))
        assert steps is not None
        loops.check(steps, old, kind, first=7)
        shifted[1:] = base
        live = as_words(memoryview(shifted)[1:], kind.width)
        taken = loops.take(steps, live)
        loops.add(steps, live, kind)
        assert live.tobytes() == new
        loops.add(steps, live, kind, sign=-1)
        assert live.tobytes() == base
        assert taken.tobytes() == live[positions_of(steps.gaps)].tobytes()
        kept = loops.check(steps, live, kind, first=7, keep=True)
        shown: list[bytes] = []
        loops.add(kept, live, kind, seen=lambda words: shown.append(words.tobytes()))  # noqa: B023
        assert live.tobytes() == new == b"".join(shown)
        if len(steps) > 1:
            assert loops.diff(old, now, kind, first=7, most=len(steps) - 1) is None


@pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.name)
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("keep", [True, False])
def test_writes_that_are_watched_are_all_or_none(loops: Loops, nth: int, keep: bool) -> None:
    """Whoever watches sees finished words in order; if that fails nothing stays written."""
    kind = kind_of("BF16")
    old = np.random.default_rng(nth).integers(0, 2**16, 2**19, dtype=np.uint16)
    now = np.where(np.arange(2**19) % 3 == 0, old ^ np.uint16(0x0101), old).astype("<u2")
    steps = loops.diff(old, now, kind, first=0, most=2**19)
    assert steps is not None
    assert len(steps.escapes)
    steps = loops.check(steps, old, kind, first=0, keep=keep)
    live, seen = old.copy(), []

    def watch(words: npt.NDArray[Any]) -> None:
        seen.append(words.copy())
        if len(seen) == nth:
            raise KeyboardInterrupt

    try:
        loops.add(steps, live, kind, seen=watch)
    except KeyboardInterrupt:
        assert live.tobytes() == old.tobytes()
    else:
        assert len(seen) < nth
        assert live.tobytes() == now.tobytes()
    together = np.concatenate(seen)
    assert together.tobytes() == now[: len(together)].tobytes()


@given(changes(), st.integers(0, 2**40))
def test_totals_are_differences_of_digests(change: tuple[str, list[bytes]], first: int) -> None:
    """What the steps say about the digest is what a full scan of both states says."""
    dtype, (base, new) = change
    kind = kind_of(dtype)
    old, now = as_words(base, kind.width), as_words(new, kind.width)
    wanted = mixing.additive_digest(now, first=first) - mixing.additive_digest(old, first=first)
    for loops in LOOPS:
        steps = loops.diff(old, now, kind, first=first, most=len(old))
        assert steps is not None
        assert steps.total == wanted % 2**64


@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8", "I64"])
@pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.name)
def test_another_base_is_found_out(dtype: str, loops: Loops) -> None:
    """Steps that meet other words than they were made for are refused, whichever differs."""
    kind = kind_of(dtype)
    old = np.arange(40, 80).astype(f"<u{kind.width}")
    now = old.copy()
    now[::3] += now.dtype.type(1)
    steps = loops.diff(old, now, kind, first=0, most=40)
    assert steps is not None
    for at in range(0, 40, 3):
        other = old.copy()
        other[at] ^= other.dtype.type(4)
        with pytest.raises(ParseError) as refused:
            loops.check(steps, other, kind, first=0)
        assert refused.value.reason is ParseReason.DIGEST_MISMATCH
    with pytest.raises(ParseError):
        loops.check(steps, old, kind, first=1)


@given(changes())
def test_inverse_takes_back(change: tuple[str, list[bytes]]) -> None:
    """Inverse(steps) is the diff in the other direction; twice is the steps themselves."""
    dtype, (base, new) = change
    there, back = (diffed(a, b, dtype) for a, b in ((base, new), (new, base)))
    assert same(inverse(there), back)
    assert same(inverse(inverse(there)), there)


@given(changes(states=3))
def test_compose_equals_direct(change: tuple[str, list[bytes]]) -> None:
    """Steps v to v+1 and v+1 to v+2 compose to those from v to v+2, without any weights."""
    dtype, (one, two, three) = change
    both = compose(diffed(one, two, dtype), diffed(two, three, dtype))
    assert same(both, diffed(one, three, dtype))
    first, second = (
        memoryview(bytes(encode_as(Scheme.GAP, a, b, dtype=dtype)))
        for a, b in ((one, two), (two, three))
    )
    count = len(one) * 8 // DTYPE_BITS[dtype]
    found = compose_tensors(first, second, dtype=dtype, num_elements=count)
    if found is None:
        assert one == three
    else:
        assert found.data == encode_as(Scheme.GAP, one, three, dtype=dtype)


def diffed(base: bytes, new: bytes, dtype: str) -> Steps:
    kind = kind_of(dtype)
    old, now = as_words(base, kind.width), as_words(new, kind.width)
    steps = LOOPS[0].diff(old, now, kind, first=0, most=len(old))
    assert steps is not None
    return steps


def same(one: Steps, other: Steps) -> bool:
    return all(
        bytes(getattr(one, name)) == bytes(getattr(other, name))
        for name in ("gaps", "codes", "escapes")
    ) and (one.total == other.total)


def test_compose_refuses_other_widths() -> None:
    """Steps of different element widths are different things."""
    with pytest.raises(ValueError, match="width"):
        compose(diffed(b"ab", b"ac", "U8"), diffed(b"ab", b"ac", "U16"))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "U16", "F8_E4M3", "U8"])
def test_order_is_a_bijection(dtype: str) -> None:
    """Rank, zigzag and rotation visit every word once and are taken back exactly."""
    kind = kind_of(dtype)
    words = np.arange(2 ** (8 * kind.width), dtype=f"<u{kind.width}")
    for there, back in (
        (lambda w: rank(w, kind), lambda w: unrank(w, kind)),
        (zigzag, unzigzag),
        (lambda w: rotated(w, kind), lambda w: unrotated(w, kind)),
    ):
        assert np.array_equal(np.sort(there(words)), words)
        assert np.array_equal(back(there(words)), words)


def test_rank_follows_values() -> None:
    """One ulp is one, also across zero; -0 comes right before +0."""
    words = np.array([0xBF80, 0x8001, 0x8000, 0x0000, 0x0001, 0x3F80], dtype="<u2")
    places = rank(words, kind_of("BF16")).astype(int)
    assert list(np.diff(places) > 0) == [True] * 5
    assert list(np.diff(places)[1:4]) == [1, 1, 1]


@pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.name)
def test_tensors_of_several_chunks(loops: Loops) -> None:
    """Changes on both sides of a chunk boundary, in the last element and in no other chunk."""
    per = CHUNK_BYTES // 2
    base = np.zeros(3 * per + 5, dtype="<u2")
    new = base.copy()
    new[[0, per - 1, per, -1]] = [1, 2, 3, 4]
    for scheme in schemes_of("BF16"):
        data = encode_as(
            scheme, base.tobytes(), new.tobytes(), dtype="BF16", tools=Tools(loops=loops)
        )
        assert decoded(data, scheme, base.tobytes(), "BF16", loops) == new.tobytes()
        if scheme in {Scheme.GAP, Scheme.CLASSED}:
            lengths = struct.unpack_from("<4I", bytes(data))
            assert [length > 0 for length in lengths] == [True, True, False, True]


def trained(density: float, *, seed: int = 0) -> tuple[bytes, bytes]:
    """A bf16 tensor and one step later, small weights changing more often than large ones."""
    random = np.random.default_rng(seed)
    values = random.normal(0, 0.02, 200_000).astype(np.float32)
    base = (values.view(np.uint32) >> 16).astype("<u2")
    likely = density * 0.01 / (np.abs(values) + 0.001)
    new = base + (random.random(len(base)) < likely)
    return base.tobytes(), new.astype("<u2").tobytes()


def test_choice_follows_the_link() -> None:
    """Bytes are worth more processor time the slower the link; nothing is assumed of sizes."""
    base, new = trained(0.1)
    fast, slow = (
        encode_tensor(base, new, dtype="BF16", link=Link(bits_per_s=rate)) for rate in (2e9, 1e6)
    )
    assert fast is not None
    assert slow is not None
    assert (fast.scheme, slow.scheme) == (Scheme.GAP, Scheme.CLASSED)
    assert len(slow.data) < 0.9 * len(fast.data) < 0.1 * len(new)
    assert fast.changed_elements == slow.changed_elements


def test_choice_is_by_arrival() -> None:
    """The scheme that is in place first wins; at equal time the smaller one."""
    sizes = {Scheme.GAP: 100, Scheme.CLASSED: 60, Scheme.RAW: 10_000}
    assert choice.choose(sizes, raw_bytes=10_000, link=Link(bits_per_s=1e3)) is Scheme.CLASSED
    assert choice.choose(sizes, raw_bytes=10_000, link=Link(bits_per_s=1e12)) is Scheme.RAW
    assert choice.choose({Scheme.RAW: 5}, raw_bytes=5, link=LOCAL) is Scheme.RAW
    assert not choice.is_classed_worth_measuring(100, raw_bytes=10**8, link=LOCAL)
    assert choice.is_classed_worth_measuring(10**6, raw_bytes=10**8, link=SLOW)


def test_random_bits_cost_no_more_than_raw() -> None:
    """What cannot be compressed goes out as it is."""
    random = np.random.default_rng(1)
    base, new = random.bytes(300_000), random.bytes(300_000)
    found = encode_tensor(base, new, dtype="F32")
    assert found is not None
    assert (found.scheme, found.changed_elements) == (Scheme.RAW, 75_000)


def test_sizes_and_dtypes_must_fit() -> None:
    """A change of size, an unknown dtype and classes of integers are the caller's error."""
    with pytest.raises(ValueError, match="keeps the size"):
        encode_tensor(b"ab", b"abcd", dtype="U8")
    with pytest.raises(ValueError, match="unknown dtype"):
        encode_tensor(b"", b"", dtype="F4")
    with pytest.raises(ValueError, match="exponent"):
        encode_as(Scheme.CLASSED, b"ab", b"ac", dtype="U8")
    with pytest.raises(ValueError, match="width"):
        as_words(b"abc", 3)


# What comes from outside -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [Scheme.GAP, Scheme.CLASSED])
@pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.name)
def test_every_flip_and_cut_of_steps_is_refused(scheme: Scheme, loops: Loops) -> None:
    """Each truncation and each flipped bit is refused, or says the same in other words."""
    base = np.arange(0x3C00, 0x3C80, dtype="<u2")
    new = base.copy()
    new[[3, 20, 21, 90]] += np.array([1, 2, 3, 999], dtype="<u2")
    data = bytes(encode_as(scheme, base.tobytes(), new.tobytes(), dtype="BF16"))
    damaged = [data[:size] for size in range(len(data))] + [data + b"\0"]
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    harmless = 0
    for payload in damaged:
        try:
            assert decoded(payload, scheme, base.tobytes(), "BF16", loops) == new.tobytes()
            harmless += 1
        except ParseError:
            continue
    assert harmless <= len(damaged) // 50


@given(changes(), st.data())
def test_damage_is_refused_or_stays_inside(
    change: tuple[str, list[bytes]], data: st.DataObject
) -> None:
    """Damaged bytes of any scheme raise ParseError or decode to a tensor of the same size."""
    dtype, (base, new) = change
    scheme = data.draw(st.sampled_from(schemes_of(dtype)))
    payload = bytearray(encode_as(scheme, base, new, dtype=dtype))
    for at in data.draw(st.lists(st.integers(0, max(0, len(payload) - 1)), max_size=3)):
        if payload:
            payload[at] ^= data.draw(st.integers(1, 255))
    for loops in LOOPS:
        try:
            assert len(decoded(bytes(payload), scheme, base, dtype, loops)) == len(base)
        except ParseError:
            continue


def frame(data: bytes) -> bytes:
    """One zstd frame; nothing of nothing."""
    return zstandard.ZstdCompressor(level=1).compress(data) if data else b""


def payload_of(
    *groups: tuple[int, int, bytes, bytes],
    escapes: tuple[int, bytes] = (0, b""),
    bounds: tuple[int, ...] = (),
    num_groups: int | None = None,
) -> bytes:
    """A GAP or CLASSED payload of one chunk by hand: codes, gap bytes, gaps, codes per group."""
    frames = [frame(escapes[1])]
    sizes = []
    for codes, gap_bytes, gaps, values in groups:
        pair = [frame(gaps), frame(values)]
        sizes.append(struct.pack("<IIII", codes, gap_bytes, *(len(item) for item in pair)))
        frames += pair
    count = len(groups) if num_groups is None else num_groups
    record = struct.pack("<QIIH", 0, escapes[0], len(frames[0]), count)
    record += b"".join(struct.pack("<H", bound) for bound in bounds)
    record += b"".join((*sizes, *frames))
    return render_u32(len(record)) + record


HOSTILE = {
    "more codes than elements": (payload_of((9, 9, b"", b"")), ParseReason.OUT_OF_RANGE),
    "no codes": (payload_of((0, 0, b"", b"")), ParseReason.OUT_OF_RANGE),
    "more escapes than codes": (
        payload_of((1, 1, b"", b""), escapes=(2, b"")),
        ParseReason.OUT_OF_RANGE,
    ),
    "more gap bytes than gaps take": (payload_of((1, 2, b"", b"")), ParseReason.OUT_OF_RANGE),
    "position past the end": (payload_of((1, 1, b"\x08", b"\2")), ParseReason.OUT_OF_RANGE),
    "second position past the end": (
        payload_of((2, 2, b"\x06\x01", b"\2\2")),
        ParseReason.OUT_OF_RANGE,
    ),
    "open gap": (payload_of((1, 1, b"\xff", b"\2")), ParseReason.TRUNCATED),
    "step of nothing": (payload_of((1, 1, b"\1", b"\0")), ParseReason.NOT_CANONICAL),
    "escape missing": (payload_of((1, 1, b"\1", b"\xff")), ParseReason.INCONSISTENT),
    "escape too many": (
        payload_of((1, 1, b"\1", b"\1"), escapes=(1, b"\xff\xff")),
        ParseReason.INCONSISTENT,
    ),
    "escape for a small step": (
        payload_of((1, 1, b"\1", b"\xff"), escapes=(1, b"\1\0")),
        ParseReason.NOT_CANONICAL,
    ),
    "another total": (payload_of((1, 1, b"\1", b"\1")), ParseReason.DIGEST_MISMATCH),
    "stream of another size": (payload_of((2, 2, b"\1\1\1", b"\2\2")), ParseReason.INCONSISTENT),
    "a frame of nothing": (
        payload_of((1, 1, b"\1", b"\1"), escapes=(0, b"ab")),
        ParseReason.NOT_CANONICAL,
    ),
    "no groups": (payload_of(num_groups=0), ParseReason.OUT_OF_RANGE),
    "too many groups": (payload_of(num_groups=65), ParseReason.OUT_OF_RANGE),
    "cut": (payload_of((1, 1, b"\1", b"\2"))[:-3], ParseReason.TRUNCATED),
    "empty": (b"", ParseReason.TRUNCATED),
    "trailing": (payload_of((1, 1, b"\1", b"\2")) + b"\0", ParseReason.TRAILING_BYTES),
    "no frame": (
        render_u32(37) + struct.pack("<QIIHIIII", 0, 0, 0, 1, 1, 1, 3, 0) + b"abc",
        ParseReason.INCONSISTENT,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.name)
def test_hostile_gap_payloads(name: str, loops: Loops) -> None:
    """Each way a GAP payload can lie is refused with its reason, by all loops."""
    data, reason = HOSTILE[name]
    with pytest.raises(ParseError) as refused:
        decoded(data, Scheme.GAP, bytes(16), "BF16", loops)
    assert refused.value.reason is reason


HOSTILE_CLASSED = {
    "bounds descend": ((300, 10), ParseReason.OUT_OF_RANGE),
    "bound beyond the exponents": ((256, 257), ParseReason.OUT_OF_RANGE),
    "bound of nothing": ((0, 4), ParseReason.OUT_OF_RANGE),
    "past the end of its group": ((1, 2), ParseReason.OUT_OF_RANGE),
}


@pytest.mark.parametrize("name", HOSTILE_CLASSED)
@pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.name)
def test_hostile_classed_payloads(name: str, loops: Loops) -> None:
    """Groups that cannot be are refused; all elements here are in the group of exponent 0."""
    bounds, reason = HOSTILE_CLASSED[name]
    one = (1, 1, b"\1", b"\2")
    with pytest.raises(ParseError) as refused:
        decoded(payload_of(one, one, one, bounds=bounds), Scheme.CLASSED, bytes(16), "BF16", loops)
    assert refused.value.reason is reason


def test_groups_belong_to_classed() -> None:
    """GAP has one group, and integers have no exponents to group by."""
    one = (1, 1, b"\1", b"\2")
    data = payload_of(one, one, bounds=(3,))
    for scheme, dtype in ((Scheme.GAP, "BF16"), (Scheme.CLASSED, "U16")):
        with pytest.raises(ParseError):
            decoded(data, scheme, bytes(16), dtype)


def test_bombs_are_not_expanded() -> None:
    """A frame that declares more, or hides more, than the tensor holds is refused."""
    bomb = frame(bytes(10**7))
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10**6))
    lying = bytearray(frame(bytes(200)))
    lying[5] = 16  # the frame's own content size, one byte in this layout
    for payload in (bomb, hidden, bytes(lying), frame(bytes(16)) + b"\0"):
        dense = render_u32(len(payload) + 1) + b"\0" + payload
        for scheme, data in ((Scheme.DENSE, dense), (Scheme.XOR, payload)):
            with pytest.raises(ParseError):
                decoded(data, scheme, bytes(16), "BF16")


def test_hostile_dense_and_raw() -> None:
    """Unknown dense tags and raw payloads of another size are refused."""
    for data, scheme, reason in (
        (render_u32(1) + b"\2", Scheme.DENSE, ParseReason.OUT_OF_RANGE),
        (render_u32(99) + b"\0", Scheme.DENSE, ParseReason.TRUNCATED),
        (render_u32(0), Scheme.DENSE, ParseReason.TRUNCATED),
        (b"abc", Scheme.RAW, ParseReason.TRUNCATED),
        (b"abcde", Scheme.RAW, ParseReason.TRAILING_BYTES),
        (b"abc", Scheme.XOR, ParseReason.INCONSISTENT),
    ):
        with pytest.raises(ParseError) as refused:
            decoded(data, scheme, bytes(4), "F32")
        assert refused.value.reason is reason


def test_vectors() -> None:
    """The language-neutral vectors decode, or are refused, as they say, with all loops."""
    cases = json.loads((VECTORS / "cases.json").read_text())
    assert {case["scheme"] for case in cases} == {scheme.value for scheme in Scheme}
    for case, loops in itertools.product(cases, LOOPS):
        data, base = (bytes.fromhex(case[key]) for key in ("payload", "base"))
        scheme = Scheme(case["scheme"])
        if "error" in case:
            with pytest.raises(ParseError) as refused:
                decoded(data, scheme, base, case["dtype"], loops)
            assert refused.value.reason.value == case["error"], case["name"]
        else:
            assert decoded(data, scheme, base, case["dtype"], loops).hex() == case["new"]


def test_positions_and_differences_read_the_streams() -> None:
    """The streams of a worked example mean what the specification says."""
    steps = diffed(bytes(300), bytes([*([0] * 259), 1, 0, 254, *([0] * 38)]), "U8")
    assert steps.gaps.tolist() == [255, 4, 1]
    assert steps.codes.tolist() == [2, 3]
    assert positions_of(steps.gaps).tolist() == [259, 261]
    assert differences_of(steps).tolist() == [1, 254]


@pytest.mark.slow
def test_a_tensor_of_more_than_four_gib() -> None:
    """First and last element of 4 GiB + 64 bytes: 64-bit places, and memory of a few chunks."""
    count = 2**31 + 32
    base = np.zeros(count, dtype="<u2")
    new = base.copy()
    new[[0, -1]] = [1, 2]
    tools = Tools(loops=load_loops("numba"))
    found = encode_tensor(base.data.cast("B"), new.data.cast("B"), dtype="BF16", tools=tools)
    assert found is not None
    assert (found.scheme, found.changed_elements) == (Scheme.GAP, 2)
    updates = list(
        decode_tensor(
            memoryview(found.data),
            scheme=found.scheme,
            base=base.data.cast("B"),
            dtype="BF16",
            tools=tools,
        )
    )
    assert [update.part.start for update in updates] == [0, count - count % (CHUNK_BYTES // 2)]
    for update in updates:
        assert isinstance(update.new, Steps)
        tools.loops.add(update.new, base[update.part], kind_of("BF16"))
    assert (int(base[0]), int(base[-1]), int(np.count_nonzero(base))) == (1, 2, 2)
