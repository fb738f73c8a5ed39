"""Runs blocking calls of the ledger in threads, many per wait for the disk.

The event loop puts work into one queue; a thread takes all that is there, runs it inside one
group of the store, and hands the results back in one hop. So the busier the service, the less a
call costs, and nobody waits longer than two turns of the disk.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from paceline.core.errors import PacelineError
from paceline.refit.control.transaction import TRIES_MAX
from paceline.refit.errors import ControlUnavailableError
from paceline.store.protocol import ConflictError, StoreError

T = TypeVar("T")

BATCH_MAX: Final = 128
"""Calls of one group: nobody waits for more than these."""

GROUP_TRIES: Final = 4

Group = Callable[[Sequence[str]], AbstractContextManager[None]]
Prepare = Callable[[], Sequence[str]]


def _nothing() -> Sequence[str]:
    return ()


@dataclass(slots=True)
class _Job:
    prepare: Prepare
    work: Callable[[], Any]
    future: "asyncio.Future[Any]"
    result: Any = None
    error: Exception | None = None


class Desk:
    """Threads between ``start`` and ``stop``; used from one event loop."""

    def __init__(self, group: Group, *, threads: int) -> None:
        """Prepare.

        Args:
            group: opens a group of the store over records that will be needed; see
                ControlLedger.group.
            threads: more than one only where groups mean nothing.
        """
        self._group = group
        self._num_threads = threads
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to work for the running event loop."""
        self._loop = asyncio.get_running_loop()
        for number in range(self._num_threads):
            thread = threading.Thread(
                target=self._work, args=(self._loop,), name=f"control-ledger-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Finish what was asked for and end the threads; idempotent."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    async def run(self, work: Callable[[], T], *, prepare: Prepare = _nothing) -> T:
        """Return what ``work`` returns, once it is durable.

        What it raises passes through. Raises StoreError if the group that it was in failed.

        Args:
            work: may run several times; only what it did last counts.
            prepare: runs before, and returns the keys of records that ``work`` will read.
        """
        future = asyncio.get_running_loop().create_future()
        self._queue.put(_Job(prepare, work, future))
        return cast(T, await future)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        batch_max = BATCH_MAX if self._num_threads == 1 else 1
        while True:
            batch = [self._queue.get()]
            while batch[-1] is not None and len(batch) < batch_max:
                try:
                    batch.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            jobs = [job for job in batch if job is not None]
            if jobs:
                self._run(jobs)
                loop.call_soon_threadsafe(_settle, jobs)
            if batch[-1] is None:
                return

    def _run(self, jobs: list[_Job]) -> None:
        """Run them in one group, again while other replicas are quicker, at last one by one."""
        for _ in range(GROUP_TRIES if len(jobs) > 1 else TRIES_MAX):
            try:
                self._try(jobs)
            except ConflictError:
                continue
            except Exception as exc:  # noqa: BLE001 - nothing was kept: all must hear of it
                _fail(jobs, exc if isinstance(exc, PacelineError) else _broken(exc))
            return
        if len(jobs) == 1:
            _fail(jobs, ControlUnavailableError("the control service's store is too busy"))
        else:
            for job in jobs:
                self._run([job])

    def _try(self, jobs: list[_Job]) -> None:
        keys: list[str] = []
        for job in jobs:
            job.error = None
            try:
                keys += job.prepare()
            except Exception as exc:  # noqa: BLE001 - raised again where it is awaited
                job.error = exc
        with self._group(keys):
            for job in jobs:
                if job.error is not None:
                    continue
                try:
                    job.result = job.work()
                except Exception as exc:  # noqa: BLE001 - raised again where it is awaited
                    job.error = exc


def _fail(jobs: list[_Job], error: PacelineError) -> None:
    for job in jobs:
        job.error = error


def _broken(exc: Exception) -> StoreError:
    return StoreError(f"the store failed: {exc}")


def _settle(jobs: list[_Job]) -> None:
    for job in jobs:
        # Whoever asked may have gone away.
        if job.future.cancelled():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
