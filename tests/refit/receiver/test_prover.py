"""Proofs run beside the reads, or in the read when nobody is free to."""

import threading

import pytest

from paceline.refit.errors import VerifyError
from paceline.refit.receiver.prover import Prover

DATA = memoryview(b"weights")


def refuse(data: memoryview) -> None:
    raise VerifyError(f"{len(data)} wrong bytes")


def test_a_piece_that_nobody_is_free_for_is_proven_at_once() -> None:
    """Every thread is busy: the caller proves, and none waits behind another."""
    go_on, by = threading.Event(), list[str]()

    def hold(data: memoryview) -> None:
        assert go_on.wait(20)
        by.append(threading.current_thread().name)

    with Prover(1) as prover:
        first = prover.submit(hold, DATA)
        second = prover.submit(lambda data: by.append(threading.current_thread().name), DATA)
        assert second.done()
        third = prover.submit(refuse, DATA)
        assert third.done()
        go_on.set()
        first.result(20)
    assert by[0] == threading.current_thread().name
    assert by[1].startswith("paceline-prover")
    with pytest.raises(VerifyError, match="7 wrong bytes"):
        third.result()


def test_what_a_thread_finds_wrong_is_told_and_the_thread_goes_on() -> None:
    """A failed proof frees its thread for the next."""
    with Prover(1) as prover:
        found = []
        for _ in range(3):
            check = prover.submit(refuse, DATA)
            found.append(check.exception(20))
    assert [str(each) for each in found] == ["7 wrong bytes"] * 3
