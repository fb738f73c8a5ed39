"""Staged bytes stay still while anybody needs them."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.errors import StagingError
from paceline.refit.model import TensorBuffer
from paceline.refit.staging.host import Arena, ArenaRing
from paceline.refit.staging.in_place import InPlaceGuard
from paceline.refit.staging.shelf import ObjectShelf
from paceline.testing.clock import FakeClock


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "drop"]), st.integers(0, 5))))
def test_held_bytes_are_never_overwritten(actions: list[tuple[str, int]]) -> None:
    """Whatever the order of taking, sharing and dropping, an arena in use keeps its bytes."""
    ring = ArenaRing(capacity=3, clock=FakeClock())
    held: list[tuple[Arena, bytes]] = []
    for count, (action, which) in enumerate(actions):
        if action == "take":
            try:
                arena = ring.take(8)
            except StagingError:
                assert len({item.index for item, _ in held}) == 3
                continue
            content = bytes([count % 256]) * 8
            arena.data[:] = content
            held.append((arena, content))
        elif held:
            arena, content = held[which % len(held)]
            if action == "hold":
                ring.hold(arena)
                held.append((arena, content))
            else:
                ring.drop(arena)
                held.remove((arena, content))
        assert all(bytes(arena.data) == content for arena, content in held)
        assert ring.free == 3 - len({arena.index for arena, _ in held})


def test_full_ring_refuses_at_once_or_after_a_wait() -> None:
    """With no wait a full ring refuses; with one it refuses at the deadline, saying what to do."""
    for wait_s in (0.0, 7.0):
        clock = FakeClock()
        ring = ArenaRing(capacity=1, clock=clock, wait_s=wait_s)
        ring.take(1)
        with pytest.raises(StagingError, match="more arenas"):
            ring.take(1)
        assert clock.monotonic() == pytest.approx(wait_s)


def test_blocked_take_goes_on_after_a_drop() -> None:
    """A trainer that waits for an arena gets the one that a reader gives back."""

    class DroppingClock(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            ring.drop(arena)

    ring = ArenaRing(capacity=1, clock=DroppingClock(), wait_s=5)
    arena = ring.take(4)
    assert ring.take(2).index == arena.index


def test_arenas_are_aligned_and_grow() -> None:
    """An arena starts at a multiple of 64 and is as large as asked for, also next time."""
    ring = ArenaRing(capacity=1, clock=FakeClock())
    for size in (10, 1000, 3):
        arena = ring.take(size)
        assert len(arena.data) == size
        assert np.frombuffer(arena.data, dtype=np.uint8).ctypes.data % 64 == 0
        ring.drop(arena)
    with pytest.raises(ValueError, match="not held"):
        ring.drop(arena)
    with pytest.raises(ValueError, match="at least one"):
        ArenaRing(capacity=0, clock=FakeClock())


def test_ring_is_safe_between_threads() -> None:
    """Threads that take and drop at once never share an arena."""
    ring = ArenaRing(capacity=2, clock=FakeClock(), wait_s=1e9)
    clashes = []

    def work(number: int) -> None:
        for _ in range(200):
            arena = ring.take(8)
            arena.data[:] = bytes([number]) * 8
            if bytes(arena.data) != bytes([number]) * 8:
                clashes.append(number)
            ring.drop(arena)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert clashes == []
    assert ring.free == 2


def guard_of(data: bytearray, steps: list[int]) -> InPlaceGuard:
    live = {"w": TensorBuffer(name="w", dtype="U8", shape=(len(data),), data=memoryview(data))}
    return InPlaceGuard(fingerprint=lambda: tuple(steps), live=lambda: live)


def test_in_place_copies_nothing_and_refuses_steps() -> None:
    """While live bytes are served neither a step nor a second version is let through."""
    data = bytearray(b"abc")
    guard = guard_of(data, [])
    guard.before_step()
    buffers = guard.stage()
    assert buffers["w"].data.obj is data
    assert guard.is_held
    with pytest.raises(StagingError, match="must not step"):
        guard.before_step()
    with pytest.raises(StagingError, match="cannot be staged"):
        guard.stage()
    guard.verify(by_digest=True)
    guard.release()
    guard.before_step()
    assert not guard.is_held


def test_in_place_finds_mutation() -> None:
    """A step behind the guard's back is found: by counters cheaply, by digests always."""
    data, steps = bytearray(b"abc"), [0]
    guard = guard_of(data, steps)
    with pytest.raises(StagingError, match="nothing is staged"):
        guard.verify(by_digest=False)
    guard.stage()
    data[0] ^= 1
    guard.verify(by_digest=False)
    with pytest.raises(StagingError, match="w moved"):
        guard.verify(by_digest=True)
    data[0] ^= 1
    steps[0] += 1
    with pytest.raises(StagingError, match="counters"):
        guard.verify(by_digest=False)


