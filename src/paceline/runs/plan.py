"""What a run does next: pure. What was observed goes in, what should be done comes out.

The watch loop looks at every slot, asks ``decide``, and does what it says. A decision to finish is
final: whatever else could be done is left to the teardown that follows every finish.

Two things end a role before its time, and they are counted apart. A command that failed is the
role's own fault: it may be started again ``max_restarts`` times in all, and not at all once it
fails again and again right after its start. A machine that was taken back, outbid or broke is
nobody's fault: it is replaced, until so many in a row have not lasted that the market is to blame.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from paceline.core.errors import ExitStatus
from paceline.rental.budget import Budget
from paceline.rental.model import DeathCause
from paceline.runs.model import Outcome, RestartMode, RoleKind, Slot

FIRST_DELAY_S = 1.0
DELAY_S_MAX = 30.0
"""Between two starts on one machine."""
REPLACE_S_MAX = 300.0
"""Between two tries to have another machine: what is sold out takes longer to come back."""
JITTER = 0.5
"""By how much of itself a delay may grow, so that many slots do not all come back at once."""
FAST_S = 60.0
"""A command that ends sooner than this after its start was not doing its work."""
FAST_EXITS_MAX = 4
"""So many of them in a row are a crash loop."""
STEADY_S = 600.0
"""A machine that lasted so long says that machines can be had."""
REPLACEMENTS_MAX = 20
"""How many machines of one slot may be lost in a row, none of which lasted."""
GRACE_SHARE_MAX = 0.2
"""The most of a hard cap that is kept back for the end."""


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
    """How often it was started again because its command had ended."""
    replacements: int = 0
    """How many machines in a row were lost before they had lasted."""
    num_lost: int = 0
    """How many machines were lost in all."""
    fast_exits: int = 0
    """How often in a row its command ended right after its start."""
    cause: DeathCause | None = None
    """What the last machine that was lost died of."""
    started_s: float = 0.0
    """When its command was last started, on the observation's clock."""
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
    burn_dph: float = 0.0
    """What all machines on record cost now, US dollars per hour."""
    budget: Budget | None = None
    chance: float = 0.0
    """A random number in [0, 1)."""


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
    pull_s: float | None = None
    """How long collecting may take, where money is the limit; 0 leaves it out."""


Action = Postpone | Start | Retire | Finish


def decide(seen: Observation) -> tuple[Action, ...]:
    """Return what to do now, a Finish alone; nothing when everything is as it should be."""
    finish = stop_from_outside(seen)
    if finish is not None:
        return (finish,)
    actions = [action for view in seen.slots if (action := _next_for(view, seen))]
    ends = [action for action in actions if isinstance(action, Finish)]
    if ends:
        failures = [end for end in ends if end.outcome is not Outcome.SUCCEEDED]
        return ((failures or ends)[0],)
    retired = {action.slot for action in actions if isinstance(action, Retire)}
    if _all_done(seen.slots, retired):
        return (Finish(outcome=Outcome.SUCCEEDED, status=ExitStatus.OK, reason="all roles done"),)
    return tuple(actions)


def stop_from_outside(seen: Observation) -> Finish | None:
    """Return the end that a signal or the budget asks for, also while machines are rented."""
    if seen.signal is not None:
        return Finish(
            outcome=Outcome.INTERRUPTED,
            status=ExitStatus.INTERRUPTED,
            reason=f"stopped by {seen.signal}",
        )
    return None if seen.budget is None else _stop_for_money(seen, seen.budget)


def _stop_for_money(seen: Observation, budget: Budget) -> Finish | None:
    """Stop so early that pulling artifacts still fits below the cap, or at the cap."""
    left_s = seconds_left(budget, spent_usd=seen.spent_usd, burn_dph=seen.burn_dph)
    grace_s = grace_of(budget, burn_dph=seen.burn_dph)
    if left_s > grace_s:
        return None
    return Finish(
        outcome=Outcome.FAILED,
        status=ExitStatus.FAILED,
        reason=f"the hard cap of {budget.hard_usd:.2f} USD is reached: {seen.spent_usd:.2f} USD "
        f"spent, {seen.burn_dph:.2f} USD an hour; raise budget.hard_usd to go further",
        pull_s=min(grace_s, left_s),
    )


def seconds_left(budget: Budget, *, spent_usd: float, burn_dph: float) -> float:
    """Return how long the machines may go on until the hard cap is spent; 0 when it is."""
    left_usd = budget.hard_usd - spent_usd
    if left_usd <= 0:
        return 0.0
    return left_usd / burn_dph * 3600 if burn_dph > 0 else float("inf")


