"""Which dtype each tensor travels in: an explicit policy, and a report of what it does.

Values and decisions; nothing is cast here. Rounding is to the nearest, ties to even, and never by
chance: the same weights must give the same bytes, or every publish would be a new version.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, Self

from paceline.refit.model import DTYPE_BITS

KEEP: Final = "KEEP"
"""Instead of a dtype word: the tensor is sent as it is."""
FLOATS: Final = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0")
NARROW: Final = frozenset({"F16", "F8_E4M3", "F8_E5M2", "F8_E8M0"})
"""Dtypes whose range is smaller than that of fp32 masters: a weight may not fit. What is smaller
than that of F64 is all the others."""
MASTERS: Final = frozenset({"F32", "F64"})
ROUTERS: Final = ("*.router.*", "*.gate.weight", "*.gate.bias", "*e_score_correction_bias")
"""Globs of what picks experts, which engines may hold wider than the rest."""


class Unmatched(StrEnum):
    """What becomes of a master that no rule names."""

    KEEP = "keep"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePolicy:
    """What floating-point tensors are rounded to; integers never are."""

    rules: Mapping[str, str]
    """Glob over names -> dtype word or KEEP; the first match counts."""
    unmatched: Unmatched = Unmatched.REFUSE
    casts_buffers: bool = False
    """Rules reach buffers too; otherwise those are sent as they are."""

    def __post_init__(self) -> None:
        for pattern, word in self.rules.items():
            if word != KEEP and word not in FLOATS:
                known = ", ".join((*FLOATS, KEEP))
                raise ValueError(f"wire dtype {word!r} of {pattern!r}: one of {known}")

    @classmethod
    def of(cls, given: "WireDtypes") -> Self | "DtypePolicy":
        """Return a policy as it is; a mapping alone rounds what it names and keeps the rest."""
        if isinstance(given, DtypePolicy):
            return given
        return cls(rules=given or {}, unmatched=Unmatched.KEEP, casts_buffers=True)

    @classmethod
    def everything(cls, word: str, *, keep: Sequence[str] = ROUTERS) -> Self:
        """Return the policy that rounds all parameters but those that match ``keep``."""
        return cls(rules={**dict.fromkeys(keep, KEEP), "*": word})

    @property
    def keeps_bits(self) -> bool:
        """Whether everything is sent as it lies in memory."""
        return all(word == KEEP for word in self.rules.values())

    def decide(self, name: str, *, held: str, is_buffer: bool = False) -> tuple[str, str]:
        """Return the dtype word that a tensor is sent in, and what decided so.

        Raises:
            ValueError: it is a master, and no rule names it.
        """
        if held not in FLOATS:
            return held, "no float"
        if is_buffer and not self.casts_buffers:
            return held, "buffer"
        for pattern, word in self.rules.items():
            if fnmatchcase(name, pattern):
                return (held if word == KEEP else word), pattern
        if self.unmatched is Unmatched.REFUSE and held in MASTERS:
            raise ValueError(
                f"tensor {name!r} is {held} and no rule of wire_dtypes names it: add one, with "
                f"{KEEP} to send it as it is"
            )
        return held, "no rule"


WireDtypes = Mapping[str, str] | DtypePolicy | None
"""A policy, or its rules alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How one tensor travels."""

    name: str
    held: str
    """Dtype word in the trainer."""
    sent: str
    """Dtype word on the wire."""
    decided_by: str
    """A rule's glob, or in words."""
    num_elements: int

    @property
    def is_cast(self) -> bool:
        """Whether bits may change on the way."""
        return self.held != self.sent

    @property
    def is_narrowed(self) -> bool:
        """Whether a weight may be too large for what it is sent in."""
        return self.is_cast and (self.sent in NARROW or self.held == "F64")


def summarise(rows: Iterable[Sent]) -> str:
    """Return one line: how many tensors and bytes are rounded from what to what, and kept."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        count, elements = found.get((row.held, row.sent), (0, 0))
        found[row.held, row.sent] = (count + 1, elements + row.num_elements)
    parts = []
    for (held, sent), (count, elements) in sorted(found.items()):
        size = math.ceil(elements * DTYPE_BITS[sent] / 8 / 2**20)
        how = f"{held} kept" if held == sent else f"{held} rounded to {sent}"
        parts.append(f"{how}: {count} tensors, {size} MiB")
    return "; ".join(parts)
