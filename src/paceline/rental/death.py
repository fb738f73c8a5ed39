"""Why a machine that ran is not there any more: what was seen goes in, a cause comes out. Pure."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from paceline.rental.lifecycle import MachineState
from paceline.rental.model import DeathCause, InstanceState

ENDS_OF_STATES: Final = MappingProxyType(
    {
        InstanceState.DESTROYED: DeathCause.DESTROYED,
        InstanceState.STOPPED: DeathCause.STOPPED,
        InstanceState.UNKNOWN: DeathCause.HOST_LOST,
        InstanceState.LOADING: DeathCause.UNHEALTHY,
        InstanceState.RUNNING: DeathCause.HOST_LOST,
    }
)
"""State of a machine that ran and does not answer -> why, where its provider says no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of a machine that is missed."""

    record: MachineState
    """How it stands on our record."""
    is_spot: bool
    answers: bool
    """It was reached just now."""
    state: InstanceState | None
    """What its backend says; None where it could not be asked."""
    told: DeathCause | None = None
    """What the backend's own words say, from ``SupportsDeathCause``."""
    reason: str = ""
    """Those words, or why nobody could be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Why a machine is missed, and what follows for whoever needs another."""

    label: str
    cause: DeathCause
    reason: str
    bills: bool
    """It may still cost money: destroy it before another is rented in its place."""

    @property
    def blames_host(self) -> bool:
        """Whether another machine should be had somewhere else."""
        return self.cause in (DeathCause.HOST_LOST, DeathCause.UNHEALTHY)

    @property
    def is_market(self) -> bool:
        """Whether this is what spot machines are cheap for, and nobody's failure."""
        return self.cause in (DeathCause.PREEMPTED, DeathCause.OUTBID)


def cause_of(seen: Seen) -> DeathCause | None:
    """Return why the machine is missed; None where it lives, or where its end was our order.

    A backend's own words come first. A spot machine that stopped or went without a word was
    taken back: that is what ``SupportsSpot`` promises about one.
    """
    if seen.record in (MachineState.ENDING, MachineState.NEVER_CREATED):
        return None
    if seen.state is None:
        return None if seen.answers else DeathCause.UNKNOWN
    if seen.state is InstanceState.RUNNING and seen.answers:
        return None
    if seen.told is not None:
        return seen.told
    if seen.is_spot and seen.state in (InstanceState.STOPPED, InstanceState.DESTROYED):
        return DeathCause.PREEMPTED
    return ENDS_OF_STATES[seen.state]


def bills(state: InstanceState | None) -> bool:
    """Return whether a machine in that state may cost money; a stopped one pays for its disk."""
    return state is not InstanceState.DESTROYED
