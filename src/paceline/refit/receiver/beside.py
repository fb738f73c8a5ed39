"""Work of this machine's own that is done while bytes are on their way to it."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


class Beside:
    """At most one piece of work in a thread of its own; over when the block is left.

    What the work raises is raised by ``check`` and ``finish``, and in place of another error that
    leaves the block: the bytes may well have failed because of it. An interrupt is not replaced.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._work: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True)
        if value is None or isinstance(value, Exception):
            self.check()

    def start(self, work: Callable[[], None]) -> None:
        """Begin."""
        self._work = self._pool.submit(work)

    def check(self) -> None:
        """Raise what the work has failed with, if it has; never waits."""
        if self._work is not None and self._work.done():
            self._work.result()

    def finish(self) -> None:
        """Wait for the work, and raise what it failed with."""
        if self._work is not None:
            self._work.result()
