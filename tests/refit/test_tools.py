"""Threads that share work: results in order, failures passed on, callers never stuck."""

import pytest

from paceline.refit.kernels.numba.compiled import compiled_add, compiled_put
from paceline.refit.kernels.registry import process_tools, warm_loops
from paceline.refit.model import DTYPE_BITS


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_are_in_order(count: int) -> None:
    """However many threads take items, results come as ``map`` gives them."""
    assert list(process_tools(3).run(lambda item: item * 2, range(count))) == [
        item * 2 for item in range(count)
    ]


def test_failures_are_passed_on() -> None:
    """Whoever fails, the caller gets the error, and nobody starts what is left."""
    started = []

    def work(item: int) -> None:
        started.append(item)
        if item == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        list(process_tools(2).run(work, range(10_000)))
    assert len(started) < 10_000


def test_work_may_ask_for_work() -> None:
    """Work on the threads that shares work of its own is done, though all of them are taken."""
    tools = process_tools(2)

    def outer(item: int) -> int:
        return sum(tools.run(lambda inner: inner * item, range(20)))

    assert list(tools.run(outer, range(20))) == [190 * item for item in range(20)]


def test_loops_are_warm_before_a_pause() -> None:
    """Both loops that write are there for the width of every dtype, and asking again is free."""
    for dtype in DTYPE_BITS:
        warm_loops(dtype)
    before = [each.cache_info().misses for each in (compiled_put, compiled_add)]
    for width in (1, 2, 4, 8):
        compiled_put(width)
        compiled_add(width)
    assert [each.cache_info().misses for each in (compiled_put, compiled_add)] == before
