"""Compiled loops behind the codec's interface: byte for byte the reference, without the GIL.

The first call for an element width compiles (a second or two, then cached on disk). Memory that
is not aligned goes to the reference.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from paceline.refit.delta.loops import (
    WHERE,
    Bytes,
    Group,
    NumpyLoops,
    check_escapes,
    outside,
    show,
    wrong_total,
)
from paceline.refit.delta.order import WordKind, Words
from paceline.refit.delta.steps import ESCAPE, Steps
from paceline.refit.errors import ParseError, ParseReason
from paceline.refit.kernels.numba.compiled import (
    compiled_add,
    compiled_check,
    compiled_diff,
    compiled_put,
    compiled_take,
    order_of,
)
from paceline.refit.kernels.numba.groups import compiled_count, compiled_join, compiled_split
from paceline.refit.kernels.numba.typed import COUNTS, OPEN, OUTSIDE

_REFUSALS: Final = {
    OPEN: (ParseReason.TRUNCATED, "the last gap does not end"),
    COUNTS: (ParseReason.INCONSISTENT, "gaps and codes differ in number"),
}


_FEW: Final = 8
"""Room for one change in so many elements is tried first: large buffers come as huge pages,
and clearing those takes as long as finding the changes."""


_NEAR_BYTES: Final = 2**19
"""Written and read again before the second cache of a core forgets it."""


class NumbaLoops:
    """Compiled loops; memory that is not aligned goes to the reference."""

    name = "numba"

    def __init__(self) -> None:
        self._reference = NumpyLoops()

    def diff(
        self, old: Words, new: Words, kind: WordKind, *, first: int, most: int
    ) -> Steps | None:
        """Return what turns ``old`` into ``new``."""
        if not (_fits(old) and _fits(new)):
            return self._reference.diff(old, new, kind, first=first, most=most)
        few = len(old) // _FEW
        if few < most:
            found = _diff_into(old, new, kind, first, (few, few // _FEW))
            if found is not None:
                return found
        return _diff_into(old, new, kind, first, (most, most))

    def check(
        self, steps: Steps, old: Words, kind: WordKind, *, first: int, keep: bool = False
    ) -> Steps:
        """Refuse steps that do not fit."""
        if not _fits(old):
            return self._reference.check(steps, old, kind, first=first, keep=keep)
        after = np.empty(len(steps) if keep else 0, dtype=old.dtype)
        fault, total = compiled_check(kind.width)(
            steps.gaps, steps.codes, steps.escapes, old, order_of(kind), first, after
        )
        if fault or (len(steps.escapes) and int(steps.escapes.min()) < ESCAPE):
            check_escapes([steps.codes], steps.escapes)
        _refuse(fault, len(old))
        if total != steps.total:
            raise wrong_total()
        return replace(steps, after=after) if keep else steps

    def take(self, steps: Steps, words: Words) -> Words:
        """Copy the words at the positions."""
        if not _fits(words):
            return self._reference.take(steps, words)
        found = np.empty(len(steps), dtype=words.dtype)
        compiled_take(words.itemsize)(steps.gaps, words, found)
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
        if not _fits(words):
            self._reference.add(steps, words, kind, sign=sign, seen=seen)
            return
        if steps.after is not None and sign > 0:
            self._put(steps, steps.after, words, kind, seen)
            return
        order = order_of(kind)
        compiled_add(kind.width)(steps.gaps, steps.codes, steps.escapes, words, order, sign < 0)
        if seen is not None:
            show(seen, words, undo=lambda: self.add(steps, words, kind, sign=-sign))

    def _put(
        self,
        steps: Steps,
        after: Words,
        words: Words,
        kind: WordKind,
        seen: Callable[[Words], object] | None,
    ) -> None:
        """Write known words; show each stretch while it is in the cache of this core."""
        put, state = compiled_put(kind.width), np.zeros(3, dtype=np.int64)
        if seen is None:
            put(steps.gaps, words, after, state, len(words))
            return
        shown = 0
        try:
            for goal in range(_NEAR_BYTES // kind.width, len(words), _NEAR_BYTES // kind.width):
                put(steps.gaps, words, after, state, goal)
                stretch, shown = slice(shown, int(state[2])), int(state[2])
                seen(words[stretch])
            put(steps.gaps, words, after, state, len(words))
            seen(words[shown:])
        except BaseException:  # all or nothing, also when interrupted between two stretches
            self.add(_beginning(steps, int(state[0]), int(state[1])), words, kind, sign=-1)
            raise

    def split(self, steps: Steps, old: Words, kind: WordKind, table: Bytes) -> list[Group]:
        """Sort by the exponent before the change."""
        if not _fits(old):
            return self._reference.split(steps, old, kind, table)
        count = int(table.max()) + 1
        starts = np.zeros((count + 1, 2), dtype=np.int64)
        of_groups = compiled_count(kind.width)(
            steps.gaps, old, table, kind.exponent_shift, kind.mask_of_exponent, count
        )
        starts[1:, 1] = np.cumsum(of_groups)
        starts[1:, 0] = np.cumsum(of_groups + len(old) // ESCAPE + 1)
        gaps = np.empty(int(starts[-1, 0]), dtype=np.uint8)
        codes = np.empty(len(steps), dtype=np.uint8)
        ends = compiled_split(kind.width)(
            steps.gaps, steps.codes, old, table, kind.exponent_shift, kind.mask_of_exponent,
            starts, gaps, codes,
        )  # fmt: skip
        return [
            (gaps[starts[i, 0] : ends[i, 0]], codes[starts[i, 1] : ends[i, 1]])
            for i in range(count)
        ]

    def join(
        self, groups: list[Group], escapes: Words, old: Words, kind: WordKind, table: Bytes
    ) -> Steps:
        """Take ``split`` back."""
        if not _fits(old):
            return self._reference.join(groups, escapes, old, kind, table)
        edges = np.zeros((len(groups) + 1, 2), dtype=np.int64)
        edges[1:] = np.cumsum([[len(gaps), len(codes)] for gaps, codes in groups], axis=0)
        gaps, codes = (np.concatenate([group[i] for group in groups]) for i in (0, 1))
        joined = np.empty(len(codes) + len(old) // ESCAPE + 1, dtype=np.uint8)
        sorted_codes = np.empty(len(codes), dtype=np.uint8)
        fault, count = compiled_join(kind.width)(
            gaps, codes, edges, old, table, kind.exponent_shift, kind.mask_of_exponent,
            joined, sorted_codes,
        )  # fmt: skip
        _refuse(fault, len(old))
        return Steps(gaps=joined[:count], codes=sorted_codes, escapes=escapes, total=0)


def _diff_into(
    old: Words, new: Words, kind: WordKind, first: int, room: tuple[int, int]
) -> Steps | None:
    """Return the steps, or None if there is not enough room for codes or for escapes."""
    gaps = np.empty(room[0] + len(old) // ESCAPE + 1, dtype=np.uint8)
    codes = np.empty(room[0], dtype=np.uint8)
    escapes = np.empty(room[1], dtype=old.dtype)
    out = np.zeros(3, dtype=np.int64)
    total = compiled_diff(kind.width)(old, new, order_of(kind), first, gaps, codes, escapes, out)
    if out[1] < 0:
        return None
    return Steps(
        gaps=gaps[: out[0]], codes=codes[: out[1]], escapes=escapes[: out[2]], total=int(total)
    )


def _beginning(steps: Steps, gap_bytes: int, changes: int) -> Steps:
    codes = steps.codes[:changes]
    escapes = steps.escapes[: np.count_nonzero(codes == ESCAPE)]
    return Steps(gaps=steps.gaps[:gap_bytes], codes=codes, escapes=escapes, total=0)


def _fits(words: Words) -> bool:
    return words.flags.aligned and words.flags.c_contiguous


def _refuse(fault: int, num_elements: int) -> None:
    if fault == OUTSIDE:
        raise outside(num_elements)
    if fault:
        reason, detail = _REFUSALS[fault]
        raise ParseError(reason, WHERE, detail)
