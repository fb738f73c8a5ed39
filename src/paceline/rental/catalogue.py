"""Canonical names of what can be rented, ``<gpu>-<n>x``, and what is wrong with other names."""

import re
from dataclasses import dataclass

from paceline.core.errors import UsageError

_TARGET = re.compile(r"([a-z][a-z0-9]*(?:-[a-z0-9]+)*)-([1-9][0-9]{0,3})x")
_AMBIGUOUS = {"a100": ("a100-40gb", "a100-80gb")}
"""Names that providers sell two things under, which differ in memory and price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """A kind of processor and how many of them in one machine."""

    gpu: str
    count: int

    def __str__(self) -> str:
        """Return the canonical token."""
        return f"{self.gpu}-{self.count}x"


def parse_target(text: str) -> GpuTarget:
    """Return what ``text`` names: ``h100-8x``, ``a100-80gb-1x``, ``cpu-2x``.

    Raises:
        UsageError: not of that form, or a name that stands for two things.
    """
    found = _TARGET.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{text!r} is no machine: write <gpu>-<n>x in lower case, such as h100-1x, "
            "rtx4090-2x or cpu-1x"
        )
    gpu, count = found.group(1), int(found.group(2))
    if gpu in _AMBIGUOUS:
        choices = " or ".join(f"{choice}-{count}x" for choice in _AMBIGUOUS[gpu])
        raise UsageError(f"{text!r} is sold with 40 and with 80 GB; write {choices}")
    return GpuTarget(gpu=gpu, count=count)
