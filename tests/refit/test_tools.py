"""Threads that share work: results in order, failures passed on, callers never stuck."""

import pytest

from paceline.refit.kernels.registry import process_tools


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
