"""Connections that wait for the next request: over a long way a new one costs several round trips.

A source closes them at any time, and so do boxes in between, silently; the latter are what an age
is for. Whatever endpoint was asked last, those of all others are looked at too: nobody may ever
ask them again.
"""

import threading

from paceline.core.clock import Clock
from paceline.refit.transports.http.connection import Connection

KEPT_MAX = 8
"""Per endpoint."""
KEPT_S = 240.0
"""Less than servers keep theirs."""


class KeptConnections:
    """Idle connections by endpoint; safe from several threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._idle: dict[str, list[tuple[Connection, float]]] = {}
        """With when they were given back, newest last."""
        self._lock = threading.Lock()

    def take(self, endpoint: str) -> Connection | None:
        """Return the one that was used last, which is not to be shared."""
        with self._lock:
            old = self._outdated()
            found = self._idle.get(endpoint)
            taken = found.pop()[0] if found else None
        _close(old)
        return taken

    def give_back(self, endpoint: str, connection: Connection) -> None:
        """Keep one whose answer was read to the end."""
        with self._lock:
            old = self._outdated()
            kept = self._idle.setdefault(endpoint, [])
            kept.append((connection, self._clock.monotonic()))
            if len(kept) > KEPT_MAX:
                old.append(kept.pop(0)[0])
        _close(old)

    def close(self) -> None:
        """Close all; idempotent."""
        with self._lock:
            found, self._idle = self._idle, {}
        _close([each for kept in found.values() for each, _ in kept])

    def _outdated(self) -> list[Connection]:
        """Take out those that have waited for too long, and return them."""
        since = self._clock.monotonic() - KEPT_S
        old = [each for kept in self._idle.values() for each, at in kept if at < since]
        if old:
            young = {
                endpoint: [pair for pair in kept if pair[1] >= since]
                for endpoint, kept in self._idle.items()
            }
            self._idle = {endpoint: kept for endpoint, kept in young.items() if kept}
        return old


def _close(connections: list[Connection]) -> None:
    for each in connections:
        each.close()
