"""What a receiver remembers of its sources from one version to the next: no I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from paceline.core.retry import RetryPolicy
from paceline.refit.errors import FetchError, VerifyError

REST = RetryPolicy(attempts=12, first_delay_s=0.5, delay_s_max=60.0, jitter=0.0)
"""How long a source is left alone after it failed so many times in a row."""
BLAME_S = 600.0
"""How long a source is avoided that sent bytes with another hash."""
WEIGHT = 0.3
"""Of the newest measurement in a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One source's, as far as it was used."""

    rate: float | None = None
    """Bytes per second of one read."""
    failures: int = 0
    """In a row."""
    resting_until_s: float = 0.0
    blamed_until_s: float = 0.0


class SourceBook:
    """Standings by worker id; used from one thread."""

    def __init__(self) -> None:
        self._standings: dict[str, Standing] = {}

    def rate_of(self, worker_id: str) -> float | None:
        """Return what was measured; None if nothing was."""
        return self._of(worker_id).rate

    def rates(self) -> Mapping[str, float]:
        """Return everything that was measured."""
        return {name: each.rate for name, each in self._standings.items() if each.rate is not None}

    def is_usable(self, worker_id: str, *, now_s: float) -> bool:
        """Say whether to read from it now."""
        found = self._of(worker_id)
        return now_s >= max(found.resting_until_s, found.blamed_until_s)

    def note_read(self, worker_id: str, *, num_bytes: int, seconds: float) -> None:
        """Take a read that went well into the rate."""
        found = self._of(worker_id)
        rate = found.rate
        if seconds > 0:
            measured = num_bytes / seconds
            rate = measured if rate is None else rate + WEIGHT * (measured - rate)
        self._standings[worker_id] = replace(found, rate=rate, failures=0)

    def note_problem(
        self, worker_id: str, problem: FetchError | VerifyError, *, now_s: float
    ) -> None:
        """Blame a source that lied; let one that failed rest."""
        if isinstance(problem, VerifyError):
            self.blame(worker_id, now_s=now_s)
        else:
            self.note_failure(worker_id, now_s=now_s)

    def note_failure(self, worker_id: str, *, now_s: float) -> None:
        """Leave a source alone for a while, longer each time."""
        found = self._of(worker_id)
        failures = found.failures + 1
        delay_s = REST.delay_s(min(failures, REST.attempts - 1), chance=0.0) or REST.delay_s_max
        self._standings[worker_id] = replace(
            found, failures=failures, resting_until_s=now_s + delay_s
        )

    def blame(self, worker_id: str, *, now_s: float) -> None:
        """Avoid a source that lied."""
        found = self._of(worker_id)
        self._standings[worker_id] = replace(found, blamed_until_s=now_s + BLAME_S)

    def forgive(self, worker_ids: Iterable[str]) -> None:
        """Try these again: there is nobody else."""
        for name in worker_ids:
            self._standings[name] = Standing(rate=self._of(name).rate)

    def _of(self, worker_id: str) -> Standing:
        return self._standings.get(worker_id, Standing())
