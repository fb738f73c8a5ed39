"""A clock that jumps: waiting costs nothing and a test decides what time it is."""

import asyncio
import threading

_START_S = 1_700_000_000.0


class FakeClock:
    """Time that moves only when somebody sleeps or advances it; usable from several threads."""

    def __init__(self, *, time_s: float = _START_S) -> None:
        self._lock = threading.Lock()
        self._time_s = time_s
        self._monotonic_s = 0.0

    def time(self) -> float:
        """Return the Unix seconds that the clock stands at."""
        with self._lock:
            return self._time_s

    def monotonic(self) -> float:
        """Return seconds since the clock was made."""
        with self._lock:
            return self._monotonic_s

    def sleep(self, seconds: float) -> None:
        """Jump ahead by ``seconds``; zero or less does nothing."""
        if seconds > 0:
            self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass at once. Raises ValueError if negative: time never goes back."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds:g} s; use set_time")
        with self._lock:
            self._time_s += seconds
            self._monotonic_s += seconds

    def set_time(self, time_s: float) -> None:
        """Set the wall clock, as an operator or NTP does; monotonic time does not notice."""
        with self._lock:
            self._time_s = time_s


class FakeAsyncClock:
    """The same time for code in an event loop: a sleeper jumps, and lets the others run."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()

    def monotonic(self) -> float:
        """Return seconds since the clock was made."""
        return self.clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Jump ahead and yield once."""
        self.clock.sleep(seconds)
        await asyncio.sleep(0)  # noqa: TID251 - this is the clock
