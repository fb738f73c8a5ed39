"""Find and end what runs left behind whose driver is gone. Used by ``gc``, ``down`` and ``up``.

A run whose driver lives is never touched. Strays, machines that bear our label and are on no
record of this computer, are shown and left alone: another computer may be driving them.
"""

import os
import shutil
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.errors import MissingExtraError, PacelineError, PreflightError
from paceline.core.waiting import wait_until
from paceline.rental import BackendAdapter, InstanceHandle, MissingKeyError, SupportsListing
from paceline.rental.orchestrator import Orchestrator
from paceline.rental.records import LABEL_PREFIX, Machine
from paceline.runs.adopt import ORDER_FILE
from paceline.runs.bootstrap import CONTROL_SECRETS, KIT_PREFIX
from paceline.runs.ledger import RunLedger, RunRecord
from paceline.runs.owner import Owner, owner_of

DOWN_TIMEOUT_S = 300.0


class Keeping(Protocol):
    """What upkeep works with."""

    @property
    def clock(self) -> Clock:
        """The computer's."""
        ...

    @property
    def ledger(self) -> RunLedger:
        """Runs on record."""
        ...

    @property
    def rental(self) -> Orchestrator:
        """Machines on record."""
        ...

    def backend_of(self, name: str) -> BackendAdapter:
        """Return a backend by name."""
        ...

    def run_dir(self, run_id: str) -> Path:
        """Return where a run keeps its lock."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOver:
    """One machine that nobody drives."""

    run_id: str | None
    label: str
    backend: str
    instance_id: str | None
    state: str
    dph: float

    @property
    def is_ours(self) -> bool:
        """Say whether it is on record here; a stray is not, and is not ended."""
        return self.run_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What nobody drives, and where we could not look."""

    machines: tuple[LeftOver, ...]
    problems: tuple[str, ...]


def find_left_overs(keeping: Keeping, backends: Iterable[str]) -> Found:
    """Look at the record and at ``backends``; mends the record, ends nothing."""
    problems: list[str] = []
    listed = list(_listed(keeping, backends, problems))
    runs = keeping.ledger.list()
    on_record = keeping.rental.machines()
    alive = {machine.label for machine in on_record}
    strays, look_at = [], {machine.run_id for machine in on_record}
    for handle in listed:
        if handle.label not in alive:
            run = _run_of(handle.label, runs)
            if run is None:
                strays.append(_stray(handle))
            else:
                look_at.add(run.run_id)
    left: list[LeftOver] = []
    for run_id in sorted(look_at):
        if owner_of(keeping.run_dir(run_id), clock=keeping.clock) is None:
            keeping.rental.reconcile(run_id=run_id)
            left += [_left_over(machine) for machine in keeping.rental.machines(run_id)]
    return Found(machines=(*left, *strays), problems=tuple(problems))


def end_left_overs(keeping: Keeping, left: Sequence[LeftOver]) -> list[PacelineError]:
    """End every machine of ours in ``left``, close what runs it ends, return what failed."""
    failures: list[PacelineError] = []
    for machine in left:
        if machine.is_ours:
            try:
                keeping.rental.destroy(machine.label)
            except PacelineError as exc:
                failures.append(exc)
    close_ended(keeping)
    return failures


def close_ended(keeping: Keeping) -> None:
    """Put an end on record for every run that has no driver and no machine any more."""
    for run in keeping.ledger.list():
        run_dir = keeping.run_dir(run.run_id)
        if run.outcome is not None:
            (run_dir / ORDER_FILE).unlink(missing_ok=True)  # of a driver killed in its last moment
            continue
        is_driven = owner_of(run_dir, clock=keeping.clock) is not None
        if not is_driven and not keeping.rental.machines(run.run_id):
            keeping.ledger.abandon(run, reason="its driver went away; cleaned up afterwards")
            _remove_secrets(run_dir)


def _remove_secrets(run_dir: Path) -> None:
    """Remove a killed driver's tokens, also those that were on their way to machines."""
    for folder in (*run_dir.glob(f"{KIT_PREFIX}*"), *run_dir.glob(CONTROL_SECRETS)):
        shutil.rmtree(folder)
    (run_dir / ORDER_FILE).unlink(missing_ok=True)


def _listed(
    keeping: Keeping, backends: Iterable[str], problems: list[str]
) -> Iterable[InstanceHandle]:
    for name in backends:
        try:
            backend = keeping.backend_of(name)
            if isinstance(backend, SupportsListing):
                yield from backend.list_instances(label_prefix=LABEL_PREFIX)
            else:
                problems.append(f"{name} cannot list machines: only what is on record is known")
        except (MissingKeyError, MissingExtraError):
            continue  # nothing can be rented there; what is on record is asked about all the same
        except PacelineError as exc:
            problems.append(f"{name} was not asked: {exc}")


def _run_of(label: str, runs: Sequence[RunRecord]) -> RunRecord | None:
    """Return the run that a label was made for; of several that fit the longest."""
    fitting = [run for run in runs if label.startswith(f"{LABEL_PREFIX}{run.run_id}-")]
    return max(fitting, key=lambda run: len(run.run_id), default=None)


def _left_over(machine: Machine) -> LeftOver:
    return LeftOver(
        run_id=machine.run_id,
        label=machine.label,
        backend=machine.backend,
        instance_id=machine.instance.instance_id if machine.instance else None,
        state=machine.state.value,
        dph=machine.offer.dph,
    )


def _stray(handle: InstanceHandle) -> LeftOver:
    return LeftOver(
        run_id=None,
        label=handle.label,
        backend=handle.backend,
        instance_id=handle.instance_id,
        state="stray",
        dph=0.0,
    )


def end_run(keeping: Keeping, run_id: str, *, clock: Clock) -> None:
    """End a run: ask its driver to, or do it when there is none. Returns when it is over.

    Raises:
        UsageError: no such run.
        DeadlineExceededError: its driver did not end in time; asking again is safe.
        NotProvenGoneError: a machine may still be billing.
    """
    keeping.ledger.get(run_id)
    run_dir = keeping.run_dir(run_id)
    owner = owner_of(run_dir, clock=clock)
    if owner is not None:
        _ask_to_end(owner, run_id)
        wait_until(
            lambda: owner_of(run_dir, clock=clock) is None,
            what=f"run {run_id}: its driver, {owner}, was asked to end it",
            clock=clock,
            timeout_s=DOWN_TIMEOUT_S,
            interval_s=0.2,
        )
    keeping.rental.reconcile(run_id=run_id)
    for machine in keeping.rental.machines(run_id):
        keeping.rental.destroy(machine.label)
    close_ended(keeping)


def _ask_to_end(owner: Owner, run_id: str) -> None:
    """Tell a driver to end its run. Raises PreflightError for one that we cannot tell anything."""
    if not owner.is_here:
        raise PreflightError(
            f"run {run_id} is driven by {owner}; end it there with paceline down, or, when that "
            "computer is gone, wait a minute and try again"
        )
    if owner.pid > 0:
        # The lock says that this process lives and is the one that took it.
        os.kill(owner.pid, signal.SIGTERM)
