"""One run from its first machine to its last: rent, bootstrap, watch, collect, tear down, always.

``plan.decide`` says what to do, ``Fleet`` does it in threads, and this file is the loop between
them. Whatever ends a run (success, a failure, a signal, a bug) ends in ``Ending``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.core.errors import ExitStatus, PacelineError, PreflightError
from paceline.runs.ending import Ending
from paceline.runs.files import write_atomic
from paceline.runs.fleet import Broke, Exited, Failed, Hitch, Lost, Message, Ready, Started
from paceline.runs.happenings import Happenings
from paceline.runs.journal import RUN_ENDING
from paceline.runs.live import live_state
from paceline.runs.model import Outcome, Slot, slots_of
from paceline.runs.outcome import RunResult, conclude, judged
from paceline.runs.parts import Limits, RunParts, Watcher
from paceline.runs.plan import (
    Finish,
    Observation,
    Phase,
    Postpone,
    Retire,
    SlotView,
    Start,
    after_exit,
    after_loss,
    after_postpone,
    decide,
    died_of,
    ended,
    is_crash_looping,
    stop_from_outside,
)
from paceline.runs.queries import engines_at_end
from paceline.runs.report import RunFacts
from paceline.runs.rounds import Rounds
from paceline.runs.signals import Signals
from paceline.store.protocol import StoreError

__all__ = ["Limits", "RunDriver", "RunParts", "Watcher"]

TICK_S = 0.25
COST_EVERY_S = 5.0
CLOCK_SLACK_S = 2.0
"""What a clock may be set back by without being noticed."""
LIVE_EVERY_S = 1.0
STOPPED = frozenset({0, 130, 143})
"""How a role ends that was asked to: by itself, or by SIGINT or SIGTERM."""


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
        self._happenings = Happenings(
            parts.control,
            model_name=None if parts.job.refit is None else parts.job.refit.model,
            note=self.note,
        )
        self._rounds = None
        if parts.ticking is not None:
            self._rounds = Rounds(
                parts.ticking,
                run_id=parts.run_id,
                clock=parts.clock,
                note=self.note,
                record=parts.journal.record,
            )
        self._cost_usd = 0.0
        self._burn_dph = 0.0
        self._cost_due_s = 0.0
        self._cost_read_s = parts.clock.monotonic()
        self._cost_read_at = parts.clock.time()
        self._is_clock_back = False
        self._is_cost_guessed = False
        self._live_due_s = 0.0
        self._is_ending = False
        self._is_unheard = False
        self._has_warned = False
        self._told_hitches: dict[Slot, str] = {}
        self.hitches: list[Hitch] = []
        self._bugs: list[BaseException] = []

    @property
    def views(self) -> Mapping[Slot, SlotView]:
        """Every slot as it is now."""
        return self._views

    @property
    def num_repeats(self) -> int:
        """How many signals came after the first."""
        return self._signals.num_repeats

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
        return self._result(
            judged(finish, self._happenings.view), self._parts.clock.monotonic() - begun_s
        )

    def _until_finish(self) -> Finish:
        for step in (self._rent, self._bootstrap):
            finish = step()
            if finish is not None:
                return finish
        for slot in self._views:
            self._start(slot)
        if len(self._views) > 1:
            shown = f"paceline logs {self._parts.run_id} --role ROLE -f"
            self.note(f"all roles are started; to see what one prints: {shown}")
        return self._watch()

    def _wind_down(self, finish: Finish) -> Finish:
        self._is_ending = True
        self._record_cause(finish)
        told = {"outcome": finish.outcome, "status": finish.status, "reason": finish.reason}
        self._parts.journal.record(RUN_ENDING, told)
        finish = Ending(self._parts, self).run(finish)
        if self._bugs:
            raise self._bugs[0]
        return finish

    def _record_cause(self, finish: Finish) -> None:
        """Put on record what ends a run before its time and may need a person."""
        view = None if finish.slot is None else self._views.get(finish.slot)
        if view is not None and is_crash_looping(view):
            self._record("role.crash_loop", view.slot, code=view.code, times=view.fast_exits)
        if finish.pull_s is not None and self._parts.job.budget is not None:
            hard_usd = self._parts.job.budget.hard_usd
            self._parts.journal.record(
                "budget.hard", {"spent_usd": self._cost_usd, "hard_usd": hard_usd}
            )

    def _rent(self) -> Finish | None:
        self.note(f"renting {len(self._views)} machines")
        for slot in self._views:
            self._parts.fleet.rent(slot)
        return self._await_ready("rented")

    def _bootstrap(self) -> Finish | None:
        for slot in self._views:
            self._parts.fleet.bootstrap(slot)
        return self._await_ready("set up")

    def _await_ready(self, what: str) -> Finish | None:
        """Wait until every slot is Ready; the first that is not, or money, ends the run."""
        waiting = set(self._views)
        while waiting:
            message = self._next_message()
            self._poll()
            finish = stop_from_outside(self._observe())
            if finish is not None:
                return finish
            if isinstance(message, Ready):
                waiting.discard(message.slot)
                self.note(f"{message.slot} is {what}")
            elif isinstance(message, Failed):
                return _failed(message)
            else:
                self._take(message)
        return None

    def _watch(self) -> Finish:
        while True:
            self._take(self._next_message())
            self._poll()
            self._poll_pulls()
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

    def take_next(self, *, timeout_s: float | None = None) -> bool:
        """Take the next message in; False when there was none in time."""
        message = self._next_message(timeout_s=TICK_S if timeout_s is None else timeout_s)
        self._take(message)
        return message is not None

    def _take(self, message: Message | None) -> None:
        """Put what happened into the slot's view."""
        match message:
            case Started(slot=slot):
                self._take_start(slot)
            case Exited(slot=slot, code=code):
                self._take_exit(slot, code)
            case Lost(slot=slot, reason=reason):
                self._take_loss(message)
                self.note(f"{slot} lost: {reason}")
            case Failed(slot=slot, error=error):
                self.note(f"{slot}: {error}")
                if self._views[slot].phase is Phase.RUNNING:
                    self._take_loss(Lost(slot=slot, reason=str(error)))
            case Hitch():
                self._take_hitch(message)
            case Ready() | Broke() | None:
                pass

    def _take_start(self, slot: Slot) -> None:
        now_s = self._parts.clock.monotonic()
        self._views[slot] = replace(self._views[slot], started_s=now_s)

    def _take_hitch(self, hitch: Hitch) -> None:
        """Note it once: what fails on a schedule fails in the same words again and again."""
        self.hitches.append(hitch)
        if self._told_hitches.get(hitch.slot) != str(hitch.error):
            self.note(f"{hitch.slot}: {hitch.error}")
        self._told_hitches[hitch.slot] = str(hitch.error)

    def _take_exit(self, slot: Slot, code: int) -> None:
        now_s = self._parts.clock.monotonic()
        view = self._views[slot] = after_exit(self._views[slot], code, now_s=now_s)
        self._record("role.exited", slot, code=code, attempt=view.restarts)
        is_stopped = self._is_ending and code in STOPPED
        self.note(f"{slot} is stopped" if is_stopped else f"{slot} {ended(code)}")

    def _take_loss(self, lost: Lost) -> None:
        now_s = self._parts.clock.monotonic()
        self._views[lost.slot] = after_loss(self._views[lost.slot], lost.cause, now_s=now_s)
        self._record("machine.lost", lost.slot, cause=lost.cause.value, reason=lost.reason)

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
        return Observation(
            now_s=self._parts.clock.monotonic(),
            slots=tuple(self._views.values()),
            signal=self._signals.received,
            spent_usd=self._cost_usd,
            burn_dph=self._burn_dph,
            budget=self._parts.job.budget,
            chance=self._parts.chance(),
        )

    def _postpone(self, action: Postpone) -> None:
        now_s = self._parts.clock.monotonic()
        view = self._views[action.slot] = after_postpone(
            self._views[action.slot], action, now_s=now_s
        )
        count = f"{view.restarts} of {view.max_restarts}"
        if action.replace:
            count = f"machine {view.num_lost + 1}"
        self.note(
            f"{action.slot}: {action.reason}; starting it again in {action.delay_s:.1f} s ({count})"
        )

    def _start(self, slot: Slot, *, replace_machine: bool = False) -> None:
        now_s = self._parts.clock.monotonic()
        view = replace(self._views[slot], phase=Phase.RUNNING, started_s=now_s)
        self._views[slot] = view
        self._record("role.started", slot, attempt=view.restarts)
        if replace_machine:
            self._record("role.replaced", slot, attempt=view.num_lost, reason=died_of(view.cause))
            self._parts.fleet.replace(slot)
        else:
            self._parts.fleet.start(slot)

    def _record(self, name: str, slot: Slot, **fields: object) -> None:
        self._parts.journal.record(name, {"role": slot.role, "index": slot.index, **fields})

    def _move(self, slot: Slot, phase: Phase) -> None:
        self._views[slot] = replace(self._views[slot], phase=phase)

    def is_caught_up(self) -> bool:
        """Say whether every live engine serves the last version."""
        return self._happenings.is_caught_up()

    def look(self) -> None:
        """Read events and cost now."""
        self._happenings.poll()
        self._poll_cost()

    def _poll(self) -> None:
        """Look at what changes by itself: events, cost, and beats that are due."""
        now_s = self._parts.clock.monotonic()
        self._happenings.poll()
        if problem := self._parts.journal.take_problem():
            self.note(problem)
        if now_s >= self._cost_due_s:
            self._cost_due_s = now_s + COST_EVERY_S
            self._poll_cost()
        self._parts.beats.poll()
        if self._rounds is not None:
            self._rounds.poll()
        if now_s >= self._live_due_s:
            self._live_due_s = now_s + LIVE_EVERY_S
            self._write_live()

    def _poll_cost(self) -> None:
        self._read_cost()
        budget = self._parts.job.budget
        if budget is None or self._has_warned or self._cost_usd < budget.soft_usd:
            return
        self._has_warned = True
        told = {"spent_usd": self._cost_usd, "soft_usd": budget.soft_usd}
        self._parts.journal.record("budget.soft", {**told, "burn_dph": self._burn_dph})
        self.note(
            f"the soft cap of {budget.soft_usd:.2f} USD is reached, at {self._burn_dph:.2f} USD an "
            f"hour; everything ends at {budget.hard_usd:.2f} USD"
        )

    def _read_cost(self) -> None:
        """Read what was spent; where that cannot be right, reckon with what was burning.

        It cannot while the record cannot be read, nor once the computer's clock was set back: by
        it machines cost nothing again until it is where it was.
        """
        now_s = self._parts.clock.monotonic()
        since_s, self._cost_read_s = now_s - self._cost_read_s, now_s
        reckoned_usd = self._cost_usd + self._burn_dph * since_s / 3600
        self._watch_clock(since_s)
        try:
            read = self._parts.rental.spending(self._parts.run_id)
            back_usd = reckoned_usd if self._is_clock_back else 0.0
            self._cost_usd = max(read.spent_usd, back_usd)
            self._burn_dph = read.burn_dph
            self._is_cost_guessed = False
        except StoreError as exc:
            self._cost_usd = reckoned_usd
            if not self._is_cost_guessed:
                self.note(f"what this run costs is reckoned, not read: {exc}")
            self._is_cost_guessed = True

    def _watch_clock(self, since_s: float) -> None:
        """Notice that the clock was set back. Ahead is no fault: a computer that slept wakes so."""
        time_s = self._parts.clock.time()
        back_s = since_s - (time_s - self._cost_read_at)
        self._cost_read_at = time_s
        if back_s > CLOCK_SLACK_S:
            self._is_clock_back = True
            self.note(
                f"this computer's clock was set back by {back_s:.0f} s; from here on what this run "
                "costs is reckoned by how long it has lasted"
            )

    def _poll_pulls(self) -> None:
        if self._parts.puller is not None:
            running = [slot for slot, view in self._views.items() if view.phase is Phase.RUNNING]
            self._parts.puller.poll(self._parts.clock.monotonic(), running)

    def _write_live(self) -> None:
        """Tell whoever asks how it stands; that a state cannot be told ends nothing."""
        if self._parts.live is None:
            return
        found = live_state(
            tuple(self._views.values()),
            at_s=self._parts.clock.time(),
            spent_usd=self._cost_usd,
            burn_dph=self._burn_dph,
            checkpoints=self._parts.puller.told if self._parts.puller else {},
            view=self._happenings.view,
        )
        try:
            write_atomic(self._parts.live, json.dumps(found))
        except PreflightError as exc:
            self._parts.journal.record("watcher.lost", {"reason": str(exc)})
            self._live_due_s = float("inf")

    def _show_progress(self) -> None:
        self._parts.watcher.progress(self._happenings.view, tuple(self._views.values()))

    def note(self, text: str) -> None:
        """Tell whoever watches."""
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
            engines=engines_at_end(self._happenings.view, self._happenings.installed),
            slots=tuple(self._views.values()),
            budget=self._parts.job.budget,
            checkpoints=self._parts.puller.told if self._parts.puller else {},
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
        return conclude(
            finish, self._happenings.view, facts, out=self._parts.out, redact=self._parts.redact
        )


def _failed(message: Failed) -> Finish:
    return Finish(
        outcome=Outcome.FAILED,
        status=message.error.exit_status,
        reason=f"{message.slot}: {message.error}",
        slot=message.slot,
    )
