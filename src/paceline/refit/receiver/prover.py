"""Pieces are proven as they arrive, and beside the reads where that is cheaper.

A piece that waits for its proof leaves the cache, and costs the way to memory again. So none
waits: what the reading core has moved itself it hashes at once, and a piece that came in another
way is for a thread that is free, or for the reader if none is.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

from paceline.refit.receiver.pieces import Piece, Proof, Target


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

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Return what becomes of ``job``; it is done already if it was done here."""
        if self._free.acquire(blocking=False):
            return self._pool.submit(self._run, job)
        return _done(job)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        finally:
            self._free.release()


class Proofs:
    """What becomes of pieces as they arrive. Each is told of by one thread at a time."""

    def __init__(self, prover: Prover, targets: Sequence[Target]) -> None:
        self._prover = prover
        self._targets = targets
        self._begun: dict[int, tuple[Proof, int]] = {}
        """By index: the proof so far, and of how many bytes."""
        self.found: dict[int, Future[None]] = {}
        """By index, for pieces that arrived whole."""

    def on_bytes(self, index: int, start: int, stop: int) -> None:
        """Hash what this core has just moved, if it is what the piece goes on with."""
        piece, target = self._targets[index]
        if not piece.is_fast:
            return
        proof, size = self._begun.get(index) or (piece.begin(), 0)
        if start == size:
            proof.update(target[start:stop])
            self._begun[index] = (proof, stop)

    def on_part(self, index: int) -> None:
        """Prove a piece that has arrived whole, as far as it is not proven yet, and keep it."""
        piece, target = self._targets[index]
        proof, size = self._begun.pop(index, (None, 0))
        if size < target.nbytes:
            proof = None
        job = partial(_finish, piece, target, proof)
        is_done_soon = proof is not None and piece.keep is None
        self.found[index] = _done(job) if is_done_soon else self._prover.submit(job)


def _finish(piece: Piece, data: memoryview, proof: Proof | None) -> None:
    """Raises VerifyError, NoRoomError."""
    if proof is None:
        proof = piece.begin()
        proof.update(data)
    proof.finish()
    if piece.keep is not None:
        piece.keep(piece.wanted.offset, data)


def _done(job: Callable[[], None]) -> Future[None]:
    """Return what becomes of ``job``, done here."""
    done: Future[None] = Future()
    try:
        job()
    except Exception as exc:  # noqa: BLE001 - raised where the proof is asked for
        done.set_exception(exc)
    else:
        done.set_result(None)
    return done
