"""What was read of an account's machines just now, for whoever would ask the provider at once.

Providers count calls. One listing answers for every machine that is waited for, and for whoever
compares the record; a look that was just taken need not be taken again.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock

from paceline.core.clock import Clock
from paceline.rental.model import InstanceState, InstanceStatus

Row = Mapping[str, object]
LOOK_S_MAX = 60.0
"""For so long a look stands for another that would only tell what to do next."""


class Looks:
    """The newest listing of one account and the last look at each machine; for many threads."""

    def __init__(self, read: Callable[[], Sequence[Row]], *, clock: Clock) -> None:
        """Take who reads the listing from the provider, and a clock."""
        self._read = read
        self._clock = clock
        self._reading = Lock()
        self._lock = Lock()
        self._listed: tuple[float, Sequence[Row]] = (float("-inf"), ())
        self._statuses: dict[str, tuple[float, InstanceStatus]] = {}

    def listing(self) -> Sequence[Row]:
        """Return a listing that was asked for after this call began.

        Callers that wait for one another are all answered by the next one. Raises what reading
        raises.
        """
        since_s = self._clock.monotonic()
        with self._reading:
            known = self.listed_since(since_s)
            if known is not None:
                return known
            asked_s = self._clock.monotonic()
            rows = self._read()
            with self._lock:
                self._listed = (asked_s, rows)
            return rows

    def listed_since(self, since_s: float) -> Sequence[Row] | None:
        """Return the newest listing if it was asked for after ``since_s``. Asks nobody."""
        with self._lock:
            asked_s, rows = self._listed
        return rows if asked_s > since_s else None

    def keep(self, instance_id: str, status: InstanceStatus) -> InstanceStatus:
        """Remember what was read of a machine, and return it; that one is gone is no use later."""
        if InstanceState.parse(status.state) is not InstanceState.DESTROYED:
            with self._lock:
                self._statuses[instance_id] = (self._clock.monotonic(), status)
        return status

    def take(self, instance_id: str) -> InstanceStatus | None:
        """Return the last look at a machine, once, if it is no older than LOOK_S_MAX."""
        with self._lock:
            seen_s, status = self._statuses.pop(instance_id, (float("-inf"), None))
        return status if self._clock.monotonic() - seen_s <= LOOK_S_MAX else None
