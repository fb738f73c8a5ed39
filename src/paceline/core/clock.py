"""Where every wait and time stamp comes from."""

from typing import Protocol


class Clock(Protocol):
    """Time as an argument, so that a test can advance it."""

    def time(self) -> float:
        """Return seconds since the Unix epoch; may jump when the computer's clock is set."""
        ...

    def monotonic(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block for ``seconds``; zero or less returns at once."""
        ...


class AsyncClock(Protocol):
    """The same for code that runs in an event loop."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let others run for ``seconds``; zero or less lets them run once."""
        ...
