"""A function in a process of its own, that answers once when it is ready and ends when told."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def beside(run: Callable[..., None], *args: object) -> Iterator[Any]:
    """Run ``run(connection, *args)`` in a process, and yield its first answer."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=run, args=(theirs, *args), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join(10)
        if process.is_alive():
            process.kill()


def answer_of(run: Callable[..., object], *args: object) -> Any:
    """Return what ``run(*args)`` returns in a fresh process."""
    with beside(_call, run, *args) as answer:
        return answer


def _call(connection: Any, run: Callable[..., object], *args: object) -> None:
    connection.send(run(*args))
    connection.recv()
