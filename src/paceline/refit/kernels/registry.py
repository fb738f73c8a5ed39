"""Loops by name, and the tools that this process encodes and applies with."""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, Final, cast

import numpy as np

from paceline.core.registry import LazyEntry, load_entry
from paceline.refit.delta.codec import Tools
from paceline.refit.delta.loops import Loops
from paceline.refit.delta.order import kind_of
from paceline.refit.kernels.protocol import DeviceLoops

LOOPS: Final[dict[str, LazyEntry]] = {
    "numpy": LazyEntry("paceline.refit.delta.loops", "NumpyLoops"),
    "numba": LazyEntry("paceline.refit.kernels.numba.loops", "NumbaLoops", extra="fast"),
}
"""Name -> class of the loops on the processor."""

DEVICE_LOOPS: Final[dict[str, LazyEntry]] = {
    "torch": LazyEntry("paceline.refit.kernels.torch", "TorchLoops", extra="train"),
    "triton": LazyEntry("paceline.refit.kernels.triton", "TritonLoops", extra="train"),
}
"""Name -> class of the loops where tensors live."""

PickLoops = Callable[[str], DeviceLoops | None]
"""Takes the type of a device."""
_TRITON_DEVICES: Final = frozenset({"cuda", "xpu"})
_FEW_ELEMENTS: Final = 4
_THREADS_MAX: Final = 8
"""Beyond this the memory bus is the limit, and the engine on this machine wants its cores."""


@lru_cache
def load_loops(name: str | None = None) -> Loops:
    """Return the loops of that name, or the fastest that are installed.

    Raises:
        UsageError, MissingExtraError: there are none of that name.
    """
    if name is None:
        name = "numba" if find_spec("numba") is not None else "numpy"
    loops = cast("type[Loops]", load_entry(LOOPS, name, port="loops"))
    return loops()


@lru_cache
def load_device_loops(name: str) -> DeviceLoops:
    """Return the device loops of that name. Raises UsageError or MissingExtraError."""
    loops = cast("type[DeviceLoops]", load_entry(DEVICE_LOOPS, name, port="device loops"))
    return loops()


def loops_on(device_type: str) -> DeviceLoops | None:
    """Return what compares and writes tensors on this kind of device; None: host memory.

    The one place that knows: ``cpu`` is what the loops on the processor are for, triton runs on
    what it has a code generator for, torch everywhere else.
    """
    if device_type == "cpu":
        return None
    is_known = device_type in _TRITON_DEVICES and find_spec("triton") is not None
    return load_device_loops("triton" if is_known else "torch")


@lru_cache
def warm_loops(dtype: str) -> None:
    """Write a few elements of this dtype once: no loop is loaded while an engine stands still."""
    kind, loops = kind_of(dtype), process_tools().loops
    old = np.zeros(_FEW_ELEMENTS, dtype=f"<u{kind.width}")
    steps = loops.diff(old, old + 1, kind, first=0, most=len(old))
    assert steps is not None  # noqa: S101 - there is room for as many as there are elements
    kept = loops.check(steps, old, kind, first=0, keep=True)
    loops.add(steps, old.copy(), kind)
    loops.add(kept, old.copy(), kind)


@lru_cache
def process_tools(threads: int | None = None) -> Tools:
    """Return the fastest loops over threads of this process's own, by default one per core.

    The threads live as long as the process; whoever asks for work to be done is one of them.
    """
    count = min(len(os.sched_getaffinity(0)), _THREADS_MAX) if threads is None else threads
    loops = load_loops()
    if count == 1:
        return Tools(loops=loops)
    pool = ThreadPoolExecutor(count - 1, thread_name_prefix="paceline-codec")
    return Tools(loops=loops, run=partial(_run_shared, pool, count - 1))


def _run_shared(
    pool: ThreadPoolExecutor, helpers: int, work: Callable[[Any], Any], items: Iterable[Any]
) -> list[Any]:
    """Map as ``map`` does; caller and helpers take the next item until none is left.

    A caller that only waited would be woken for every result, on a core that is at work.
    """
    jobs = list(items)
    results: list[Any] = [None] * len(jobs)
    left = iter(range(len(jobs)))  # one shared iterator: the interpreter hands out each once

    def take() -> None:
        for index in left:
            try:
                results[index] = work(jobs[index])
            except BaseException:
                deque(left, maxlen=0)  # nobody starts another
                raise

    helping: list[Future[None]] = []
    try:
        helping.extend(pool.submit(take) for _ in range(min(helpers, len(jobs) - 1)))
        take()
    finally:
        failed = [other.exception() for other in helping if not other.cancel()]
    for failure in failed:
        if failure is not None:
            raise failure
    return results
