"""The end of a run: catch up, stop, collect, destroy.

Each step notes what it cannot do, and the next one runs all the same: what cannot be collected is
said, and the machines go regardless.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Protocol

from paceline.core.errors import ExitStatus, PacelineError, PreflightError
from paceline.rental import NotProvenGoneError
from paceline.rental.records import Machine
from paceline.runs.fleet import Hitch
from paceline.runs.model import Outcome, Slot
from paceline.runs.parts import RunParts
from paceline.runs.plan import Finish, Phase, SlotView
from paceline.store.protocol import StoreError

STOP_SHARE = 0.25
"""Of the time that money leaves for an ending, what roles may take to end."""


class Driving(Protocol):
    """What an ending needs of whoever drove the run until then."""

    @property
    def views(self) -> Mapping[Slot, SlotView]:
        """Every slot as it is now."""
        ...

    @property
    def hitches(self) -> list[Hitch]:
        """What errands failed at; the caller may empty it."""
        ...

    @property
    def num_repeats(self) -> int:
        """How many signals came after the first."""
        ...

    def note(self, text: str) -> None:
        """Tell whoever watches."""
        ...

    def take_next(self, *, timeout_s: float | None = None) -> bool:
        """Take the next message in; False when there was none in time."""
        ...

    def look(self) -> None:
        """Read events, cost and what else changes by itself."""
        ...

    def is_caught_up(self) -> bool:
        """Say whether every live engine serves the last version."""
        ...


class Ending:
    """Winds one run down; ``run`` is called once."""

    def __init__(self, parts: RunParts, driving: Driving) -> None:
        self._parts = parts
        self._driving = driving
        self._collect_by_s: float | None = None

    def run(self, finish: Finish) -> Finish:
        """Do every step and return the finish, made worse by what did not work."""
        self._driving.note(f"ending: {finish.reason}")
        self._parts.rental.stop_renting(self._parts.run_id)
        if finish.pull_s is not None:
            self._collect_by_s = self._parts.clock.monotonic() + finish.pull_s
        steps = (
            lambda: self._catch_up(finish),
            self._stop_roles,
            self._driving.look,
            self._pull_all,
            self._driving.look,
        )
        errors: list[PacelineError | None] = []
        try:
            errors += [self._attempt(step) for step in steps]
        finally:
            errors.append(self._attempt(self._destroy_all))
        return _worsened(finish, [error for error in errors if error is not None])

    def _attempt(self, step: Callable[[], None]) -> PacelineError | None:
        try:
            step()
        except PacelineError as exc:
            self._driving.note(str(exc))
            return exc
        return None

    def _at_most(self, timeout_s: float, *, share: float = 1.0) -> float:
        """Return ``timeout_s``, or what money leaves of it."""
        if self._collect_by_s is None:
            return timeout_s
        left_s = self._collect_by_s - self._parts.clock.monotonic()
        return max(0.0, min(timeout_s, share * left_s))

    def _catch_up(self, finish: Finish) -> None:
        """After a success, give every live engine a moment to install the last version."""
        if finish.outcome is Outcome.SUCCEEDED and self._parts.control is not None:
            self._wait(self._driving.is_caught_up, self._parts.limits.catch_up_s)

    def _stop_roles(self) -> None:
        machines = self._parts.fleet.machines
        for slot, view in self._driving.views.items():
            if view.phase is Phase.RUNNING and slot in machines:
                self._parts.fleet.stop(slot)
        self._wait(
            lambda: all(view.phase is not Phase.RUNNING for view in self._driving.views.values()),
            self._at_most(self._parts.limits.grace_s, share=STOP_SHARE),
        )

    def _pull_all(self) -> None:
        """Bring everything back; raises PreflightError when something is still missing then."""
        self._driving.hitches.clear()
        lost = {view.slot for view in self._driving.views.values() if view.phase is Phase.LOST}
        limit_s = self._at_most(self._parts.limits.pull_s)
        if limit_s <= 0:
            raise PreflightError(
                "artifacts were not pulled: every second costs more than is left; give "
                "budget.grace more time"
            )
        pulls = self._pull_to(self._parts.out)
        if not self._wait(lambda: not any(pull.is_alive() for pull in pulls), limit_s):
            raise PreflightError(f"artifacts were not all pulled within {limit_s:.0f} s")
        while self._driving.take_next(timeout_s=0.0):
            pass  # of pulls that ended before they were waited for
        missing = [hitch for hitch in self._driving.hitches if hitch.slot not in lost]
        if missing:
            told = "; ".join(f"{hitch.slot}: {hitch.error}" for hitch in missing)
            raise PreflightError(f"artifacts were not all pulled: {told}")

    def _pull_to(self, out: Path) -> list[Thread]:
        """Begin to pull from every machine: all, or, with an object store, what it does not get."""
        artifacts, puller = self._parts.job.artifacts, self._parts.puller
        fleet = self._parts.fleet
        paths = artifacts.pull if artifacts.to is None else ()
        pulls = [fleet.pull(slot, out, paths) for slot in fleet.machines]
        return (
            pulls
            if puller is None or artifacts.to is None
            else [*pulls, *puller.pull_now(fleet.machines)]
        )

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
            self._driving.note(str(exc))
            known = tuple(self._parts.fleet.machines.values())
        unrecorded = self._parts.fleet.unrecorded
        return [machine for machine in known if machine.label not in unrecorded]

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Take messages until ``is_done``; False when it was not in time."""
        deadline = self._parts.clock.monotonic() + timeout_s
        repeats = self._driving.num_repeats
        while not is_done():
            if self._parts.clock.monotonic() >= deadline:
                return False
            self._driving.take_next()
            self._parts.beats.poll()
            if self._driving.num_repeats > repeats:
                repeats = self._driving.num_repeats
                self._driving.note("teardown is under way and will not be skipped")
        return True


def _worsened(finish: Finish, errors: list[PacelineError]) -> Finish:
    if not errors:
        return finish
    worst = max(errors, key=lambda error: error.exit_status)
    is_worse = finish.status is ExitStatus.OK or isinstance(worst, NotProvenGoneError)
    return replace(
        finish,
        status=worst.exit_status if is_worse else finish.status,
        reason="; ".join((finish.reason, *map(str, errors))),
    )
