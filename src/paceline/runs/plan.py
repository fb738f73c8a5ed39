"""What a run does next: pure. What was observed goes in, what should be done comes out.

The watch loop looks at every slot, asks ``decide``, and does what it says. A decision to finish is
final: whatever else could be done is left to the teardown that follows every finish.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.core.errors import ExitStatus
from paceline.runs.model import Outcome, RestartMode, RoleKind, Slot

FIRST_DELAY_S = 1.0
DELAY_S_MAX = 30.0


class Phase(StrEnum):
    """What one slot's command is doing."""

    RUNNING = "running"
    EXITED = "exited"
    """The command ended; its machine is there."""
    LOST = "lost"
    """Its machine does not answer or is gone; what became of the command is unknown."""
    WAITING = "waiting"
    """Will be started again when its delay has passed."""
    DONE = "done"
    """Ended and is not to be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot as the watch loop sees it."""

    slot: Slot
    kind: RoleKind
    restart: RestartMode
    max_restarts: int
    phase: Phase
    code: int | None = None
    """Exit status of the last command that ended."""
    restarts: int = 0
    """How often it was started again."""
    due_s: float = 0.0
    """While waiting: when to start, on the observation's clock."""
    machine_lost: bool = False
    """While waiting: its machine is to be replaced first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything a decision rests on."""

    now_s: float
    slots: Sequence[SlotView]
    signal: str | None = None
    """Name of the signal that asked for an end."""
    spent_usd: float = 0.0
    hard_usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Postpone:
    """Start the slot again, after ``delay_s``."""

    slot: Slot
    delay_s: float
    replace: bool
    """On a new machine; False: on the one it has."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the slot's command again now."""

    slot: Slot
    replace: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """The slot ended as it should and stays ended."""

    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the run: collect what there is and tear everything down."""

    outcome: Outcome
    status: ExitStatus
    reason: str
    slot: Slot | None = None
    """Whose failure it was, so that its log can be shown."""


Action = Postpone | Start | Retire | Finish


def decide(seen: Observation) -> tuple[Action, ...]:
    """Return what to do now, a Finish alone; nothing when everything is as it should be."""
    finish = _stop_from_outside(seen)
    if finish is not None:
        return (finish,)
    actions = [action for view in seen.slots if (action := _next_for(view, seen.now_s))]
    ends = [action for action in actions if isinstance(action, Finish)]
    if ends:
        failures = [end for end in ends if end.outcome is not Outcome.SUCCEEDED]
        return ((failures or ends)[0],)
    retired = {action.slot for action in actions if isinstance(action, Retire)}
    if _all_done(seen.slots, retired):
        return (Finish(outcome=Outcome.SUCCEEDED, status=ExitStatus.OK, reason="all roles done"),)
    return tuple(actions)


def _stop_from_outside(seen: Observation) -> Finish | None:
    if seen.signal is not None:
        return Finish(
            outcome=Outcome.INTERRUPTED,
            status=ExitStatus.INTERRUPTED,
            reason=f"stopped by {seen.signal}",
        )
    if seen.hard_usd is not None and seen.spent_usd >= seen.hard_usd:
        return Finish(
            outcome=Outcome.FAILED,
            status=ExitStatus.FAILED,
            reason=f"the hard cap of {seen.hard_usd:.2f} USD is reached; "
            "raise budget.hard_usd to go further",
        )
    return None


def _next_for(view: SlotView, now_s: float) -> Action | None:
    match view.phase:
        case Phase.RUNNING | Phase.DONE:
            return None
        case Phase.WAITING:
            due = now_s >= view.due_s
            return Start(slot=view.slot, replace=view.machine_lost) if due else None
        case Phase.LOST:
            return _again(view) or _failure(view, "its machine is gone or does not answer")
        case Phase.EXITED:
            return _after_exit(view)


def _after_exit(view: SlotView) -> Action:
    if view.code == 0:
        if view.kind is RoleKind.TRAINER:
            return Finish(
                outcome=Outcome.SUCCEEDED, status=ExitStatus.OK, reason=f"{view.slot} is done"
            )
        if view.restart is not RestartMode.ALWAYS:
            return Retire(slot=view.slot)
    return _again(view) or _failure(view, ended(view.code))


def _again(view: SlotView) -> Postpone | None:
    wanted = view.restart is not RestartMode.NEVER and view.kind is not RoleKind.TRAINER
    if not wanted or view.restarts >= view.max_restarts:
        return None
    lost = view.phase is Phase.LOST
    return Postpone(
        slot=view.slot,
        delay_s=delay_s(view.restarts),
        replace=lost,
        reason="machine lost" if lost else ended(view.code),
    )


def delay_s(restarts: int) -> float:
    """Return how long to wait before restart number ``restarts`` (from 0): doubling, capped."""
    return float(min(DELAY_S_MAX, FIRST_DELAY_S * 2 ** min(restarts, 16)))


def ended(code: int | None) -> str:
    """Say in words how a command ended."""
    if code is None:
        return "ended without an exit status"
    if code > 128:  # noqa: PLR2004 - the shell's way to say: signal
        return f"ended by signal {code - 128}"
    return f"exited with status {code}"


def _failure(view: SlotView, what: str) -> Finish:
    again = f" after {view.restarts} restarts" if view.restarts else ""
    return Finish(
        outcome=Outcome.FAILED,
        status=ExitStatus.FAILED,
        reason=f"{view.slot} {what}{again}"
        if view.phase is Phase.EXITED
        else f"{view.slot}: {what}{again}",
        slot=view.slot,
    )


def _all_done(slots: Sequence[SlotView], retired: set[Slot]) -> bool:
    """Say whether the run has ended by itself: with a trainer only the trainer can say so."""
    if any(view.kind is RoleKind.TRAINER for view in slots):
        return False
    return all(view.phase is Phase.DONE or view.slot in retired for view in slots)
