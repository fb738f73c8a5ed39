"""The stores of an install into live memory, chunk by chunk, and how they are taken back.

Steps are taken back by walking them backwards, XOR by applying it again; only words that are
replaced are copied while they are written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from paceline.refit.delta.codec import Tools, Update, decode_tensor, is_flip
from paceline.refit.delta.order import Words, kind_of
from paceline.refit.delta.steps import Steps
from paceline.refit.errors import ParseError, UncertainStateError, VerifyError
from paceline.refit.journal import Journal
from paceline.refit.manifest.v1 import Scheme


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorWrite:
    """What is going to be written into one live tensor."""

    name: str
    live: Words
    """The live memory itself, as words."""
    dtype: str
    steps: tuple[Update, ...] | None
    """Every chunk that changes, as steps; None: the payload is read again while it is written."""
    payload: memoryview
    scheme: Scheme
    changed_elements: int
    digest: str
    """What the bytes have to have once they are written."""
    first: int = 0
    """Where ``live`` begins in its tensor, in elements; the tensor may come in parts."""

    @property
    def kept_bytes(self) -> int:
        """Memory of the new words that were kept."""
        steps = [update.new for update in self.steps or () if isinstance(update.new, Steps)]
        return sum(item.after.nbytes for item in steps if item.after is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scatter:
    """A part that is not one stretch of live memory: written in a copy, which then takes its place.

    All of it is copied, not only what changed.
    """

    name: str
    live: npt.NDArray[Any]
    """The part in live memory, with strides."""
    copy: npt.NDArray[Any]
    """The same words, dense: what a TensorWrite writes to."""
    whole: Words
    """All of the tensor."""

    def write(self) -> None:
        """Make the live words what the copy is."""
        np.copyto(self.live, self.copy)


@dataclass(slots=True, kw_only=True, eq=False)
class Written:
    """One chunk that was written, or is being written."""

    write: TensorWrite
    part: slice
    steps: Steps | None = None
    """Loops write all of them or none."""
    old: Words | None = None
    """What was overwritten; None where the chunk can be taken back without it."""
    is_whole: bool = False
    """It is written for certain; otherwise a failure may have come before or behind the write."""


def updates_of(write: TensorWrite, tools: Tools) -> Iterable[Update]:
    """Return what happens to each chunk, from live memory as it is before the write."""
    if write.steps is not None:
        return write.steps
    base = write.live.data.cast("B")
    return decode_tensor(
        write.payload, scheme=write.scheme, base=base, dtype=write.dtype, tools=tools
    )


def _old_words(write: TensorWrite, update: Update, tools: Tools) -> Words:
    here = write.live[update.part]
    return tools.loops.take(update.new, here) if isinstance(update.new, Steps) else here.copy()


def keep_all(
    writes: Sequence[TensorWrite], scatters: Sequence[Scatter], journal: Journal, tools: Tools
) -> None:
    """Write down what is overwritten; of a tensor with a part that is no stretch, all of it."""
    whole = {scatter.name: scatter.whole for scatter in scatters}
    for name, words in whole.items():
        journal.keep(name, 0, None, words.copy())
    for write in writes:
        if write.name not in whole:
            _keep(write, journal, tools)


def _keep(write: TensorWrite, journal: Journal, tools: Tools) -> None:
    for update in updates_of(write, tools):
        steps = update.new if isinstance(update.new, Steps) else None
        start = write.first + update.part.start
        journal.keep(write.name, start, steps, _old_words(write, update, tools))


def jobs(
    writes: Iterable[TensorWrite], done: list[Written], tools: Tools, *, prove: bool
) -> Iterator[Callable[[], None]]:
    """Cut the writing into parts that threads may do at once; ``done`` tells what has begun."""
    for write in writes:
        if prove or write.steps is None:
            yield partial(_write_tensor, write, done, tools, prove=prove)
        else:
            yield from (partial(_write_chunk, write, done, tools, step) for step in write.steps)


def _write_tensor(write: TensorWrite, done: list[Written], tools: Tools, *, prove: bool) -> None:
    """Write chunk by chunk, and hash right behind the writes if ``prove``."""
    hasher, hashed = xxhash.xxh3_128() if prove else None, 0
    goes_back = write.steps is not None or is_flip(
        write.payload, scheme=write.scheme, dtype=write.dtype, num_elements=len(write.live)
    )
    for update in updates_of(write, tools):
        if hasher is not None:
            hasher.update(write.live[hashed : update.part.start].data)
            hashed = update.part.stop
        _write_chunk(write, done, tools, update, goes_back=goes_back, hasher=hasher)
    if hasher is None:
        return
    hasher.update(write.live[hashed:].data)
    if hasher.hexdigest() != write.digest:
        raise VerifyError(f"tensor {write.name!r}: what was written does not have its digest")


def _write_chunk(
    write: TensorWrite,
    done: list[Written],
    tools: Tools,
    update: Update,
    *,
    goes_back: bool = True,
    hasher: xxhash.xxh3_128 | None = None,
) -> None:
    """Write one chunk; ``done`` has it from before the first word on."""
    here, new = write.live[update.part], update.new
    item = Written(write=write, part=update.part)
    if isinstance(new, Steps):
        item.steps = new
        done.append(item)
        seen = None if hasher is None else _hashing(hasher)
        tools.loops.add(new, here, kind_of(write.dtype), seen=seen)
    else:
        item.old = here.copy()
        done.append(item)
        here[:] = new
        if hasher is not None:
            hasher.update(here.data)
        if goes_back:
            item.old = None
    item.is_whole = True


def _hashing(hasher: xxhash.xxh3_128) -> Callable[[Words], None]:
    return lambda words: hasher.update(words.data)


def undo(
    done: Sequence[Written], scattered: Sequence[Scatter], cause: BaseException, tools: Tools
) -> None:
    """Take back what was written, in reverse. Raises UncertainStateError if that fails too."""
    flipped: dict[int, tuple[TensorWrite, int]] = {}  # by identity: a tensor may come in parts
    try:
        for item in reversed(done):
            here = item.write.live[item.part]
            if item.steps is not None:
                _step_back(item, item.steps, may_be_old=not item.is_whole, tools=tools)
            elif item.old is not None:
                here[:] = item.old
            else:
                count = flipped.get(id(item.write), (item.write, 0))[1]
                flipped[id(item.write)] = (item.write, count + 1)
        for write, count in flipped.values():
            for _, update in zip(range(count), updates_of(write, tools), strict=False):
                write.live[update.part] = update.new
        for scatter in scattered:
            scatter.write()  # its copy is the old one again
    except BaseException as exc:  # whatever it was, the state is unknown and must be said so
        raise UncertainStateError(
            f"writing failed ({cause}) and so did taking it back ({exc}); "
            "install a full version before serving again"
        ) from exc


def _step_back(item: Written, steps: Steps, *, may_be_old: bool, tools: Tools) -> None:
    """Take one chunk back and prove it; it may not have been written at all.

    Raises:
        ParseError: the words are neither the old nor the new ones.
    """
    here, kind = item.write.live[item.part], kind_of(item.write.dtype)
    if may_be_old:
        try:
            tools.loops.check(steps, here, kind, first=item.part.start)
        except ParseError:
            pass  # written: these are not the words that the steps start from
        else:
            return
    tools.loops.add(steps, here, kind, sign=-1)
    tools.loops.check(steps, here, kind, first=item.part.start)
