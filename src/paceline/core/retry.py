"""How often and how late to try again: pure arithmetic, randomness handed in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with a cap and jitter."""

    attempts: int = 4
    """How many tries in all, the first one included."""
    first_delay_s: float = 0.2
    factor: float = 2.0
    delay_s_max: float = 10.0
    jitter: float = 0.25
    """Share of a delay by which it may grow, so that many clients do not return together."""

    def delay_s(self, tries: int, *, chance: float) -> float | None:
        """Return the wait before the next try after ``tries`` failures, or None to give up.

        Args:
            tries: failures so far, at least 1.
            chance: a random number in [0, 1) that places the delay inside its jitter.
        """
        if tries >= self.attempts:
            return None
        base_s = min(self.delay_s_max, self.first_delay_s * self.factor ** (tries - 1))
        return base_s * (1 + self.jitter * chance)
