"""One tensor's change <-> payload bytes. ``docs/formats/delta-v1.md`` is the specification.

A payload of GAP, CLASSED or DENSE is one u32 length per chunk of the tensor and then the record
of each. Neither side holds more than a few chunks beside its result, and threads share a tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.refit.delta import choice, dense, gap
from paceline.refit.delta.choice import LOCAL, Link
from paceline.refit.delta.loops import Loops, NumpyLoops
from paceline.refit.delta.order import Buffer, WordKind, Words, as_words, chunks, kind_of
from paceline.refit.delta.steps import Steps, compose
from paceline.refit.delta.stream import Cursor, new_compressor, render_u32
from paceline.refit.errors import ParseError, ParseReason
from paceline.refit.manifest.v1 import Scheme

Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""``map``, or the ``map`` of a pool of threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What does the work: results never depend on it."""

    loops: Loops = field(default_factory=NumpyLoops)
    run: Run = map


REFERENCE = Tools()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTensor:
    """One changed tensor on its way into a payload object."""

    scheme: Scheme
    data: Buffer
    changed_elements: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """What happens to one chunk: steps, or all the new words."""

    part: slice
    new: Steps | Words


def encode_tensor(
    base: Buffer, new: Buffer, *, dtype: str, tools: Tools = REFERENCE, link: Link = LOCAL
) -> EncodedTensor | None:
    """Encode what turns ``base`` into ``new``, or return None if they are equal.

    RAW data is ``new`` itself, not a copy.

    Raises:
        ValueError: the sizes differ, or the dtype is unknown.
    """
    kind = kind_of(dtype)
    old, now = _pair(base, new, kind)
    sparse, changed = _encode_steps(old, now, kind, tools)
    if not changed:
        return None

    def classed() -> Buffer:
        return encode_as(Scheme.CLASSED, base, new, dtype=dtype, tools=tools)

    found = _Found(sparse=sparse, classed=classed, changed_elements=changed)
    return _best(found, base, new, dtype=dtype, tools=tools, link=link)


def encode_found(
    chunked: Sequence[Steps],
    base: Buffer,
    new: Buffer,
    *,
    dtype: str,
    tools: Tools = REFERENCE,
    link: Link = LOCAL,
) -> EncodedTensor | None:
    """Encode what was found elsewhere: the result of ``encode_tensor`` without its search.

    ``chunked`` are the steps of every chunk, at most ``most_steps`` each.
    """
    kind = kind_of(dtype)
    old, _ = _pair(base, new, kind)
    changed = sum(map(len, chunked))
    if not changed:
        return None

    def classed() -> Buffer:
        jobs = zip(chunked, chunks(len(old), kind), strict=True)
        return join_records(
            list(
                tools.run(
                    lambda job: gap.render_classed(job[0], old[job[1]], kind, loops=tools.loops),
                    jobs,
                )
            )
        )

    sparse = join_records(list(tools.run(lambda one: gap.render(one, new_compressor()), chunked)))
    found = _Found(sparse=sparse, classed=classed, changed_elements=changed)
    return _best(found, base, new, dtype=dtype, tools=tools, link=link)


def most_steps(num_elements: int, kind: WordKind) -> int:
    """Return up to how many changes of a chunk are looked at as steps."""
    is_small = num_elements * kind.width <= choice.SMALL_BYTES
    return num_elements if is_small else num_elements // 2


def encode_as(
    scheme: Scheme, base: Buffer, new: Buffer, *, dtype: str, tools: Tools = REFERENCE
) -> Buffer:
    """Encode by one scheme, whatever it costs.

    Raises:
        ValueError: the sizes differ, the dtype is unknown, or CLASSED is asked of no float.
    """
    kind = kind_of(dtype)
    old, now = _pair(base, new, kind)
    if scheme is Scheme.RAW:
        return new
    if scheme is Scheme.XOR:
        return dense.render_xor(old, now, kind)
    if scheme is Scheme.DENSE:
        return _encode_dense(old, now, kind, tools)
    if scheme is Scheme.CLASSED and not kind.exponent_bits:
        raise ValueError(f"{dtype} has no exponent to class by")

    def record(part: slice) -> bytes:
        before, after = old[part], now[part]
        steps = tools.loops.diff(before, after, kind, first=part.start, most=len(before))
        assert steps is not None  # noqa: S101 - nothing exceeds the number of elements
        if scheme is Scheme.GAP:
            return gap.render(steps, new_compressor())
        return gap.render_classed(steps, before, kind, loops=tools.loops)

    return join_records(list(tools.run(record, chunks(len(old), kind))))


