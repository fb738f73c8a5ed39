"""The loops themselves, in the subset of Python that numba compiles.

Finding what differs is the loop that everything waits for. It compares 64 elements at once by a
vector instruction of LLVM's own language, which every processor's code generator turns into the
widest compare that it has, and then visits only the bits that are set.

All arithmetic is in unsigned 64-bit words with explicit masks: numba turns a mixture of signed
and unsigned 64-bit numbers into floats. Signs of steps are random, so there are no branches on
them. ``order`` is what ``order_of`` returns. Types are checked by numba, when it compiles.
"""

from functools import lru_cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.refit.delta.mixing import CURVE, FOLD, PLACE
from paceline.refit.delta.order import WordKind
from paceline.refit.delta.steps import ESCAPE
from paceline.refit.kernels.numba.typed import (
    BYTES,
    COUNTS,
    NOTHING,
    OPEN,
    OUT_BYTES,
    OUTSIDE,
    compile_for,
    words_type,
)

_LANES: Final = 64
_ROW: Final = 2**12
"""Elements whose masks are collected before they are visited; they stay in the first cache."""
_STEP_ROW: Final = 2**10
"""Gap bytes that are read before the words behind them: few enough that their places, codes and
words stay in the first cache together."""
_LINE_BYTES: Final = 64
_DENSE: Final = np.uint64(2)
"""Lines per change up to which all of them are fetched in order."""
_FRACTION: Final = np.uint64(16)
_U0, _U1, _ESCAPE = np.uint64(0), np.uint64(1), np.uint64(ESCAPE)
_PLACE, _CURVE, _FOLD = np.uint64(PLACE), np.uint64(CURVE), np.uint64(FOLD)


def order_of(kind: WordKind) -> tuple[np.uint64, ...]:
    """Return what ``_rank`` works with: place of the top bit, all bits, and what to flip."""
    low = 1 << 8 * kind.width - 1 if kind.is_sign_magnitude else 0
    flips = kind.mask >> 1 if kind.is_sign_magnitude else 0
    return tuple(np.uint64(part) for part in (8 * kind.width - 1, kind.mask, low, flips))


@intrinsic
def differs(typing_context: Any, one: Any, other: Any, at: Any) -> Any:
    """Compare 64 elements from ``at`` on; bit i of the result: element at + i differs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(one.dtype.bitwidth), _LANES)
        loaded = []
        for value, array in zip(args[:2], signature.args[:2], strict=True):
            data = context.make_array(array)(context, builder, value).data
            place = builder.bitcast(builder.gep(data, [args[2]]), vector.as_pointer())
            loaded.append(builder.load(place, align=1))
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(_LANES))

    return types.uint64(one, other, types.intp), generate


@intrinsic
def _escaped(typing_context: Any, codes: Any, at: Any) -> Any:
    """Look at 64 bytes from ``at`` on; bit i of the result: byte at + i stands for more."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(8), _LANES)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        wanted = ir.Constant(vector, [ESCAPE] * _LANES)
        equal = builder.icmp_unsigned("==", builder.load(place, align=1), wanted)
        return builder.bitcast(equal, ir.IntType(_LANES))

    return types.uint64(codes, types.intp), generate


