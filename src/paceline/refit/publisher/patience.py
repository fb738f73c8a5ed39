"""Waiting for a control service that does not answer for a while."""

from collections.abc import Callable
from typing import TypeVar

from paceline.core.clock import Clock
from paceline.core.retry import RetryPolicy
from paceline.refit.errors import ControlUnavailableError

_CALL_RETRY = RetryPolicy(attempts=1000, first_delay_s=0.2, delay_s_max=2.0, jitter=0.0)
"""The deadline ends it, not the count."""
_T = TypeVar("_T")


def persist(call: Callable[[], _T], *, clock: Clock, wait_s: float) -> _T:
    """Repeat an idempotent call while the service does not answer, until the deadline."""
    deadline = clock.monotonic() + wait_s
    tries = 0
    while True:
        try:
            return call()
        except ControlUnavailableError:
            tries += 1
            delay_s = _CALL_RETRY.delay_s(tries, chance=0.0)
            if delay_s is None or clock.monotonic() + delay_s > deadline:
                raise
            clock.sleep(delay_s)
