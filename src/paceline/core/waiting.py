"""The one wait with a deadline."""

from collections.abc import Callable

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError

_GROWTH = 1.5


def wait_until(
    ready: Callable[[], bool],
    *,
    what: str,
    clock: Clock,
    timeout_s: float,
    interval_s: float = 5.0,
    first_interval_s: float | None = None,
) -> None:
    """Poll ``ready`` until it is true, or raise DeadlineExceededError.

    With ``first_interval_s`` the pauses begin with that and grow to ``interval_s``.

    ``ready`` runs at least once, and once more at the deadline. What it raises passes
    through: only the caller knows which failures are worth a next try.
    """
    deadline = clock.monotonic() + timeout_s
    pause_s = interval_s if first_interval_s is None else min(first_interval_s, interval_s)
    while not ready():
        left_s = deadline - clock.monotonic()
        if left_s <= 0:
            raise DeadlineExceededError(f"{what}: not done after {timeout_s:g} s")
        clock.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * _GROWTH, interval_s)
