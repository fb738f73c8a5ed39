"""Who is asked next: the fleet as last seen, our own load on each engine, and who is left alone."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from paceline.core.clock import AsyncClock
from paceline.refit.errors import ControlUnavailableError
from paceline.refit.model import InstalledReport
from paceline.refit.rollouts.model import Fleet, RolloutConfig, Want
from paceline.refit.rollouts.routing import choose_engine, explain_none

log = logging.getLogger(__name__)

OLD_POLLS = 5
"""A fleet seen so many intervals ago is asked for before it is used; a younger one meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """An engine that was chosen for a prompt."""

    report: InstalledReport
    newest: int
    """At that moment; what the bound counts from."""
    num_choices: int

    @property
    def worker_id(self) -> str:
        """The engine's name."""
        return self.report.worker_id

    @property
    def who(self) -> str:
        """The engine's name and place, for messages."""
        return f"engine {self.report.worker_id} at {self.report.endpoint}"


class Roster:
    """Used from one event loop."""

    def __init__(
        self, config: RolloutConfig, *, fleet: Callable[[], Fleet], clock: AsyncClock
    ) -> None:
        """Take the parts; ``fleet`` blocks, and runs in a thread."""
        self._config = config
        self._ask_fleet = fleet
        self._clock = clock
        self._fleet: Fleet | None = None
        self._seen_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._loads: Counter[str] = Counter()
        self._avoided_until: dict[str, float] = {}

    async def take(self, want: Want, *, except_for: Collection[str] = ()) -> Picked | str:
        """Pick an engine and count the load on it, or say why there is none."""
        fleet = await self.current()
        if fleet is None:
            return "the control service does not answer"
        now_s = self._clock.monotonic()
        avoided = {name for name, until in self._avoided_until.items() if now_s < until}
        avoided.update(except_for)
        report = choose_engine(fleet, self._loads, want=want, config=self._config, avoided=avoided)
        if report is None:
            return explain_none(fleet, avoided, want=want, config=self._config)
        self._loads[report.worker_id] += want.sampling.n
        return Picked(report=report, newest=fleet.newest, num_choices=want.sampling.n)

    def give_back(self, picked: Picked) -> None:
        """End the load of a pick."""
        self._loads[picked.worker_id] -= picked.num_choices
        if not self._loads[picked.worker_id]:
            del self._loads[picked.worker_id]

    def avoid(self, picked: Picked, *, seconds: float) -> None:
        """Leave an engine alone for a while."""
        now_s = self._clock.monotonic()
        self._avoided_until = {
            name: until for name, until in self._avoided_until.items() if until > now_s
        }
        self._avoided_until[picked.worker_id] = now_s + seconds

    async def newest(self) -> int:
        """Return the newest sequence known."""
        fleet = await self.current()
        return -1 if fleet is None else fleet.newest

    async def current(self) -> Fleet | None:
        """Return the fleet; the last known one while nobody can say. Whoever asks rarely waits.

        A fleet a little older than the interval is renewed beside the request, an old one before.
        """
        age_s = self._clock.monotonic() - self._seen_at
        if age_s >= self._config.poll_interval_s:
            if self._asking is None:
                self._asking = asyncio.create_task(self._renew())
            if age_s >= OLD_POLLS * self._config.poll_interval_s:
                await asyncio.shield(self._asking)
        return self._fleet

    async def close(self) -> None:
        """Wait for what is being asked; its thread cannot be interrupted."""
        if self._asking is not None:
            await asyncio.wait({self._asking})

    async def _renew(self) -> None:
        try:
            self._fleet = await asyncio.to_thread(self._ask_fleet)
        except ControlUnavailableError as exc:
            log.warning("rollouts go on with the engines known before: %s", exc)
        finally:
            self._seen_at = self._clock.monotonic()
            self._asking = None
