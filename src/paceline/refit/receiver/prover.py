"""Pieces are proven beside the reads, and in the read when nobody is free to.

A piece that waits for its proof leaves the cache, and costs the way to memory again. So none
waits: with cores to spare all proofs are beside the reads, without any the reader proves itself.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


class Prover:
    """Threads for proofs, until closed; safe from several threads."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="paceline-prover")
        self._free = threading.Semaphore(threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()

    def submit(self, settle: Callable[[memoryview], None], data: memoryview) -> Future[None]:
        """Return what becomes of ``settle(data)``; it is done already if it was done here."""
        if self._free.acquire(blocking=False):
            return self._pool.submit(self._settle, settle, data)
        done: Future[None] = Future()
        try:
            settle(data)
        except Exception as exc:  # noqa: BLE001 - raised where the proof is asked for
            done.set_exception(exc)
        else:
            done.set_result(None)
        return done

    def _settle(self, settle: Callable[[memoryview], None], data: memoryview) -> None:
        try:
            settle(data)
        finally:
            self._free.release()
