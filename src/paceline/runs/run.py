"""One run from its first machine to its last: rent, bootstrap, watch, collect, tear down, always.

``plan.decide`` says what to do, ``Fleet`` does it in threads, and this file is the loop between
them. Whatever ends a run (success, a failure, a signal, a bug) ends in ``_wind_down``, whose
steps do not depend on each other's success: what cannot be collected is noted, and the machines
go all the same.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.errors import ExitStatus, PacelineError, PreflightError
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import ControlError
from paceline.refit.model import Event, InstalledReport
from paceline.rental import NotProvenGoneError
from paceline.rental.records import Machine
from paceline.runs.fleet import Broke, Exited, Failed, Fleet, Lost, Message, Ready, Rental
from paceline.runs.journal import RUN_ENDING, Journal
from paceline.runs.model import JobSpec, Outcome, Slot, slots_of
from paceline.runs.outcome import RunResult, conclude, judged
from paceline.runs.plan import (
    Finish,
    Observation,
    Phase,
    Postpone,
    Retire,
    SlotView,
    Start,
    decide,
    ended,
)
from paceline.runs.queries import RunView, engines_at_end, view_of
from paceline.runs.report import RunFacts
from paceline.runs.signals import Signals
from paceline.store.protocol import StoreError

TICK_S = 0.25
COST_EVERY_S = 5.0
UNREAD_S_MAX = 600.0
EVENTS_PAGE = 1000
PAGES_MAX = 100
STOPPED = frozenset({0, 130, 143})
"""How a role ends that was asked to: by itself, or by SIGINT or SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the steps of an ending may take."""

    catch_up_s: float = 10.0
    """For engines to install the last version after the trainer is done."""
    grace_s: float = 10.0
    """For roles to end after they were asked to."""
    pull_s: float = 300.0
    """For everything to be brought back."""
    gone_s: float = 120.0
    """For machines to be seen gone, on top of what one that is still booting may take."""
    destroy_every_s: float = 15.0
    """For one machine's teardown, before it is asked for again."""


class Watcher(Protocol):
    """Who is told how a run goes; called from the driver's thread."""

    def note(self, text: str) -> None:
        """Take one line about something that happened."""
        ...

    def progress(self, view: RunView, slots: Sequence[SlotView]) -> None:
        """Take the present state of everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a run is driven with."""

    job: JobSpec
    run_id: str
    out: Path
    """Local directory for logs, artifacts and the report."""
    clock: Clock
    rental: Rental
    fleet: Fleet
    control: ControlPlane | None
    watcher: Watcher
    journal: Journal
    started_at: str
    redact: Callable[[str], str]
    """Takes this run's tokens out of a text."""
    limits: Limits = Limits()
    ending: Finish | None = None
    """How the run was ending already when its last driver went away."""


