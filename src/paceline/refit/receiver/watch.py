"""Looking after one attempt while it runs: the lease is kept, a hedge started, a silence ended."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.refit.errors import FetchError
from paceline.refit.receiver.attempt import Attempt, Hedge, Tools
from paceline.refit.receiver.pieces import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """When an attempt is given up or helped."""

    silence_s_max: float
    """No piece for so long, and the attempt is over."""
    hedge_after_s: float
    """No piece for so long, and a spare source is asked for what is missing."""
    timeout_s: float
    between_reads: Callable[[], None]
    """Called often; what it raises ends the attempt."""


class Watch:
    """Judges one attempt; asked by the threads that run it."""

    def __init__(
        self,
        tools: Tools,
        attempt: Attempt,
        targets: Mapping[int, Target],
        *,
        spare: Sequence[str],
        rules: WatchRules,
    ) -> None:
        """Watch ``attempt``, which has not begun; ``spare`` are endpoints that may help."""
        self._tools = tools
        self._attempt = attempt
        self._targets = targets
        self._spare = spare
        self._rules = rules
        self._lock = threading.Lock()
        self.hedges: list[Hedge] = []
        self.stop: BaseException | None = None
        """What ``between_reads`` raised."""

    def is_over(self) -> bool:
        """Say whether the attempt is of no use any more.

        It is asked between any two pieces: what is missing is counted only where it matters.
        """
        with self._lock:
            silent_s = self._tools.clock.monotonic() - self._attempt.last_at
            if not self.hedges and self._spare and silent_s > self._rules.hedge_after_s:
                late = {key: self._targets[key] for key in self._attempt.missing}
                self.hedges.append(
                    Hedge(self._tools, self._spare[0], late, timeout_s=self._rules.timeout_s)
                )
            return (
                self._must_stop()
                or silent_s > self._rules.silence_s_max
                or any(hedge.has(self._attempt.missing) for hedge in self.hedges)
            )

    def silence(self, endpoint: str) -> FetchError:
        """Return the blame for a source from which nothing came."""
        return FetchError(
            f"{endpoint}: nothing came for {self._rules.silence_s_max:g} s; try another source or "
            "later",
            source=endpoint,
        )

    def _must_stop(self) -> bool:
        if self.stop is None:
            try:
                self._rules.between_reads()
            except BaseException as exc:  # noqa: BLE001 - raised once the attempt has let go
                self.stop = exc
        return self.stop is not None
