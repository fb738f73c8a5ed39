"""The loops over elements that the codec is made of, and their reference in numpy.

Faster ones are in ``refit.kernels``; all give the same bytes. None of them writes anything but
``add``, which writes exactly the elements of steps that ``check`` has passed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.refit.delta.mixing import digest_change
from paceline.refit.delta.order import (
    Positions,
    WordKind,
    Words,
    exponents,
    rank,
    unrank,
)
from paceline.refit.delta.steps import (
    ESCAPE,
    Steps,
    differences_of,
    gap_bytes,
    positions_of,
    steps_of,
)
from paceline.refit.errors import ParseError, ParseReason

WHERE = "payload.gap"
Bytes = npt.NDArray[np.uint8]
Group = tuple[Bytes, Bytes]
"""Gaps and codes of the elements of one group, the gaps counted within the group."""


class Loops(Protocol):
    """Pure functions over one chunk, except where they say that they write."""

    name: str

    def diff(
        self, old: Words, new: Words, kind: WordKind, *, first: int, most: int
    ) -> Steps | None:
        """Return what turns ``old`` into ``new``, or None if more than ``most`` elements differ.

        ``first`` is the chunk's place in its tensor.
        """

    def check(
        self, steps: Steps, old: Words, kind: WordKind, *, first: int, keep: bool = False
    ) -> Steps:
        """Return the steps, with the words that they lead to if ``keep``; refuse a misfit.

        Raises:
            ParseError: a position outside, an open gap, counts that disagree, a code that is not
                the shortest or changes nothing, a total that does not come out.
        """

    def take(self, steps: Steps, words: Words) -> Words:
        """Return a copy of the words at the positions of checked steps."""

    def add(
        self,
        steps: Steps,
        words: Words,
        kind: WordKind,
        *,
        sign: int = 1,
        seen: Callable[[Words], object] | None = None,
    ) -> None:
        """Write the words that checked steps lead to; with ``sign`` -1 take them back.

        ``words`` are those that the steps were checked against, or what came of them.
        ``seen`` is given all of ``words``, stretch by stretch, each once it is written.
        All of them or, if it or ``seen`` raises, none.
        """

    def split(self, steps: Steps, old: Words, kind: WordKind, table: Bytes) -> list[Group]:
        """Sort checked steps into groups by the exponent of the word before the change.

        ``table`` maps each exponent to its group, from 0 without a hole.
        """

    def join(
        self, groups: list[Group], escapes: Words, old: Words, kind: WordKind, table: Bytes
    ) -> Steps:
        """Take ``split`` back; the total of the result is 0.

        Raises:
            ParseError: an open gap, counts that disagree, a position past the end of its group.
        """


class NumpyLoops:
    """The reference: whole-array expressions, no compiler needed."""

    name = "numpy"

    def diff(
        self, old: Words, new: Words, kind: WordKind, *, first: int, most: int
    ) -> Steps | None:
        """Return what turns ``old`` into ``new``."""
        at = np.flatnonzero(old != new)
        if len(at) > most:
            return None
        before, after = old[at], new[at]
        return steps_of(
            at,
            rank(after, kind) - rank(before, kind),
            total=digest_change(at + first, before, after),
        )

    def check(
        self, steps: Steps, old: Words, kind: WordKind, *, first: int, keep: bool = False
    ) -> Steps:
        """Refuse steps that do not fit."""
        check_counts(steps.gaps, steps.codes, len(old))
        check_escapes([steps.codes], steps.escapes)
        at = positions_of(steps.gaps)
        before = old[at]
        after = unrank(rank(before, kind) + differences_of(steps), kind)
        if digest_change(at + first, before, after) != steps.total:
            raise wrong_total()
        return replace(steps, after=after) if keep else steps

    def take(self, steps: Steps, words: Words) -> Words:
        """Copy the words at the positions."""
        found: Words = words[positions_of(steps.gaps)]
        return found

    def add(
        self,
        steps: Steps,
        words: Words,
        kind: WordKind,
        *,
        sign: int = 1,
        seen: Callable[[Words], object] | None = None,
    ) -> None:
        """Write the words that the steps lead to."""
        at = positions_of(steps.gaps)
        before = words[at]
        if steps.after is not None and sign > 0:
            words[at] = steps.after
        else:
            change = differences_of(steps)
            ranks = rank(before, kind)
            words[at] = unrank(ranks + change if sign > 0 else ranks - change, kind)
        if seen is not None:
            show(seen, words, undo=lambda: words.__setitem__(at, before))

    def split(self, steps: Steps, old: Words, kind: WordKind, table: Bytes) -> list[Group]:
        """Sort by the exponent before the change."""
        group_of = table[exponents(old, kind)]
        at = positions_of(steps.gaps)
        found = []
        for group in range(int(table.max()) + 1):
            mine = group_of[at] == group
            members = np.flatnonzero(group_of == group)
            within = np.searchsorted(members, at[mine])
            found.append((gap_bytes(within), steps.codes[mine]))
        return found

    def join(
        self, groups: list[Group], escapes: Words, old: Words, kind: WordKind, table: Bytes
    ) -> Steps:
        """Take ``split`` back."""
        group_of = table[exponents(old, kind)]
        at = []
        for group, (gaps, codes) in enumerate(groups):
            members = np.flatnonzero(group_of == group)
            check_counts(gaps, codes, len(members))
            at.append(members[positions_of(gaps)])
        positions = np.concatenate(at)
        order = np.argsort(positions)
        codes = np.concatenate([codes for _, codes in groups])[order]
        return Steps(gaps=gap_bytes(positions[order]), codes=codes, escapes=escapes, total=0)


def show(seen: Callable[[Words], object], words: Words, *, undo: Callable[[], object]) -> None:
    """Show written words; if that raises, take them back first."""
    try:
        seen(words)
    except BaseException:  # also when interrupted
        undo()
        raise


def check_counts(gaps: Bytes, codes: Bytes, num_elements: int) -> None:
    """Refuse an open gap, more or fewer gaps than codes, and a position past the end."""
    if len(gaps) and gaps[-1] == ESCAPE:
        raise ParseError(ParseReason.TRUNCATED, WHERE, "the last gap does not end")
    ends = int(np.count_nonzero(gaps != ESCAPE))
    if ends != len(codes):
        raise ParseError(ParseReason.INCONSISTENT, WHERE, f"{ends} gaps, {len(codes)} codes")
    if int(gaps.sum(dtype=np.int64)) + ends > num_elements:
        raise outside(num_elements)


def check_escapes(codes: list[Bytes], escapes: Words) -> Positions:
    """Refuse another number of escapes than codes ask for, and codes that are not canonical.

    Returns where in all codes together the escapes belong.
    """
    together = codes[0] if len(codes) == 1 else np.concatenate(codes)
    spots = np.flatnonzero(together == ESCAPE)
    if len(spots) != len(escapes):
        detail = f"{len(escapes)} escapes for {len(spots)} codes"
        raise ParseError(ParseReason.INCONSISTENT, WHERE, detail)
    if len(escapes) and int(escapes.min()) < ESCAPE:
        raise ParseError(ParseReason.NOT_CANONICAL, WHERE, "an escape for a small step")
    if not together.all():
        raise ParseError(ParseReason.NOT_CANONICAL, WHERE, "a step that changes nothing")
    return spots


def outside(num_elements: int) -> ParseError:
    """Return the refusal of a position past the end."""
    return ParseError(ParseReason.OUT_OF_RANGE, WHERE, f"a position past {num_elements} elements")


def wrong_total() -> ParseError:
    """Return the refusal of steps that do not give the digest they claim."""
    return ParseError(
        ParseReason.DIGEST_MISMATCH, WHERE, "the steps lead elsewhere: damage, or another base"
    )
