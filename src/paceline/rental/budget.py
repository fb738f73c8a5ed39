"""Money: what a run may cost, what it has cost, what its plan can cost at worst. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from paceline.rental.lifecycle import is_over
from paceline.rental.records import Machine

BOOT_S_MIN: Final = 60.0
"""Less than this is no time in which a machine could be had: no attempt is begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """US dollars that a run may cost."""

    soft_usd: float
    """Warn from here on."""
    hard_usd: float
    """Not more than this: everything is torn down before."""
    grace_s: float = 120.0
    """How long before the hard cap the end of a run begins, so that artifacts can be pulled."""


class Level(StrEnum):
    """How far a budget is used up."""

    WITHIN = "within"
    SOFT = "soft"
    HARD = "hard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What a run costs, now and from now on."""

    spent_usd: float
    burn_dph: float
    """What everything that may bill costs an hour, attempts in flight included."""
    level: Level
    hard_in_s: float | None
    """Until the hard cap is reached if nothing changes; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRole:
    """What a role may rent, for a look at the worst case."""

    role: str
    count: int
    boot_timeout_s: float
    dphs: Sequence[float]
    """Prices of the offers that may be taken, disk included, in the order of the attempts."""
    firsts: Sequence[float] = ()
    """What each of its machines costs where an offer is one machine; empty: all the first price."""

    @property
    def best_dph(self) -> float:
        """What its machines cost an hour if each takes the first offer that is left."""
        return sum(self.firsts) if self.firsts else self.count * self.dphs[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtWorst:
    """The most that a plan can cost."""

    hourly_usd: float
    """With every machine at the dearest price that may be taken."""
    best_hourly_usd: float
    """With every machine at the first price that is left for it."""
    startup_usd: float
    """Until all machines run, if each takes as long as it may, at those prices."""


def assess(machines: Iterable[Machine], *, now_s: float, caps: Budget | None) -> Spending:
    """Return what the machines of a run cost; whatever is not proven gone is taken to bill."""
    known = list(machines)
    spent = sum(machine.cost_usd(now_s=now_s) for machine in known)
    burn = sum(machine.offer.dph for machine in known if not is_over(machine.state))
    if caps is None:
        return Spending(spent_usd=spent, burn_dph=burn, level=Level.WITHIN, hard_in_s=None)
    level = Level.SOFT if spent >= caps.soft_usd else Level.WITHIN
    return Spending(
        spent_usd=spent,
        burn_dph=burn,
        level=Level.HARD if spent >= caps.hard_usd else level,
        hard_in_s=affordable_s(hard_usd=caps.hard_usd, spent_usd=spent, burn_dph=burn),
    )


def affordable_s(*, hard_usd: float, spent_usd: float, burn_dph: float) -> float | None:
    """Return for how long a burn can go on; None: for ever."""
    if burn_dph <= 0:
        return None if spent_usd < hard_usd else 0.0
    return max(0.0, hard_usd - spent_usd) / burn_dph * 3600


def refuse_attempt(
    *, dph: float, boot_timeout_s: float, hard_usd: float | None, now: Spending
) -> str | None:
    """Return why one more machine may not be tried: a boot that fails has to be paid as well."""
    if hard_usd is None or dph <= 0:
        return None
    if now.burn_dph + dph > hard_usd:
        return (
            f"a machine of {dph:.3f} $/h beside {now.burn_dph:.3f} $/h that burn already costs "
            f"more in an hour than the hard cap of {hard_usd:.2f} USD; raise budget.hard_usd or "
            "set max_dph"
        )
    left_usd = hard_usd - now.spent_usd
    boot_usd = (now.burn_dph + dph) * max(boot_timeout_s, BOOT_S_MIN) / 3600
    if boot_usd <= left_usd:
        return None
    return (
        f"a machine of {dph:.3f} $/h beside {now.burn_dph:.3f} $/h that burn already can cost "
        f"{boot_usd:.2f} USD before it runs, and of the hard cap of {hard_usd:.2f} USD "
        f"{max(0.0, left_usd):.2f} are left; raise budget.hard_usd or shorten boot_timeout"
    )


def worst_case(roles: Iterable[PlannedRole]) -> AtWorst:
    """Return the most that a plan can cost."""
    priced = [(role, max(role.dphs), role.best_dph) for role in roles if role.dphs]
    return AtWorst(
        hourly_usd=sum(role.count * worst for role, worst, _ in priced),
        best_hourly_usd=sum(best for _, _, best in priced),
        startup_usd=sum(best * role.boot_timeout_s / 3600 for role, _, best in priced),
    )


def refuse_plan(roles: Sequence[PlannedRole], caps: Budget | None) -> str | None:
    """Return why a plan cannot be begun: an hour of it, or its start, is beyond the hard cap."""
    if caps is None:
        return None
    worst = worst_case(roles)
    if worst.best_hourly_usd > caps.hard_usd:
        return (
            f"the cheapest plan costs {worst.best_hourly_usd:.2f} USD an hour and the hard cap is "
            f"{caps.hard_usd:.2f} USD, which does not pay for one hour; raise budget.hard_usd, or "
            "take fewer or cheaper machines"
        )
    if worst.startup_usd > caps.hard_usd:
        return (
            f"starting may cost {worst.startup_usd:.2f} USD, if every machine takes as long as "
            f"boot_timeout allows, and the hard cap is {caps.hard_usd:.2f} USD; raise "
            "budget.hard_usd, set max_dph, or shorten boot_timeout"
        )
    return None
