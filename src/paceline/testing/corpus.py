"""The bit-exactness corpus: tensors before and after a step that codecs and engines get wrong.

Every case goes through every path that moves weights; bytes are compared, never values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.refit.model import DTYPE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One tensor before and after."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    base: bytes
    new: bytes


def corpus() -> Sequence[Case]:
    """Return every case; the same each time."""
    return (*_special_words(), *_shapes(), *_gaps(), *_densities())


def _special_words() -> Sequence[Case]:
    bf16 = [0x7FC0, 0x7F81, 0xFFA5, 0xFFFF, 0x0000, 0x8000, 0x0001, 0x007F, 0x8001, 0x0080]
    bf16 += [0x7F80, 0xFF80, 0x7F7F, 0xFF7F]
    f32 = [0x7F800001, 0x7FC0DEAD, 0x00000000, 0x80000000, 0x3F800011, 0xFF7FFFFF, 0x00000001]
    f64 = [0x7FF0000000000001, 0x8000000000000000, 0x1, 0xFFEFFFFFFFFFFFFF, 0x0]
    f8 = [0x7F, 0xFF, 0x80, 0x00, 0x7C, 0xFC, 0x01]
    words = {
        "BF16": bf16,
        "F16": [0x7C01, 0x7E00, 0xFC00, 0x8000, 0x0000, 0x0001, 0x03FF, 0x0400],
        "F32": f32,
        "F64": f64,
        "C64": f64,
        "F8_E4M3": f8,
        "F8_E5M2": f8,
        "F8_E8M0": f8,
        "I32": [383, 384, 2**24 + 1, 2**31, 2**32 - 1],
        "I64": [0, 2**63, 2**64 - 1, 2**53 + 1],
        "U16": [0, 1, 0xFFFF, 0x8000],
        "U8": [0, 15, 240, 255],
        "BOOL": [0, 1, 1, 0],
    }
    return [
        _case(f"{dtype}: special words change into each other", dtype, found, found[1:] + found[:1])
        for dtype, found in words.items()
    ]


def _shapes() -> Sequence[Case]:
    return [
        _case("0-dim", "BF16", [0x3F80], [0x3F81], shape=()),
        _case("0-dim F32, sign of zero", "F32", [0], [0x80000000], shape=()),
        _case("empty vector", "BF16", [], [], shape=(0,)),
        _case("empty matrix", "F32", [], [], shape=(0, 128)),
        _case("odd count of bytes", "U8", [1, 2, 3], [1, 2, 4]),
    ]


def _gaps() -> Sequence[Case]:
    found = []
    for gap in (0, 1, 254, 255, 256, 510, 65534, 65535, 65536, 65537, 131072):
        base = np.full(gap + 3, 0x3F80, dtype=np.uint16)
        new = base.copy()
        new[0] += 1
        new[gap + 1] += 1
        found.append(_case(f"gap of {gap}", "BF16", base.tolist(), new.tolist()))
    base = np.zeros(200_000, dtype=np.uint16)
    last = base.copy()
    last[-1] = 1
    return [*found, _case("only the last of many", "BF16", base.tolist(), last.tolist())]


def _densities() -> Sequence[Case]:
    random = np.random.default_rng(7)
    base = random.integers(0x3C00, 0x4000, 5000, dtype=np.uint16)
    noise = random.integers(0, 0x10000, 5000, dtype=np.uint16)
    single = random.integers(0, 2**32, 3000, dtype=np.uint32)
    return [
        _case("nothing changes", "BF16", base.tolist(), base.tolist()),
        _case("every element by one step", "BF16", base.tolist(), (base + 1).tolist()),
        _case("every element, random bits", "BF16", base.tolist(), noise.tolist()),
        _case("all elements become equal", "BF16", base.tolist(), [0x3F80] * 5000),
        _case("rows swap", "F32", single.tolist(), np.roll(single, 100).tolist(), shape=(30, 100)),
    ]


def _case(
    name: str, dtype: str, base: list[int], new: list[int], *, shape: tuple[int, ...] | None = None
) -> Case:
    form = f"<u{DTYPE_BITS[dtype] // 8}"
    return Case(
        name=name,
        dtype=dtype,
        shape=(len(base),) if shape is None else shape,
        base=np.array(base, dtype=form).tobytes(),
        new=np.array(new, dtype=form).tobytes(),
    )
