"""Sorting steps into groups by the exponent before the change, and back, compiled.

Gaps are counted inside a group. Of memory that the groups share only edges are known, see
``delta.gap``. Types are checked by numba, when it compiles.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, types

from paceline.refit.delta.steps import ESCAPE
from paceline.refit.kernels.numba.typed import (
    BYTES,
    COUNTS,
    OPEN,
    OUT_BYTES,
    OUTSIDE,
    compile_for,
    words_type,
)

_TABLE2 = types.Array(types.int64, 2, "C")
_EXPONENT = (types.uint64, types.uint64)


def _count_loop(gaps, old, table, shift, mask, groups):
    found = np.zeros(groups, dtype=np.int64)
    at = -1
    for i in range(len(gaps)):
        gap = np.int64(gaps[i])
        at += gap
        if gap != ESCAPE:
            at += 1
            found[table[np.int64(np.uint64(old[at]) >> shift & mask)]] += 1
    return found


def _split_loop(gaps, codes, old, table, shift, mask, starts, out_gaps, out_codes):
    groups = len(starts) - 1
    ends = starts[:groups].copy()
    since = np.zeros(groups, dtype=np.int64)
    at = 0
    c = 0
    target = -1
    for i in range(len(gaps)):
        gap = np.int64(gaps[i])
        target += gap
        if gap == ESCAPE:
            continue
        target += 1
        while at < target:
            since[table[np.int64(np.uint64(old[at]) >> shift & mask)]] += 1
            at += 1
        group = table[np.int64(np.uint64(old[at]) >> shift & mask)]
        at += 1
        run = since[group]
        since[group] = 0
        while run >= ESCAPE:
            out_gaps[ends[group, 0]] = ESCAPE
            ends[group, 0] += 1
            run -= ESCAPE
        out_gaps[ends[group, 0]] = run
        ends[group, 0] += 1
        out_codes[ends[group, 1]] = codes[c]
        ends[group, 1] += 1
        c += 1
    return ends


def _join_loop(gaps, codes, edges, old, table, shift, mask, out_gaps, out_codes):
    groups = len(edges) - 1
    cursor = edges[:groups].copy()
    left = np.empty(groups, dtype=np.int64)
    for group in range(groups):
        stop = edges[group + 1, 0]
        if stop > edges[group, 0] and gaps[stop - 1] == ESCAPE:
            return OPEN, 0
        ends = 0
        for i in range(edges[group, 0], stop):
            ends += gaps[i] != ESCAPE
        if ends != edges[group + 1, 1] - edges[group, 1]:
            return COUNTS, 0
        left[group] = _next_run(gaps, cursor, group, stop)
    g = c = 0
    last = -1
    for at in range(len(old)):
        group = table[np.int64(np.uint64(old[at]) >> shift & mask)]
        if left[group]:
            left[group] -= 1
            continue
        gap = at - last - 1
        last = at
        while gap >= ESCAPE:
            out_gaps[g] = ESCAPE
            g += 1
            gap -= ESCAPE
        out_gaps[g] = gap
        g += 1
        out_codes[c] = codes[cursor[group, 1]]
        c += 1
        cursor[group, 1] += 1
        left[group] = _next_run(gaps, cursor, group, edges[group + 1, 0])
    return (0 if c == len(codes) else OUTSIDE), g


@njit
def _next_run(gaps: Any, cursor: Any, group: Any, stop: Any) -> Any:
    """Return how many elements of the group stay before its next change; -1: all of them."""
    run = 0
    while cursor[group, 0] < stop:
        gap = np.int64(gaps[cursor[group, 0]])
        cursor[group, 0] += 1
        run += gap
        if gap != ESCAPE:
            return run
    return -1


@lru_cache
def compiled_count(width: int) -> Any:
    """Return how many changes are in each group."""
    return compile_for(_count_loop, BYTES, words_type(width), BYTES, *_EXPONENT, types.int64)


@lru_cache
def compiled_split(width: int) -> Any:
    """Fill gaps and codes of all groups from their starts on; return their ends."""
    inputs = (BYTES, BYTES, words_type(width), BYTES, *_EXPONENT)
    return compile_for(_split_loop, *inputs, _TABLE2, OUT_BYTES, OUT_BYTES)


@lru_cache
def compiled_join(width: int) -> Any:
    """Fill gaps and codes in element order; return the fault and how many gap bytes."""
    inputs = (BYTES, BYTES, _TABLE2, words_type(width), BYTES, *_EXPONENT)
    return compile_for(_join_loop, *inputs, OUT_BYTES, OUT_BYTES)
