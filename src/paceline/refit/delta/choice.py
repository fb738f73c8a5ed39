"""Which scheme a tensor is sent by: the one whose bytes arrive and are in place first.

Sizes are measured, never assumed. What a scheme costs in time is a table of how fast one core
encodes and applies it, in bytes of weights per second: rounded figures of ``benchmarks/codec.py``
on a server core. They decide between schemes whose sizes differ, so their order of magnitude is
what matters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from paceline.refit.manifest.v1 import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way to the slowest receiver, as far as the choice depends on it."""

    bits_per_s: float
    cores: int = 1
    """Cores on either side that share the work on the weights which cross the link."""


LOCAL: Final = Link(bits_per_s=20e9)
"""One machine, or a fast network: the processor is the limit."""

_BYTES_PER_S: Final[Mapping[Scheme, tuple[float, float]]] = {
    Scheme.RAW: (10e9, 10e9),
    Scheme.GAP: (5e9, 6e9),
    Scheme.CLASSED: (0.4e9, 1e9),
    Scheme.DENSE: (0.4e9, 0.8e9),
    Scheme.XOR: (1e9, 1.5e9),
}
"""Scheme -> encode, apply."""
_CLASSED_SHARE_MIN: Final = 0.2
"""CLASSED has been seen at 20 % of GAP (first step after a release) and never below."""
_GAP_IS_GOOD: Final = 4
"""DENSE has to look at every bit; where GAP is this many times smaller than the tensor it lost."""
SMALL_BYTES: Final = 2**16
"""Tensors up to this size are measured by every scheme: that costs nothing."""


def seconds(scheme: Scheme, size: int, *, raw_bytes: int, link: Link) -> float:
    """Return what a tensor takes from encoding to being in place: CPU on both sides, and wire."""
    encode, apply = _BYTES_PER_S[scheme]
    work = raw_bytes / encode + raw_bytes / apply
    return work / link.cores + size * 8 / link.bits_per_s


def choose(sizes: Mapping[Scheme, int], *, raw_bytes: int, link: Link) -> Scheme:
    """Return the scheme that is done first; of equals the smallest. ``sizes`` is not empty."""
    return min(
        sizes,
        key=lambda scheme: (
            seconds(scheme, sizes[scheme], raw_bytes=raw_bytes, link=link),
            sizes[scheme],
        ),
    )


def is_classed_worth_measuring(gap_bytes: int, *, raw_bytes: int, link: Link) -> bool:
    """Say whether CLASSED would be done before GAP at the best size that it can have."""
    best = int(gap_bytes * _CLASSED_SHARE_MIN)
    return seconds(Scheme.CLASSED, best, raw_bytes=raw_bytes, link=link) < seconds(
        Scheme.GAP, gap_bytes, raw_bytes=raw_bytes, link=link
    )


def is_dense_worth_measuring(gap_bytes: int | None, *, raw_bytes: int) -> bool:
    """Say whether so much changes that coding every element may be smaller."""
    return gap_bytes is None or gap_bytes * _GAP_IS_GOOD > raw_bytes or raw_bytes <= SMALL_BYTES
