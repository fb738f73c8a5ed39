"""Threads that run one at a time, in an order that only their sleeps decide: same seed, same story.

Code under test sleeps on the scheduler's clock as it would on the real one. Whoever sleeps hands
on to whoever wakes next, and time jumps there. A crash ends every thread at its next sleep or
effect, as ``kill -9`` ends a process, with the difference that ``finally`` blocks still run.
"""

import heapq
import threading
from collections.abc import Callable

_START_S = 1_700_000_000.0


class Crash(BaseException):
    """The process ends here, as by kill -9."""


class Countdown:
    """Ends the process at the n-th effect from now, and lets it do nothing more."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.is_dead = False
        self.num_effects = 0

    def tick(self) -> None:
        """Count an effect. Raises Crash when its time has come, and ever after."""
        if self.is_dead:
            raise Crash
        self.num_effects += 1
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.is_dead = True
            raise Crash


class _Task:
    def __init__(self, run: Callable[[], None]) -> None:
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=run, daemon=True)


class Scheduler:
    """A clock, and the threads that sleep on it."""

    def __init__(self, countdown: Countdown) -> None:
        self._countdown = countdown
        self._now_s = 0.0
        self._offset_s = _START_S
        self._queue: list[tuple[float, int, _Task]] = []
        self._seq = 0
        self._back = threading.Semaphore(0)
        self._current: _Task | None = None
        self._bugs: list[BaseException] = []

    # the clock

    def time(self) -> float:
        """Return Unix seconds."""
        return self._offset_s + self._now_s

    def monotonic(self) -> float:
        """Return seconds since the story began."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Let others run until ``seconds`` have passed; without a task, just let them pass."""
        task = self._current
        if task is None:
            self._now_s += max(0.0, seconds)
            return
        self._push(task, max(0.0, seconds))
        self._back.release()
        task.go.acquire()
        if self._countdown.is_dead:
            raise Crash

    def suspend(self, seconds: float) -> None:
        """Let the wall clock jump ahead, as a laptop that slept sees it."""
        self._offset_s += seconds

    # the threads

    def spawn(self, work: Callable[[], None]) -> None:
        """Have ``work`` run beside what runs now, from the next sleep on."""

        def run() -> None:
            task.go.acquire()
            try:
                if not self._countdown.is_dead:
                    work()
            except Crash:
                pass
            except BaseException as exc:  # noqa: BLE001 - raised on by ``run``
                self._bugs.append(exc)
            self._back.release()

        task = _Task(run)
        task.thread.start()
        self._push(task, 0.0)

    def run(self) -> None:
        """Run until every thread has ended. Raises what one of them did not catch."""
        while self._queue:
            wake_s, _, task = heapq.heappop(self._queue)
            self._now_s = max(self._now_s, wake_s)
            self._current = task
            task.go.release()
            self._back.acquire()
            self._current = None
        if self._bugs:
            raise self._bugs[0]

    def _push(self, task: _Task, seconds: float) -> None:
        self._seq += 1
        heapq.heappush(self._queue, (self._now_s + seconds, self._seq, task))