def grace_of(budget: Budget, *, burn_dph: float) -> float:
    """Return how long before the hard cap the end begins.

    Never more than a part of what may be spent: a small budget on a dear machine would be all
    grace.
    """
    if burn_dph <= 0:
        return 0.0
    return min(budget.grace_s, GRACE_SHARE_MAX * budget.hard_usd / burn_dph * 3600)


def after_exit(view: SlotView, code: int, *, now_s: float) -> SlotView:
    """Return the slot's view once its command ended."""
    is_fast = now_s - view.started_s < FAST_S
    fast_exits = view.fast_exits + 1 if is_fast else 0
    return replace(view, phase=Phase.EXITED, code=code, fast_exits=fast_exits)


def after_loss(view: SlotView, cause: DeathCause, *, now_s: float) -> SlotView:
    """Return the slot's view once its machine was lost."""
    has_lasted = now_s - view.started_s >= STEADY_S
    return replace(
        view,
        phase=Phase.LOST,
        cause=cause,
        num_lost=view.num_lost + 1,
        replacements=0 if has_lasted else view.replacements,
        fast_exits=0,
    )


def after_postpone(view: SlotView, action: Postpone, *, now_s: float) -> SlotView:
    """Return the slot's view while it waits for its next start."""
    return replace(
        view,
        phase=Phase.WAITING,
        restarts=view.restarts + (not action.replace),
        replacements=view.replacements + action.replace,
        due_s=now_s + action.delay_s,
        machine_lost=action.replace,
    )


def _next_for(view: SlotView, seen: Observation) -> Action | None:
    match view.phase:
        case Phase.RUNNING | Phase.DONE:
            return None
        case Phase.WAITING:
            due = seen.now_s >= view.due_s
            return Start(slot=view.slot, replace=view.machine_lost) if due else None
        case Phase.LOST:
            return _after_loss(view, seen.chance)
        case Phase.EXITED:
            return _after_exit(view, seen.chance)


def _after_loss(view: SlotView, chance: float) -> Action:
    what = f"its machine {died_of(view.cause)}"
    if view.restart is RestartMode.NEVER:
        return _failure(view, what)
    if view.replacements >= REPLACEMENTS_MAX:
        return _failure(view, f"{what}, as did {view.replacements} before it in a row")
    return Postpone(
        slot=view.slot,
        delay_s=delay_s(view.replacements, chance=chance, max_s=REPLACE_S_MAX),
        replace=True,
        reason=what,
    )


def _after_exit(view: SlotView, chance: float) -> Action:
    if view.code == 0:
        if view.kind is RoleKind.TRAINER:
            return Finish(
                outcome=Outcome.SUCCEEDED, status=ExitStatus.OK, reason=f"{view.slot} is done"
            )
        if view.restart is not RestartMode.ALWAYS:
            return Retire(slot=view.slot)
    what = ended(view.code)
    if is_crash_looping(view):
        return _failure(view, f"{what}, {view.fast_exits} times in a row right after its start")
    if view.restart is RestartMode.NEVER or view.restarts >= view.max_restarts:
        return _failure(view, what)
    return Postpone(
        slot=view.slot, delay_s=delay_s(view.restarts, chance=chance), replace=False, reason=what
    )


def is_crash_looping(view: SlotView) -> bool:
    """Say whether a slot's command ends again and again right after its start."""
    return view.phase is Phase.EXITED and view.fast_exits >= FAST_EXITS_MAX


def delay_s(times: int, *, chance: float = 0.0, max_s: float = DELAY_S_MAX) -> float:
    """Return how long to wait after ``times`` waits before: doubling, spread by chance, capped."""
    doubled = FIRST_DELAY_S * 2 ** min(times, 16)
    return float(min(max_s, doubled * (1 + JITTER * chance)))


def ended(code: int | None) -> str:
    """Say in words how a command ended."""
    if code is None:
        return "ended without an exit status"
    if code > 128:  # noqa: PLR2004 - the shell's way to say: signal
        return f"ended by signal {code - 128}"
    return f"exited with status {code}"


_DEATHS = {
    DeathCause.PREEMPTED: "was taken back by its provider",
    DeathCause.OUTBID: "was lost to a higher bid",
    DeathCause.HOST_LOST: "is offline",
    DeathCause.UNHEALTHY: "is broken, says its provider",
    DeathCause.STOPPED: "was stopped by no order of ours",
    DeathCause.DESTROYED: "was destroyed by no order of ours",
}


def died_of(cause: DeathCause | None) -> str:
    """Say in words what became of a machine."""
    return "is gone or does not answer" if cause is None else _DEATHS.get(cause, died_of(None))


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