class RunDriver:
    """Drives one run; ``execute`` is called once, from the main thread."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._signals = Signals()
        self._views = {
            slot: SlotView(
                slot=slot,
                kind=role.kind,
                restart=role.restart,
                max_restarts=role.max_restarts,
                phase=Phase.WAITING,
            )
            for slot, role in slots_of(parts.job).items()
        }
        self._events: list[Event] = []
        self._view = view_of(())
        self._num_seen = 0
        self._installed: Sequence[InstalledReport] = ()
        self._cost_usd = 0.0
        self._cost_due_s = 0.0
        self._unread_since_s: float | None = None
        self._pull_due_s: float | None = None
        self._num_pulls = 0
        self._pulls: list[Thread] = []
        self._is_control_down = False
        self._is_ending = False
        self._is_unheard = False
        self._failures: list[Failed] = []
        self._bugs: list[BaseException] = []

    def execute(self) -> RunResult:
        """Run the job to its end and tear everything down.

        Raises whatever is a bug, after the teardown. What the machines, the control service or
        the job do wrong is in the result.
        """
        begun_s = self._parts.clock.monotonic()
        finish = Finish(outcome=Outcome.FAILED, status=ExitStatus.FAILED, reason="a bug, see above")
        with self._signals:
            try:
                finish = self._parts.ending or self._until_finish()
            except PacelineError as exc:
                finish = Finish(outcome=Outcome.FAILED, status=exc.exit_status, reason=str(exc))
            finally:
                finish = self._wind_down(finish)
        return self._result(judged(finish, self._view), self._parts.clock.monotonic() - begun_s)

    def _until_finish(self) -> Finish:
        for step in (self._rent, self._bootstrap):
            finish = step()
            if finish is not None:
                return finish
        for slot in self._views:
            self._start(slot)
        if len(self._views) > 1:
            shown = f"paceline logs {self._parts.run_id} --role ROLE -f"
            self._note(f"all roles are started; to see what one prints: {shown}")
        return self._watch()

    def _rent(self) -> Finish | None:
        self._note(f"renting {len(self._views)} machines")
        for slot in self._views:
            self._parts.fleet.rent(slot)
        return self._await_ready("rented")

    def _bootstrap(self) -> Finish | None:
        for slot in self._views:
            self._parts.fleet.bootstrap(slot)
        return self._await_ready("set up")

    def _await_ready(self, what: str) -> Finish | None:
        """Wait until every slot is Ready; the first that is not ends the run."""
        waiting = set(self._views)
        while waiting:
            message = self._next_message()
            if self._signals.received is not None:
                return decide(self._observe())[0]  # type: ignore[return-value]  # a Finish alone
            if isinstance(message, Ready):
                waiting.discard(message.slot)
                self._note(f"{message.slot} is {what}")
            elif isinstance(message, Failed):
                return _failed(message)
        return None

    def _watch(self) -> Finish:
        while True:
            self._take(self._next_message())
            self._poll()
            self._tell(self._show_progress)
            for action in decide(self._observe()):
                match action:
                    case Finish():
                        return action
                    case Postpone():
                        self._postpone(action)
                    case Start():
                        self._start(action.slot, replace_machine=action.replace)
                    case Retire():
                        self._move(action.slot, Phase.DONE)

    def _take(self, message: Message | None) -> None:
        """Put what happened into the slot's view."""
        match message:
            case Exited(slot=slot, code=code):
                view = self._views[slot]
                self._views[slot] = replace(view, phase=Phase.EXITED, code=code)
                self._record("role.exited", slot, code=code, attempt=view.restarts)
                is_stopped = self._is_ending and code in STOPPED
                self._note(f"{slot} is stopped" if is_stopped else f"{slot} {ended(code)}")
            case Lost(slot=slot, reason=reason):
                self._move(slot, Phase.LOST)
                self._note(f"{slot} lost: {reason}")
            case Failed(slot=slot, error=error):
                self._failures.append(message)
                if self._views[slot].phase is Phase.RUNNING:
                    self._move(slot, Phase.LOST)
                self._note(f"{slot}: {error}")
            case Ready() | Broke() | None:
                pass

    def _next_message(self, *, timeout_s: float = TICK_S) -> Message | None:
        message = self._parts.fleet.next_message(timeout_s=timeout_s)
        if isinstance(message, Broke):
            self._bugs.append(message.error)  # raised when everything is torn down
            if self._views[message.slot].phase is Phase.RUNNING:
                self._move(message.slot, Phase.LOST)
            if not self._is_ending:
                raise message.error
        return message

    def _observe(self) -> Observation:
        budget = self._parts.job.budget
        return Observation(
            now_s=self._parts.clock.monotonic(),
            slots=tuple(self._views.values()),
            signal=self._signals.received,
            spent_usd=self._cost_usd,
            hard_usd=None if budget is None else budget.hard_usd,
        )

    def _postpone(self, action: Postpone) -> None:
        view = self._views[action.slot]
        self._views[action.slot] = replace(
            view,
            phase=Phase.WAITING,
            restarts=view.restarts + 1,
            due_s=self._parts.clock.monotonic() + action.delay_s,
            machine_lost=action.replace,
        )
        self._note(
            f"{action.slot}: {action.reason}; starting it again in {action.delay_s:g} s "
            f"({view.restarts + 1} of {view.max_restarts})"
        )

    def _start(self, slot: Slot, *, replace_machine: bool = False) -> None:
        self._move(slot, Phase.RUNNING)
        attempt = self._views[slot].restarts
        self._record("role.started", slot, attempt=attempt)
        if replace_machine:
            self._record("role.replaced", slot, attempt=attempt, reason="machine lost")
            self._parts.fleet.replace(slot)
        else:
            self._parts.fleet.start(slot)

    def _record(self, name: str, slot: Slot, **fields: object) -> None:
        self._parts.journal.record(name, {"role": slot.role, "index": slot.index, **fields})

    def _move(self, slot: Slot, phase: Phase) -> None:
        self._views[slot] = replace(self._views[slot], phase=phase)

    def _poll(self) -> None:
        """Look at what changes by itself: events, cost, pulls that are due."""
        now_s = self._parts.clock.monotonic()
        self._poll_events()
        if problem := self._parts.journal.take_problem():
            self._note(problem)
        if now_s >= self._cost_due_s:
            self._cost_due_s = now_s + COST_EVERY_S
            self._poll_cost()
        self._poll_pulls(now_s)

    def _poll_pulls(self, now_s: float) -> None:
        """Begin a pull when one is due and none is under way, and drop the oldest."""
        every_s = self._parts.job.artifacts.every_s
        if every_s is None:
            return
        if self._pull_due_s is None:
            self._pull_due_s = now_s + every_s
        if now_s < self._pull_due_s or any(pull.is_alive() for pull in self._pulls):
            return
        self._pull_due_s = now_s + every_s
        pulls = self._parts.out / "pulls"
        self._num_pulls += 1
        self._pulls = self._pull_to(pulls / f"{self._num_pulls:04d}")
        for old in sorted(pulls.glob("[0-9]*"))[: -self._parts.job.artifacts.keep]:
            shutil.rmtree(old, onerror=lambda _, path, why: self._note(f"{path}: {why[1]}"))

    def _poll_events(self) -> None:
        if self._parts.control is None:
            return
        try:
            fresh = self._fresh_events(self._parts.control)
        except ControlError as exc:
            if not self._is_control_down:
                self._note(f"control service: {exc}")
            self._is_control_down = True
            return
        self._is_control_down = False
        if fresh:
            self._events += fresh
            self._num_seen = fresh[-1].index
            self._view = view_of(self._events)

    def _fresh_events(self, control: ControlPlane) -> list[Event]:
        fresh: list[Event] = []
        for _ in range(PAGES_MAX):
            after = fresh[-1].index if fresh else self._num_seen
            page = control.list_events(after=after, limit=EVENTS_PAGE)
            fresh += page
            if len(page) < EVENTS_PAGE:
                break
        if self._parts.job.refit is not None:
            self._installed = control.list_installed(self._parts.job.refit.model)
        return fresh

    def _poll_cost(self) -> None:
        before = self._cost_usd
        try:
            self._cost_usd = self._parts.rental.cost_usd(self._parts.run_id)
        except StoreError as exc:
            self._bear(exc)
            return
        self._unread_since_s = None
        budget = self._parts.job.budget
        if budget is not None and before < budget.soft_usd <= self._cost_usd:
            self._note(f"the soft cap of {budget.soft_usd:.2f} USD is reached")

    def _bear(self, error: StoreError) -> None:
        """Go on without the record for a while: a lock or a full disk passes, work does not.

        Not for ever, since a cap cannot be kept by what cannot be read.
        """
        now_s = self._parts.clock.monotonic()
        if self._unread_since_s is None:
            self._unread_since_s = now_s
            self._note(f"what the run costs is not known now: {error}")
        if now_s - self._unread_since_s > UNREAD_S_MAX:
            raise error

    # The end. Each step notes what it cannot do, and the next one runs all the same.

    def _wind_down(self, finish: Finish) -> Finish:
        self._is_ending = True
        self._note(f"ending: {finish.reason}")
        told = {"outcome": finish.outcome, "status": finish.status, "reason": finish.reason}
        self._parts.journal.record(RUN_ENDING, told)
        steps = (
            lambda: self._catch_up(finish),
            self._stop_roles,
            self._poll_events,
            self._pull_finally,
            self._poll_cost,
        )
        errors: list[PacelineError | None] = []
        try:
            errors += [self._attempt(step) for step in steps]
        finally:
            errors.append(self._attempt(self._destroy_all))
        if self._bugs:
            raise self._bugs[0]
        failed = [error for error in errors if error is not None]
        if not failed:
            return finish
        worst = max(failed, key=lambda error: error.exit_status)
        is_worse = finish.status is ExitStatus.OK or isinstance(worst, NotProvenGoneError)
        reasons = "; ".join((finish.reason, *map(str, failed)))
        return replace(
            finish, status=worst.exit_status if is_worse else finish.status, reason=reasons
        )

    def _attempt(self, step: Callable[[], None]) -> PacelineError | None:
        try:
            step()
        except PacelineError as exc:
            self._note(str(exc))
            return exc
        return None

    def _catch_up(self, finish: Finish) -> None:
        """After a success, give every live engine a moment to install the last version."""
        if finish.outcome is not Outcome.SUCCEEDED or self._parts.control is None:
            return

        def is_done() -> bool:
            self._poll_events()
            last = self._view.states[-1].version.root_digest if self._view.states else None
            return last is None or all(one.root_digest == last for one in self._installed)

        self._wait(is_done, self._parts.limits.catch_up_s)

    def _stop_roles(self) -> None:
        machines = self._parts.fleet.machines
        for slot, view in self._views.items():
            if view.phase is Phase.RUNNING and slot in machines:
                self._parts.fleet.stop(slot)
        self._wait(
            lambda: all(view.phase is not Phase.RUNNING for view in self._views.values()),
            self._parts.limits.grace_s,
        )

    def _pull_finally(self) -> None:
        """Bring everything back; raises PreflightError when something is still missing then."""
        self._failures.clear()
        lost = {view.slot for view in self._views.values() if view.phase is Phase.LOST}
        pulls = self._pull_to(self._parts.out)
        if not self._wait(
            lambda: not any(pull.is_alive() for pull in pulls), self._parts.limits.pull_s
        ):
            raise PreflightError(
                f"artifacts were not all pulled within {self._parts.limits.pull_s:g} s"
            )
        while message := self._next_message(timeout_s=0.0):
            self._take(message)  # of pulls that ended before they were waited for
        missing = [failure for failure in self._failures if failure.slot not in lost]
        if missing:
            told = "; ".join(f"{failure.slot}: {failure.error}" for failure in missing)
            raise PreflightError(f"artifacts were not all pulled: {told}")

    def _pull_to(self, out: Path) -> list[Thread]:
        paths = self._parts.job.artifacts.pull
        return [self._parts.fleet.pull(slot, out, paths) for slot in self._parts.fleet.machines]

    def _destroy_all(self) -> None:
        """End every machine on record and see it gone, those too that are still coming up.

        An intent whose create call is under way is left alone until the call has answered: to
        look for its machine now could prove wrongly that there is none.
        """
        due_s: dict[str, float] = {}

        def is_gone() -> bool:
            renting, now_s = self._parts.fleet.renting, self._parts.clock.monotonic()
            left = self._left()
            for machine in left:
                is_known = machine.instance is not None
                is_coming = Slot(role=machine.role, index=machine.index) in renting
                if (is_known or not is_coming) and now_s >= due_s.get(machine.label, 0.0):
                    due_s[machine.label] = now_s + self._parts.limits.destroy_every_s
                    self._parts.fleet.destroy(machine)
            return not left and not renting

        boot_s = max(role.boot_timeout_s for role in self._parts.job.roles)
        if not self._wait(
            is_gone, self._parts.limits.gone_s + (boot_s if self._parts.fleet.renting else 0)
        ):
            left = ", ".join(machine.label for machine in self._left())
            raise NotProvenGoneError(
                f"not proven gone and maybe still billing: {left}; run paceline gc --yes"
            )
        unrecorded = self._parts.fleet.unrecorded
        if unrecorded:
            raise PreflightError("; ".join(map(str, unrecorded.values())))

    def _left(self) -> list[Machine]:
        """Return the machines that are not seen gone yet: by the record, else by what we rented."""
        try:
            known = self._parts.rental.machines(self._parts.run_id)
        except StoreError as exc:
            self._note(str(exc))
            known = tuple(self._parts.fleet.machines.values())
        unrecorded = self._parts.fleet.unrecorded
        return [machine for machine in known if machine.label not in unrecorded]

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Take messages until ``is_done``; False when it was not in time."""
        deadline = self._parts.clock.monotonic() + timeout_s
        repeats = self._signals.num_repeats
        while not is_done():
            if self._parts.clock.monotonic() >= deadline:
                return False
            self._take(self._next_message())
            if self._signals.num_repeats > repeats:
                repeats = self._signals.num_repeats
                self._note("teardown is under way and will not be skipped")
        return True

    def _show_progress(self) -> None:
        self._parts.watcher.progress(self._view, tuple(self._views.values()))

    def _note(self, text: str) -> None:
        self._tell(lambda: self._parts.watcher.note(self._parts.redact(text)))

    def _tell(self, say: Callable[[], None]) -> None:
        """Let the watcher say something; a run does not depend on anybody listening.

        A terminal that was closed or a pipe whose reader left must neither end the run nor, far
        worse, its teardown.
        """
        if self._is_unheard:
            return
        try:
            say()
        except OSError as exc:
            self._is_unheard = True
            self._parts.journal.record("watcher.lost", {"reason": str(exc)})

    def _result(self, finish: Finish, wall_s: float) -> RunResult:
        facts = RunFacts(
            run_id=self._parts.run_id,
            name=self._parts.job.name,
            outcome=finish.outcome.value,
            reason=self._parts.redact(finish.reason),
            started_at=self._parts.started_at,
            wall_s=wall_s,
            cost_usd=self._cost_usd,
            engines=engines_at_end(self._view, self._installed),
        )
        self._parts.journal.record(
            "run.finished",
            {
                "outcome": facts.outcome,
                "reason": facts.reason,
                "wall_s": wall_s,
                "cost_usd": facts.cost_usd,
            },
        )
        return conclude(finish, self._view, facts, out=self._parts.out, redact=self._parts.redact)


def _failed(message: Failed) -> Finish:
    return Finish(
        outcome=Outcome.FAILED,
        status=message.error.exit_status,
        reason=f"{message.slot}: {message.error}",
        slot=message.slot,
    )
