"""A ring of arenas in host memory: copies of weights that stay still while anybody needs them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.refit.errors import NoFreeArenaError

_ALIGNMENT = 64
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """One stretch of host memory, owned by whoever holds it."""

    index: int
    data: memoryview
    """Writable by the first holder until it shares the arena; aligned to 64 bytes."""


class ArenaRing:
    """A fixed number of arenas; one is handed out again only when nobody holds it any more.

    Safe from several threads. Memory is allocated on first use and kept.
    """

    def __init__(
        self,
        *,
        capacity: int,
        clock: Clock,
        wait_s: float = 0.0,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> None:
        """Set up an empty ring.

        Args:
            capacity: how many arenas there may be.
            clock: for waiting.
            wait_s: how long ``take`` blocks when all are held; 0 means that it refuses at once.
            allocate: returns so many writable bytes, aligned to 64; plain memory by default.
        """
        if capacity < 1:
            raise ValueError("a ring has at least one arena")
        self._clock = clock
        self._wait_s = wait_s
        self._allocate = allocate or plain_block
        self._lock = threading.Lock()
        self._memory: list[memoryview | None] = [None] * capacity
        self._holders = [0] * capacity

    @property
    def free(self) -> int:
        """How many arenas nobody holds."""
        with self._lock:
            return self._holders.count(0)

    def take(self, num_bytes: int) -> Arena:
        """Return an arena of this size, held once by the caller; its content is anything.

        Raises:
            NoFreeArenaError: all are held, also after the wait.
        """
        found: list[Arena] = []

        def try_once() -> bool:
            arena = self._try_take(num_bytes)
            found.extend([arena] if arena else [])
            return bool(found)

        try:
            wait_until(
                try_once,
                what="a free arena",
                clock=self._clock,
                timeout_s=self._wait_s,
                interval_s=_POLL_S,
            )
        except DeadlineExceededError as exc:
            raise NoFreeArenaError(
                f"all {len(self._holders)} arenas hold versions that are still needed, to be read "
                "or as a base; wait for the readers, or give the trainer more arenas"
            ) from exc
        return found[0]

    def hold(self, arena: Arena) -> None:
        """Add a holder; only who holds an arena may share it."""
        with self._lock:
            self._expect_held(arena)
            self._holders[arena.index] += 1

    def drop(self, arena: Arena) -> None:
        """Remove a holder; after the last one the memory may be overwritten at any time."""
        with self._lock:
            self._expect_held(arena)
            self._holders[arena.index] -= 1

    def prepare(self, num_bytes: int, *, in_use: int = 1) -> None:
        """Have one free arena ready, its pages in memory, so that the next ``take`` costs nothing.

        The system hands out memory page by page at the first write; who captures should not pay
        for that, nor who waits for what was captured. Stops when none is free.

        Args:
            num_bytes: of an arena.
            in_use: how many arenas will soon be used in turn; those have memory from now on.
        """
        for _ in self._memory:
            index = self._unready(num_bytes, in_use)
            if index is None:
                return
            memory = self._allocate(num_bytes)
            np.frombuffer(memory, dtype=np.uint8)[:] = 0
            with self._lock:
                if self._holders[index] == 0 and not self._has_room(index, num_bytes):
                    self._memory[index] = memory

    def _unready(self, num_bytes: int, in_use: int) -> int | None:
        """Return a free arena that wants memory; None if there is none, or enough have it."""
        with self._lock:
            free = [index for index, holders in enumerate(self._holders) if holders == 0]
            ready = [self._has_room(index, num_bytes) for index in range(len(self._memory))]
            if any(ready[index] for index in free) and sum(ready) >= in_use:
                return None
            return next((index for index in free if not ready[index]), None)

    def _try_take(self, num_bytes: int) -> Arena | None:
        with self._lock:
            free = [index for index, holders in enumerate(self._holders) if holders == 0]
            if not free:
                return None
            index = min(free, key=lambda each: not self._has_room(each, num_bytes))
            memory = self._memory[index]
            if memory is None or len(memory) < num_bytes:
                memory = self._allocate(num_bytes)
                self._memory[index] = memory
            self._holders[index] = 1
            return Arena(index, memory[:num_bytes])

    def _has_room(self, index: int, num_bytes: int) -> bool:
        memory = self._memory[index]
        return memory is not None and len(memory) >= num_bytes

    def _expect_held(self, arena: Arena) -> None:
        if self._holders[arena.index] < 1:
            raise ValueError(f"arena {arena.index} is not held")


def plain_block(num_bytes: int) -> memoryview:
    """Return untouched memory that starts at a multiple of 64."""
    whole = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + num_bytes].data