def decode_tensor(
    data: memoryview,
    *,
    scheme: Scheme,
    base: Buffer,
    dtype: str,
    tools: Tools = REFERENCE,
    keep_bytes: int = 0,
) -> Iterator[Update]:
    """Yield what happens to each chunk of ``base``, in order; chunks that stay are left out.

    Steps are checked against the base, bounds and digest. That new words are the right ones is
    for the content digest of the tensor to say. ``base`` may be written to once the chunk's
    update was taken, not before. Steps keep the words that they lead to, so that writing them
    takes no more arithmetic, as long as all of those take no more than ``keep_bytes``.

    Raises:
        ParseError: the payload breaks its format or belongs to another base. Chunks before the
            fault have been yielded: nothing should be written until the iteration has ended.
    """
    kind = kind_of(dtype)
    old = as_words(base, kind.width)
    parts = list(chunks(len(old), kind))
    if scheme is Scheme.RAW:
        yield from _raw(data, old, parts)
    elif scheme is Scheme.XOR:
        for part, words in zip(parts, dense.parse_xor(data, old, kind), strict=True):
            yield Update(part=part, new=words)
    else:
        records = split_records(data, len(parts))
        if scheme is Scheme.DENSE:  # one by one: a pool would hold the whole tensor
            for part, record in zip(parts, records, strict=True):
                yield Update(part=part, new=dense.parse(record, old[part], kind))
            return
        jobs = _step_jobs(parts, records, kind, keep_bytes)
        parse = gap.parse_classed if scheme is Scheme.CLASSED else gap.parse

        def decode(job: tuple[slice, memoryview, bool]) -> Update:
            part, record, keep = job
            steps = parse(record, old[part], kind, first=part.start, loops=tools.loops, keep=keep)
            return Update(part=part, new=steps)

        yield from tools.run(decode, jobs)


def is_flip(data: memoryview, *, scheme: Scheme, dtype: str, num_elements: int) -> bool:
    """Say whether a payload of full words gives the old ones when it meets the new ones.

    Raises:
        ParseError: the payload breaks its format.
    """
    if scheme is not Scheme.DENSE:
        return scheme is Scheme.XOR
    count = len(list(chunks(num_elements, kind_of(dtype))))
    return all(bytes(record[:1]) == b"\0" for record in split_records(data, count))


def compose_tensors(
    first: memoryview, second: memoryview, *, dtype: str, num_elements: int
) -> EncodedTensor | None:
    """Return the GAP payload that equals two after each other, or None if they cancel.

    No weights are needed. Both must be GAP: the groups of CLASSED are of weights.

    Raises:
        ParseError: one of them breaks the format.
    """
    kind = kind_of(dtype)
    parts = list(chunks(num_elements, kind))
    records, changed = [], 0
    pairs = zip(split_records(first, len(parts)), split_records(second, len(parts)), strict=True)
    for part, pair in zip(parts, pairs, strict=True):
        size = part.stop - part.start
        before, after = (
            gap.parse_unchecked(record, size, kind) if len(record) else gap.empty_steps(kind)
            for record in pair
        )
        both = compose(before, after)
        changed += len(both)
        records.append(gap.render(both, new_compressor()))
    if not changed:
        return None
    return EncodedTensor(scheme=Scheme.GAP, data=join_records(records), changed_elements=changed)


