"""Functions in processes of their own, that answer when they are ready and end when told."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def beside(run: Callable[..., None], *args: object) -> Iterator[Any]:
    """Run ``run(connection, *args)`` in a process, and yield its first answer."""
    with asked(run, *args) as ask:
        yield ask.first


class Ask:
    """Puts a question to a process and returns its answer."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.first = connection.recv()
        """What it said when it was ready."""

    def __call__(self, question: object) -> Any:
        """Return the answer; a question is anything but None."""
        self._connection.send(question)
        return self._connection.recv()


@contextmanager
def asked(run: Callable[..., None], *args: object) -> Iterator[Ask]:
    """Run ``run(connection, *args)``, which says that it is ready and then answers questions."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=run, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Ask(ours)
    finally:
        with contextlib.suppress(BrokenPipeError):  # it ended, which its own words explain
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