@intrinsic
def _fetch(typing_context: Any, words: Any, at: Any) -> Any:
    """Ask for the line of one word and do not wait; a place outside is asked for in vain."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(ask, [place, number(0), number(3), number(1)])  # to read, near, data
        return context.get_dummy_value()

    return types.void(words, at), generate


@intrinsic
def _lowest(typing_context: Any, bits: Any) -> Any:
    """Return the place of the lowest bit that is set, 64 if none is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def population(typing_context: Any, bits: Any) -> Any:
    """Return how many bits are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@njit
def _rank(word: Any, order: Any) -> Any:
    top, _, low, flips = order  # signs are random: arithmetic, no branch that guesses them
    return word ^ low ^ (flips & (_U0 - (word >> top)))


@njit
def _unrank(place: Any, order: Any) -> Any:
    top, _, low, flips = order
    return place ^ low ^ flips ^ (flips & (_U0 - (place >> top)))


@njit
def _digested(at: Any, before: Any, after: Any) -> Any:
    """Return what one element does to the additive digest."""
    keyed = np.uint64(at) * _PLACE
    return (after - before) * ((before + after) * _CURVE + _U1) * (keyed ^ keyed >> _FOLD | _U1)


@njit
def _moved(word, code, order, back):
    """Return where a step leads from ``word``, or where it came from."""
    step = (code >> _U1) ^ (order[1] & (_U0 - (code & _U1)))
    step = (step ^ (_U0 - back)) + back
    return _unrank((_rank(word, order) + step) & order[1], order)


@njit
def _locate(gaps, start, following, at):
    """Write the places that a row of gap bytes leads to; return how many, and where gaps go on.

    Places first, words second, and a row ahead of the words: the processor then waits for many
    lines of memory at once. They are unsigned, so that numba does not look for negative indices.
    """
    mine = gaps[start : start + _STEP_ROW]
    long_gaps = 0
    for j in range(len(mine)):
        long_gaps += mine[j] == ESCAPE
    if not long_gaps:
        following -= _U1
        whole = len(mine) // 4 * 4
        for j in range(0, whole, 4):  # by fours: a sum over all waits for itself every time
            one = np.uint64(mine[j]) + _U1
            two = one + np.uint64(mine[j + 1]) + _U1
            three = two + np.uint64(mine[j + 2]) + _U1
            at[j], at[j + 1], at[j + 2] = following + one, following + two, following + three
            following += three + np.uint64(mine[j + 3]) + _U1
            at[j + 3] = following
        for j in range(whole, len(mine)):
            following += np.uint64(mine[j]) + _U1
            at[j] = following
        following += _U1
        return len(mine), following
    count = _U0
    for j in range(len(mine)):
        gap = np.uint64(mine[j])
        ends = np.uint64(gap != _ESCAPE)
        following += gap + ends
        at[count] = following - _U1
        count += ends
    return np.int64(count), following


@njit
def _pace(words, coming, more, count):
    """Return from where, how far apart and how often per word lines are asked for; 0: exactly.

    Where the coming places lie dense, every line from the first to the last is asked for: lines
    that are skipped here and there stop the processor's own fetching ahead.
    """
    if not more or not count:
        return _U0, _U0, _U0
    since, number = np.uint64(coming[0]), np.uint64(count)
    span = np.uint64(coming[more - 1]) - since + _U1
    times = span * np.uint64(words.itemsize) // (np.uint64(_LINE_BYTES) * number) + _U1
    if times > _DENSE:
        return _U0, _U0, _U0
    return since << _FRACTION, (span << _FRACTION) // (number * times), times


@njit
def _gather(words, at, count, coming, more, found):
    """Copy the words at ``count`` places, and ask for the lines of the coming ones."""
    line, apart, times = _pace(words, coming, more, count)
    for j in range(count):
        if not times:
            _fetch(words, coming[j])
        for _ in range(times):
            _fetch(words, line >> _FRACTION)
            line += apart
        found[j] = words[at[j]]


@njit
def _scatter(words, at, count, coming, more, news):
    """Write words to ``count`` places, and ask for the lines of the coming ones."""
    line, apart, times = _pace(words, coming, more, count)
    for j in range(count):
        if not times:
            _fetch(words, coming[j])
        for _ in range(times):
            _fetch(words, line >> _FRACTION)
            line += apart
        words[at[j]] = news[j]


@njit
def _read_codes(codes, c, count, escapes, e, found):
    """Write codes in full; return how many escapes they ask for, there or not."""
    mine = codes[c : c + count]  # a view: numba cannot see that c + j is not negative
    for j in range(count):
        found[j] = mine[j]
    whole = count // _LANES * _LANES
    for start in range(0, whole, _LANES):
        bits = _escaped(mine, start)
        while bits:
            if e < len(escapes):
                found[start + _lowest(bits)] = escapes[e]
            e += 1
            bits &= bits - _U1
    for j in range(whole, count):
        if mine[j] == ESCAPE:
            if e < len(escapes):
                found[j] = escapes[e]
            e += 1
    return e


@njit
def _find(old: Any, new: Any, start: Any, stop: Any, masks: Any, places: Any) -> Any:
    """Collect the groups of 64 elements in which something differs; return how many.

    Whether one does is a coin toss that no processor predicts, so there is no branch on it.
    """
    found = 0
    whole = start + (stop - start) // _LANES * _LANES
    for at in range(start, whole, _LANES):
        bits = differs(old, new, at)
        masks[found] = bits
        places[found] = at
        found += np.int64(bits != _U0)
    if whole < stop:
        bits = _U0
        for at in range(whole, stop):
            if old[at] != new[at]:
                bits |= _U1 << np.uint64(at - whole)
        masks[found] = bits
        places[found] = whole
        found += np.int64(bits != _U0)
    return found


@njit
def _list(masks: Any, places: Any, found: Any, at: Any) -> Any:
    """Write the places of all bits behind ``at[0]``; return how many.

    Eight are written whether they are there or not: guessing how many costs more. What is
    written too much is overwritten by the next group, or never read.
    """
    count = 1
    for i in range(found):
        bits = masks[i]
        place = places[i]
        size = np.int64(population(bits))
        for j in range(8):
            at[count + j] = place + _lowest(bits)
            bits &= bits - _U1
        for j in range(8, size):
            at[count + j] = place + _lowest(bits)
            bits &= bits - _U1
        count += size
    return count - 1


@njit
def _write_gaps(at, count, gaps, g):
    """Write the gaps before ``at[1]`` to ``at[count]``; return where the stream ends."""
    mine = gaps[g : g + count]
    largest = 0
    for j in range(count):
        gap = at[j + 1] - at[j] - 1
        mine[j] = gap
        largest = max(largest, gap)
    if largest < ESCAPE:
        return g + count
    for j in range(count):
        gap = at[j + 1] - at[j] - 1
        while gap >= ESCAPE:
            gaps[g] = ESCAPE
            g += 1
            gap -= ESCAPE
        gaps[g] = gap
        g += 1
    return g


@njit
def _code(before: Any, after: Any, order: Any) -> Any:
    step = (_rank(after, order) - _rank(before, order)) & order[1]
    return ((step << _U1) & order[1]) ^ (order[1] & (_U0 - (step >> order[0])))


def _diff_loop(old, new, order, first, gaps, codes, escapes, out):
    most = len(codes)
    g = c = e = 0
    total = _U0
    masks = np.empty(_ROW // _LANES + 1, dtype=np.uint64)
    places = np.empty(_ROW // _LANES + 1, dtype=np.int64)
    at = np.empty(_ROW + 10, dtype=np.int64)
    before = np.empty(_ROW, dtype=np.uint64)
    after = np.empty(_ROW, dtype=np.uint64)
    at[0] = -1
    for start in range(0, len(old), _ROW):
        found = _find(old, new, start, min(start + _ROW, len(old)), masks, places)
        count = _list(masks, places, found, at)
        if c + count > most:
            out[1] = -1
            return total
        g = _write_gaps(at, count, gaps, g)
        for j in range(count):
            p = np.uint64(at[j + 1])
            before[j] = old[p]
            after[j] = new[p]
        far = _U0
        mine = codes[c : c + count]
        for j in range(count):
            total += _digested(np.uint64(first) + np.uint64(at[j + 1]), before[j], after[j])
            code = _code(before[j], after[j], order)
            after[j] = code
            mine[j] = min(code, _ESCAPE)
            far |= code
        if far >= _ESCAPE:
            for j in range(count):
                if after[j] >= _ESCAPE:
                    if e == len(escapes):
                        out[1] = -1
                        return total
                    escapes[e] = after[j]
                    e += 1
        c += count
        at[0] = at[count]
    out[0], out[1], out[2] = g, c, e
    return total


def _check_loop(gaps, codes, escapes, old, order, first, kept):
    total = stays = _U0
    c = e = 0
    if len(gaps) and gaps[len(gaps) - 1] == ESCAPE:
        return OPEN, total
    rows = np.zeros((2, _STEP_ROW), dtype=np.uint32)
    at, coming = rows[0], rows[1]
    found = np.empty(_STEP_ROW, dtype=old.dtype)
    before = np.empty(_STEP_ROW, dtype=old.dtype)
    more, following = _locate(gaps, 0, _U0, coming)
    for start in range(0, len(gaps), _STEP_ROW):
        at, coming, count = coming, at, more
        if c + count > len(codes):
            return COUNTS, total
        if following > np.uint64(len(old)):
            return OUTSIDE, total
        more, following = _locate(gaps, start + _STEP_ROW, following, coming)
        e = _read_codes(codes, c, count, escapes, e, found)
        _gather(old, at, count, coming, more, before)
        for j in range(count):
            code, word = np.uint64(found[j]), np.uint64(before[j])
            after = _moved(word, code, order, _U0)
            total += _digested(np.uint64(first) + np.uint64(at[j]), word, after)
            stays |= np.uint64(code == _U0)
            found[j] = after
        if len(kept):
            mine = kept[c : c + count]
            for j in range(count):
                mine[j] = found[j]
        c += count
    if c != len(codes) or e != len(escapes):
        return COUNTS, total
    return (NOTHING if stays else 0), total


def _take_loop(gaps, words, found):
    rows = np.zeros((2, _STEP_ROW), dtype=np.uint32)
    at, coming = rows[0], rows[1]
    more, following = _locate(gaps, 0, _U0, coming)
    c = 0
    for start in range(0, len(gaps), _STEP_ROW):
        at, coming, count = coming, at, more
        more, following = _locate(gaps, start + _STEP_ROW, following, coming)
        _gather(words, at, count, coming, more, found[c : c + count])
        c += count


def _put_loop(gaps, words, news, state, goal):
    rows = np.zeros((2, _STEP_ROW), dtype=np.uint32)
    at, coming = rows[0], rows[1]
    g, c, done = state[0], state[1], np.uint64(state[2])
    more, following = _locate(gaps, g, done, coming)
    while g < len(gaps) and done < np.uint64(goal):
        at, coming, count, done = coming, at, more, following
        g = min(g + _STEP_ROW, len(gaps))
        more, following = _locate(gaps, g, following, coming)
        _scatter(words, at, count, coming, more, news[c : c + count])
        c += count
    state[0], state[1], state[2] = g, c, np.int64(done)


def _add_loop(gaps, codes, escapes, words, order, back):
    rows = np.zeros((2, _STEP_ROW), dtype=np.uint32)
    at, coming = rows[0], rows[1]
    found = np.empty(_STEP_ROW, dtype=words.dtype)
    before = np.empty(_STEP_ROW, dtype=words.dtype)
    more, following = _locate(gaps, 0, _U0, coming)
    c = e = 0
    sign = _U1 if back else _U0
    for start in range(0, len(gaps), _STEP_ROW):
        at, coming, count = coming, at, more
        more, following = _locate(gaps, start + _STEP_ROW, following, coming)
        e = _read_codes(codes, c, count, escapes, e, found)
        _gather(words, at, count, coming, more, before)
        for j in range(count):
            before[j] = _moved(np.uint64(before[j]), np.uint64(found[j]), order, sign)
        for j in range(count):
            words[at[j]] = before[j]
        c += count


_ORDER = types.UniTuple(types.uint64, 4)


@lru_cache
def compiled_diff(width: int) -> Any:
    """Fill gaps, codes, escapes and their lengths (-1 codes: too many); return the total."""
    old, out = words_type(width), words_type(width, readonly=False)
    counts = types.Array(types.int64, 1, "C")
    return compile_for(_diff_loop, old, old, _ORDER, types.int64, OUT_BYTES, OUT_BYTES, out, counts)


@lru_cache
def compiled_check(width: int) -> Any:
    """Return the fault, 0 for none, and the total; keep the new words where there is room."""
    words = words_type(width)
    inputs = (BYTES, BYTES, words, words, _ORDER, types.int64)
    return compile_for(_check_loop, *inputs, words_type(width, readonly=False))


@lru_cache
def compiled_take(width: int) -> Any:
    """Copy the words at the positions."""
    return compile_for(_take_loop, BYTES, words_type(width), words_type(width, readonly=False))


@lru_cache
def compiled_put(width: int) -> Any:
    """Go on from a state (gap bytes, words, elements done) until a goal of elements is reached."""
    out, state = words_type(width, readonly=False), types.Array(types.int64, 1, "C")
    return compile_for(_put_loop, BYTES, out, words_type(width), state, types.int64)


@lru_cache
def compiled_add(width: int) -> Any:
    """Write the words that the steps lead to, or came from."""
    out = words_type(width, readonly=False)
    inputs = (BYTES, BYTES, words_type(width))
    return compile_for(_add_loop, *inputs, out, _ORDER, types.boolean)