def split_records(data: memoryview, count: int) -> list[memoryview]:
    """Return the records of a payload. Raises ParseError if they are not exactly so many."""
    cursor = Cursor(data, where="payload")
    lengths = [cursor.take_u32() for _ in range(count)]
    records = [cursor.take(length) for length in lengths]
    cursor.expect_end()
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The changes of a tensor."""

    sparse: bytes | None
    """In GAP; None where too much changes for it."""
    classed: Callable[[], Buffer]
    changed_elements: int


def _best(
    found: _Found, base: Buffer, new: Buffer, *, dtype: str, tools: Tools, link: Link
) -> EncodedTensor:
    """Measure the schemes that may win, and take the one that arrives first."""
    raw_bytes, sparse = len(new), found.sparse
    data: dict[Scheme, Buffer] = {Scheme.RAW: new}
    if sparse is not None:
        data[Scheme.GAP] = sparse
        if kind_of(dtype).exponent_bits and choice.is_classed_worth_measuring(
            len(sparse), raw_bytes=raw_bytes, link=link
        ):
            data[Scheme.CLASSED] = found.classed()
    if choice.is_dense_worth_measuring(
        None if sparse is None else len(sparse), raw_bytes=raw_bytes
    ):
        data[Scheme.DENSE] = encode_as(Scheme.DENSE, base, new, dtype=dtype, tools=tools)
    sizes = {scheme: len(each) for scheme, each in data.items()}
    best = choice.choose(sizes, raw_bytes=raw_bytes, link=link)
    return EncodedTensor(scheme=best, data=data[best], changed_elements=found.changed_elements)


def _encode_steps(old: Words, new: Words, kind: WordKind, tools: Tools) -> tuple[bytes | None, int]:
    """Return the GAP form, or None where too much changes for it, and how many elements do."""

    def record(part: slice) -> tuple[bytes | None, int]:
        before, after = old[part], new[part]
        most = most_steps(len(before), kind)
        steps = tools.loops.diff(before, after, kind, first=part.start, most=most)
        if steps is None:
            return None, int(np.count_nonzero(before != after))
        return gap.render(steps, new_compressor()), len(steps)

    found = list(tools.run(record, chunks(len(old), kind)))
    changed = sum(count for _, count in found)
    records = [data for data, _ in found if data is not None]
    return (join_records(records) if len(records) == len(found) else None), changed


def _encode_dense(old: Words, new: Words, kind: WordKind, tools: Tools) -> bytes:
    """Measure both kinds of planes on the first chunk and go on with the smaller."""
    parts = list(chunks(len(old), kind))
    tags = list(dense.Dense)

    def record(part: slice, tag: dense.Dense) -> bytes:
        return dense.render(old[part], new[part], kind, tag=tag, zstd=new_compressor())

    tried = {tag: record(part, tag) for part in parts[:1] for tag in tags}
    best = min(tried, key=lambda tag: len(tried[tag]), default=dense.Dense.XOR)
    rest = tools.run(lambda part: record(part, best), parts[1:])
    return join_records([*([tried[best]] if tried else []), *rest])


def _step_jobs(
    parts: list[slice], records: list[memoryview], kind: WordKind, keep_bytes: int
) -> Iterator[tuple[slice, memoryview, bool]]:
    """Yield the chunks that change, and whether there is room for their new words."""
    for part, record in zip(parts, records, strict=True):
        if len(record):
            size = part.stop - part.start
            keep_bytes -= gap.changes_declared(record, size, kind) * kind.width
            yield part, record, keep_bytes >= 0


def _raw(data: memoryview, old: Words, parts: list[slice]) -> Iterator[Update]:
    if len(data) != old.nbytes:
        reason = ParseReason.TRUNCATED if len(data) < old.nbytes else ParseReason.TRAILING_BYTES
        raise ParseError(reason, "payload", f"{len(data)} bytes, wanted {old.nbytes}")
    words = np.frombuffer(data, dtype=old.dtype)
    for part in parts:
        yield Update(part=part, new=words[part])


def _pair(base: Buffer, new: Buffer, kind: WordKind) -> tuple[Words, Words]:
    old, now = as_words(base, kind.width), as_words(new, kind.width)
    if len(old) != len(now):
        raise ValueError(f"{len(old)} elements against {len(now)}: a delta keeps the size")
    return old, now


def join_records(records: Sequence[bytes]) -> bytes:
    """Return the payload of a tensor: the length of each record, then the records."""
    return b"".join((render_u32(*(len(record) for record in records)), *records))
