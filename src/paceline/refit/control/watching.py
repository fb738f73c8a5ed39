"""Streams of what is: the present state first, then again whenever it has moved.

All watchers of a model's versions share one look at its count of changes, ten times a second;
only when it moves does each ask for what it does not know yet. Nothing is kept per watcher, so
a reader that lost its stream resumes on any replica with the revision that it saw last.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

from paceline.core.errors import PacelineError
from paceline.refit.control import calls
from paceline.refit.control.desk import Desk
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.errors import ControlUnavailableError
from paceline.refit.wire.rpc import OWN_SERVICE, Message, Rpc, rpc_named

VERSIONS_INTERVAL_S: Final = 0.1
OTHERS_INTERVAL_S: Final = 1.0
RECHECK_S: Final = 5.0
"""How often a stream's token is looked at again."""

_VERSIONS: Final = rpc_named(OWN_SERVICE, "WatchVersions")

WATCHES: Final[dict[str, Callable[[ControlLedger, Any], Message]]] = {
    _VERSIONS.path: calls.watch_versions,
    rpc_named(OWN_SERVICE, "WatchWorkers").path: calls.watch_workers,
    rpc_named(OWN_SERVICE, "WatchLeases").path: calls.watch_leases,
}
"""Path -> what is seen now; of versions, what is new."""

_EXPIRIES: Final = {"workers", "leases"}


class Watching:
    """Serves streams; used from one event loop."""

    def __init__(self, ledger: ControlLedger, desk: Desk) -> None:
        self._ledger = ledger
        self._desk = desk
        self._stopping = asyncio.Event()
        self._pulses: dict[str, _Pulse] = {}

    def stop(self) -> None:
        """End every stream; their readers go on elsewhere."""
        self._stopping.set()
        for pulse in self._pulses.values():
            pulse.moved.set()

    async def follow(
        self, rpc: Rpc, request: Any, still_allowed: Callable[[], None]
    ) -> AsyncIterator[bytes]:
        """Yield replies until the service stops or the token is revoked, then raise.

        Raises:
            ControlUnavailableError: the service stops.
            AccessRefusedError, StoreError, InvalidRequestError, NotFoundError: as lists do.
        """
        if rpc is _VERSIONS:
            replies = self._follow_versions(request, still_allowed)
        else:
            replies = self._follow_state(rpc, request, still_allowed)
        async for reply in replies:
            yield reply

    async def _follow_versions(
        self, request: Any, still_allowed: Callable[[], None]
    ) -> AsyncIterator[bytes]:
        look = partial(calls.watch_versions, self._ledger, request)
        reply: Any = await self._desk.run(look)
        # The first one always, so that a reader knows that it is connected and up to date.
        yield reply.SerializeToString()
        pulse = self._pulses.setdefault(request.model_name, _Pulse())
        pulse.watchers += 1
        try:
            if pulse.task is None:
                pulse.task = asyncio.create_task(self._beat(request.model_name, pulse))
            while True:
                request.after = reply.revision
                await self._wait(pulse.moved, RECHECK_S)
                still_allowed()
                if pulse.error is not None:
                    raise pulse.error
                reply = await self._desk.run(look)
                if reply.revision != request.after:
                    yield reply.SerializeToString()
        finally:
            pulse.watchers -= 1
            if pulse.watchers == 0:
                self._pulses.pop(request.model_name, None)
                if pulse.task is not None:
                    pulse.task.cancel()

    async def _beat(self, model_name: str, pulse: "_Pulse") -> None:
        seen = -1
        look = partial(self._ledger.revision_of, model_name)
        while True:
            try:
                revision = await self._desk.run(look)
            except PacelineError as exc:
                pulse.error = exc
                pulse.moved.set()
                return
            if revision != seen:
                seen = revision
                moved, pulse.moved = pulse.moved, asyncio.Event()
                moved.set()
            await pause(self._stopping, VERSIONS_INTERVAL_S)

    async def _follow_state(
        self, rpc: Rpc, request: Any, still_allowed: Callable[[], None]
    ) -> AsyncIterator[bytes]:
        look = partial(WATCHES[rpc.path], self._ledger, request)
        shown = None
        while True:
            reply = await self._desk.run(look)
            identity = _without_expiries(reply)
            if identity != shown:
                shown = identity
                yield reply.SerializeToString()
            await self._wait(self._stopping, OTHERS_INTERVAL_S)
            still_allowed()

    async def _wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Wait a while, or less if the event comes. Raises ControlUnavailableError at the end."""
        await pause(event, timeout_s)
        if self._stopping.is_set():
            raise ControlUnavailableError("this control service stops; connect again")


async def pause(event: asyncio.Event, seconds: float) -> None:
    """Wait, or less if the event comes."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


class _Pulse:
    """One model's shared look at its count of changes."""

    def __init__(self) -> None:
        self.moved = asyncio.Event()
        self.watchers = 0
        self.task: asyncio.Task[None] | None = None
        self.error: PacelineError | None = None


def _without_expiries(reply: Any) -> bytes:
    """Return what a reader would call the same, however often leases are renewed."""
    copy = type(reply).FromString(reply.SerializeToString())
    for name in _EXPIRIES & {field.name for field in copy.DESCRIPTOR.fields}:
        for each in getattr(copy, name):
            each.ClearField("expires_at_unix_ms")
    raw: bytes = copy.SerializeToString()
    return raw
