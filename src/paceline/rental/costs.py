"""What machines have cost, by run, role, backend and day, and what providers say of it. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from paceline.rental.lifecycle import MachineState, is_over
from paceline.rental.records import Machine

_HOUR_S = 3600.0
_NUM_DAYS_MAX = 4000
"""Of one machine; a clock that was wrong must not make a row for every day since 1970."""


class By(StrEnum):
    """What costs are added up over."""

    RUN = "run"
    ROLE = "role"
    BACKEND = "backend"
    DAY = "day"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What one machine has cost on one day, UTC."""

    run_id: str
    role: str
    backend: str
    day: str
    hours: float
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """What a group has cost."""

    name: str
    num_machines: int
    hours: float
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Billed:
    """One machine's cost by our clock beside what its provider has billed."""

    label: str
    backend: str
    ours_usd: float
    theirs_usd: float | None
    """None: the provider has no entry, or no books that can be read."""
    note: str = ""

    @property
    def difference_usd(self) -> float | None:
        """How much more the provider has billed."""
        return None if self.theirs_usd is None else self.theirs_usd - self.ours_usd


def stretches(machine: Machine, *, now_s: float) -> Iterable[Stretch]:
    """Yield what a machine has cost, day by day; the sum is ``machine.cost_usd``."""
    if machine.state is MachineState.NEVER_CREATED:
        return
    over_s = machine.ended_at if is_over(machine.state) else None
    until_s = now_s if over_s is None else over_s
    from_s = machine.intended_at
    for _ in range(_NUM_DAYS_MAX):
        if from_s >= until_s:
            return
        begun = datetime.fromtimestamp(from_s, tz=UTC)
        midnight = datetime(begun.year, begun.month, begun.day, tzinfo=UTC) + timedelta(days=1)
        to_s = min(until_s, midnight.timestamp())
        hours = (to_s - from_s) / _HOUR_S
        yield Stretch(
            run_id=machine.run_id,
            role=machine.role,
            backend=machine.backend,
            day=begun.date().isoformat(),
            hours=hours,
            usd=hours * machine.offer.dph,
        )
        from_s = to_s


def cost_rows(machines: Sequence[Machine], by: By, *, now_s: float) -> list[CostRow]:
    """Return what groups of machines have cost, by name; days in their order."""
    found: dict[str, list[tuple[str, Stretch]]] = {}
    for machine in machines:
        for stretch in stretches(machine, now_s=now_s):
            found.setdefault(_name(stretch, by), []).append((machine.label, stretch))
    return [
        CostRow(
            name=name,
            num_machines=len({label for label, _ in parts}),
            hours=sum(part.hours for _, part in parts),
            usd=sum(part.usd for _, part in parts),
        )
        for name, parts in sorted(found.items())
    ]


def _name(stretch: Stretch, by: By) -> str:
    match by:
        case By.RUN:
            return stretch.run_id
        case By.ROLE:
            return f"{stretch.run_id} {stretch.role}"
        case By.BACKEND:
            return stretch.backend
        case By.DAY:
            return stretch.day
