"""How much one service takes on: calls at once, streams at once, calls a second by role."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.refit.control.auth import TokenRole
from paceline.refit.errors import ExhaustedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Limits of one replica; whatever is over them is RESOURCE_EXHAUSTED."""

    message_bytes_max: int = 4 * 1024 * 1024
    """Of a request."""
    calls_max: int = 1024
    """Answered at the same time."""
    streams_max: int = 2048
    calls_per_s: float = 20_000.0
    """Of all bearers of one role's token together."""
    burst_s: float = 2.0
    """How many seconds' worth may come at once."""


class Pacing:
    """Counts what is under way; used from one event loop."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._calls = self._streams = 0
        self._left: dict[TokenRole, tuple[float, float]] = {}

    def admit(self, role: TokenRole, *, now_s: float) -> None:
        """Take one call of a role off its allowance. Raises ExhaustedError if none is left."""
        full = self._limits.calls_per_s * self._limits.burst_s
        left, at_s = self._left.get(role, (full, now_s))
        left = min(full, left + (now_s - at_s) * self._limits.calls_per_s)
        self._left[role] = max(left - 1, 0), now_s
        if left < 1:
            raise ExhaustedError(
                f"more than {self._limits.calls_per_s:g} calls a second of {role} tokens; slow down"
            )

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call while it lasts. Raises ExhaustedError."""
        if self._calls >= self._limits.calls_max:
            raise ExhaustedError(f"{self._calls} calls are being answered; try again")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream while it lasts. Raises ExhaustedError."""
        if self._streams >= self._limits.streams_max:
            raise ExhaustedError(f"{self._streams} streams are open; ask for lists instead")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1