def test_a_shelf_counts_who_is_inside() -> None:
    """The load that a relay tells others is the number of reads that it answers now."""
    shelf = ObjectShelf()
    shelf.put("o", [memoryview(b"abc")])
    assert shelf.num_readers == 0
    with shelf.reading("o"), shelf.reading("o"), shelf.reading("missing"):
        assert shelf.num_readers == 2
        with pytest.raises(StagingError, match="did not leave"):
            shelf.withdraw("o", patience_s=0)
        assert shelf.num_readers == 2
    assert shelf.num_readers == 0


def test_prepared_memory_is_taken_first() -> None:
    """One free arena is made ready, no more; the next take gets that one."""
    allocated: list[int] = []

    def allocate(num_bytes: int) -> memoryview:
        allocated.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    ring = ArenaRing(capacity=3, clock=FakeClock(), allocate=allocate)
    for _ in range(2):
        ring.prepare(100)
    assert allocated == [100]
    first = ring.take(100)
    assert allocated == [100]
    ring.prepare(100)
    ring.drop(first)
    assert allocated == [100, 100]
    taken = [ring.take(100) for _ in range(2)]
    assert allocated == [100, 100]
    taken.append(ring.take(200))
    ring.prepare(100)  # nothing is free
    assert allocated == [100, 100, 200]
    assert {arena.index for arena in taken} == {0, 1, 2}


def test_memory_is_prepared_for_arenas_that_will_be_used_in_turn() -> None:
    """As many as are asked for, those in use counted, and no more of the ring than that."""
    allocated: list[int] = []

    def allocate(num_bytes: int) -> memoryview:
        allocated.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    ring = ArenaRing(capacity=4, clock=FakeClock(), allocate=allocate)
    ring.take(100)
    for _ in range(2):
        ring.prepare(100, in_use=3)
    assert len(allocated) == 3
    for _ in range(2):
        ring.take(100)
    assert len(allocated) == 3
    ring.prepare(100, in_use=3)  # none of the three is free
    assert len(allocated) == 4
    ring.take(100)
    ring.prepare(100, in_use=9)
    assert len(allocated) == 4


def test_a_shelf_serves_the_same_bytes_from_elsewhere() -> None:
    """New readers get the copy; the old memory is free once nobody is inside it."""
    shelf, live = ObjectShelf(), bytearray(b"weights")
    shelf.put("o", [memoryview(live)])
    copy = [memoryview(b"weights")]
    shelf.replace("gone", copy, patience_s=0.01)
    cut: list[str] = []
    with shelf.reading("o", cancel=lambda: cut.append("old")) as old:
        assert old is not None
        with pytest.raises(StagingError, match="did not leave"):
            shelf.replace("o", copy, patience_s=0.01)
        with pytest.raises(StagingError, match="did not leave"):
            shelf.withdraw("o", patience_s=0.01)
        with pytest.raises(StagingError, match="did not leave"):
            shelf.replace("o", copy, patience_s=0.01)
        assert set(cut) == {"old"}
        with shelf.reading("o") as new:
            assert new is not None
            assert next(new.pieces(0, 7)).obj is not live
        assert next(old.pieces(0, 7)).obj is live
    shelf.replace("o", copy, patience_s=0.01)
    live[:] = b"changed"
    with shelf.reading("o") as new:
        assert new is not None
        assert bytes(next(new.pieces(0, 7))) == b"weights"
    shelf.withdraw("o", patience_s=0.01)


def test_replacing_waits_for_readers_to_leave() -> None:
    """A reader that gets on is not cut, and whoever replaces is back when it has left."""
    shelf = ObjectShelf()
    shelf.put("o", [memoryview(b"weights")])
    cut: list[str] = []
    replacing = threading.Thread(
        target=lambda: shelf.replace("o", [memoryview(b"weights")], patience_s=20)
    )
    with shelf.reading("o", cancel=lambda: cut.append("old")):
        replacing.start()
    replacing.join(20)
    assert not replacing.is_alive()
    assert cut == []
