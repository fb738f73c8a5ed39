"""Threads that fetch and prove, out of the way of those that compute."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

NICENESS = 10
"""Of what steps aside: the model goes first. Not the idle class, whose threads would keep the
interpreter's lock while they wait for a core."""


def step_aside() -> None:
    """Move this thread, and those that it will start, out of the way of the model's.

    vLLM binds a worker on a CPU to the cores that it computes on, and threads inherit that. Others
    may be used if whoever started this process may use them.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    with suppress(OSError):  # the parent is gone, or another user's
        others = os.sched_getaffinity(os.getppid()) - os.sched_getaffinity(0)
        if others:
            os.sched_setaffinity(0, others)


def run_aside(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread that has stepped aside, and wait for it: its threads stay there."""
    with ThreadPoolExecutor(1, initializer=step_aside) as thread:
        return thread.submit(work).result()
