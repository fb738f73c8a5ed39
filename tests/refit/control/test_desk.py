"""Calls over the desk: in batches, durable before they are answered, again when others win."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from paceline.refit.control.desk import GROUP_TRIES, Desk
from paceline.refit.control.transaction import TRIES_MAX
from paceline.refit.errors import ControlUnavailableError, NotFoundError
from paceline.store.protocol import ConflictError, StoreError


class Groups:
    """Counts groups, and lets the next ones fail."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.failures: list[Exception] = []
        self.conflicts_above = 10**9
        self.opened = threading.Event()
        self.hold = threading.Event()
        self.hold.set()

    @contextmanager
    def __call__(self, keys: Sequence[str]) -> Iterator[None]:
        self.opened.set()
        assert self.hold.wait(timeout=10)
        yield
        self.sizes.append(len(keys))
        if self.failures:
            raise self.failures.pop(0)
        if len(keys) > self.conflicts_above:
            raise ConflictError("somebody was quicker")


async def many(desk: Desk, groups: Groups, *, count: int) -> list[object]:
    """Ask for one thing, and for ``count`` more while it is under way."""
    groups.hold.clear()
    first = asyncio.create_task(desk.run(lambda: -1, prepare=lambda: ["k"]))
    await asyncio.to_thread(groups.opened.wait, 10)
    others = [
        asyncio.create_task(desk.run(lambda n=n: n, prepare=lambda: ["k"]))  # type: ignore[misc]
        for n in range(count)
    ]
    await asyncio.sleep(0)  # noqa: TID251 - lets the others begin
    groups.hold.set()
    return list(await asyncio.gather(first, *others, return_exceptions=True))


def play(groups: Groups, *, count: int = 5) -> list[object]:
    async def scene() -> list[object]:
        desk = Desk(groups, threads=1)
        desk.start()
        try:
            return await many(desk, groups, count=count)
        finally:
            desk.stop()

    return asyncio.run(scene())


def test_what_comes_while_the_disk_is_busy_shares_the_next_group() -> None:
    """One group for the first, one for all the others; everybody gets the own result."""
    groups = Groups()
    assert play(groups) == [-1, 0, 1, 2, 3, 4]
    assert groups.sizes == [1, 5]


def test_a_group_that_fails_fails_all_in_it_and_nobody_else() -> None:
    """Nothing of it was kept, so nobody in it may be told otherwise."""
    groups = Groups()
    groups.failures = [StoreError("disk full")]
    results = play(groups)
    assert isinstance(results[0], StoreError)
    assert results[1:] == [0, 1, 2, 3, 4]
    groups = Groups()
    groups.failures = [OSError("odd")]
    assert isinstance(play(groups, count=0)[0], StoreError)


def test_conflicts_are_decided_again_and_at_last_one_by_one() -> None:
    """A large group that always meets other writers is taken apart, and every call succeeds."""
    groups = Groups()
    groups.conflicts_above = 1
    assert play(groups) == [-1, 0, 1, 2, 3, 4]
    assert groups.sizes == [1, *[5] * GROUP_TRIES, 1, 1, 1, 1, 1]


def test_a_call_that_never_gets_through_is_unavailable() -> None:
    """It does not go on for ever."""
    groups = Groups()
    groups.conflicts_above = 0
    results = play(groups, count=0)
    assert isinstance(results[0], ControlUnavailableError)
    assert len(groups.sizes) == TRIES_MAX


def test_what_a_call_raises_is_its_own_affair() -> None:
    """A refusal while reading or deciding does not touch the others of its group."""

    async def scene() -> list[object]:
        desk = Desk(Groups(), threads=1)
        desk.start()

        def refuse() -> Sequence[str]:
            raise NotFoundError("no")

        try:
            return list(
                await asyncio.gather(
                    desk.run(lambda: 1),
                    desk.run(lambda: 2, prepare=refuse),
                    desk.run(refuse),
                    return_exceptions=True,
                )
            )
        finally:
            desk.stop()

    results = asyncio.run(scene())
    assert results[0] == 1
    assert isinstance(results[1], NotFoundError)
    assert isinstance(results[2], NotFoundError)


def test_stopping_answers_what_was_asked_before() -> None:
    """Nobody waits for an answer that never comes."""

    async def scene() -> int:
        desk = Desk(Groups(), threads=2)
        desk.start()
        task = asyncio.create_task(desk.run(lambda: 7))
        await asyncio.sleep(0)  # noqa: TID251 - lets the others begin
        await asyncio.to_thread(desk.stop)
        return await task

    assert asyncio.run(scene()) == 7


@pytest.mark.parametrize("threads", [1, 3])
def test_a_caller_that_went_away_harms_nobody(threads: int) -> None:
    """Its result is dropped."""

    async def scene() -> int:
        desk = Desk(Groups(), threads=threads)
        desk.start()
        task = asyncio.create_task(desk.run(lambda: 1))
        await asyncio.sleep(0)  # noqa: TID251 - lets the others begin
        task.cancel()
        try:
            return await desk.run(lambda: 2)
        finally:
            desk.stop()

    assert asyncio.run(scene()) == 2
