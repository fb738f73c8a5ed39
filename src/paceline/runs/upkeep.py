"""Find and end what runs left behind whose driver is gone. Used by ``gc``, ``down`` and ``up``.

A run whose driver lives is never touched. What bears our label and is on no record of this computer
is shown, and ended only where that is asked for: another computer may be driving it. What bears no
label of ours is counted and never ended.
"""

import os
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.errors import (
    DeadlineExceededError,
    MissingExtraError,
    PacelineError,
    PreflightError,
    UsageError,
)
from paceline.core.text import told_by
from paceline.core.waiting import wait_until
from paceline.rental import (
    BackendAdapter,
    InstanceHandle,
    MissingKeyError,
    SupportsListedSince,
    SupportsListing,
)
from paceline.rental.drivers.ending import Proof
from paceline.rental.market import ask_all
from paceline.rental.orchestrator import Orchestrator
from paceline.rental.records import LABEL_PREFIX, Machine
from paceline.runs.adopt import forget_driven
from paceline.runs.bootstrap import CONTROL_SECRETS, KIT_PREFIX
from paceline.runs.ledger import RunLedger, RunRecord
from paceline.runs.owner import Owner, owner_of

DOWN_TIMEOUT_S = 300.0
LIST_TIMEOUT_S = 60.0
"""For all backends together; one that is slower is named as not asked."""
SHARED_S_MAX = 5.0
"""For so long a listing that others will read is waited for, before one is read for us alone."""
_SHARED_POLL_S = 0.1
MIN_AGE_S = 600.0
"""A machine on no record that is younger may be on its way onto another computer's."""
NUM_ENDED_MAX = 50
"""More than this are not ended in one go: that many orphans are more likely a mistake of ours."""


class Keeping(Protocol):
    """What upkeep works with."""

    @property
    def clock(self) -> Clock:
        """What time it is."""
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


class Whose(StrEnum):
    """Who can be sure about a machine."""

    OURS = "ours"
    """On record here, of a run that nobody drives."""
    UNKNOWN = "unknown"
    """It bears a label of ours and is on no record here: another computer's, or lost with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOver:
    """One machine that nobody drives, as far as this computer knows."""

    whose: Whose
    run_id: str | None
    label: str
    backend: str
    instance_id: str | None
    state: str
    dph: float
    age_s: float

    @property
    def is_ours(self) -> bool:
        """Say whether it is on record here."""
        return self.whose is Whose.OURS


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What nobody drives, and where we could not look."""

    machines: tuple[LeftOver, ...]
    problems: tuple[str, ...]
    num_foreign: Mapping[str, int]
    """Backend -> machines of the account that bear no label of ours; they are never touched."""
    strays: Mapping[str, InstanceHandle]
    """Label -> machine, of those that are on no record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What came of ending."""

    proofs: tuple[Proof, ...]
    failures: tuple[PacelineError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRule:
    """Which of what was found is ended."""

    with_unknown: bool = False
    min_age_s: float = MIN_AGE_S
    num_max: int = NUM_ENDED_MAX

    def chosen(self, found: Found) -> tuple[LeftOver, ...]:
        """Return what is to be ended. Raises UsageError when that is more than may be at once."""
        chosen = tuple(
            machine
            for machine in found.machines
            if machine.is_ours or (self.with_unknown and machine.age_s >= self.min_age_s)
        )
        if len(chosen) > self.num_max:
            raise UsageError(
                f"{len(chosen)} machines would be ended and at most {self.num_max} may be in one "
                "go; nothing was ended. Look at the list, then say --max-kill"
            )
        return chosen


def find_left_overs(
    keeping: Keeping, backends: Iterable[str], *, since_s: float | None = None
) -> Found:
    """Look at the record and at ``backends``; mends the record, ends nothing.

    A listing that a backend has read since ``since_s`` for another purpose will do.
    """
    problems: list[str] = []
    listed = _listed(keeping, list(backends), problems, since_s=since_s)
    ours = [one for one in listed if one.label.startswith(LABEL_PREFIX)]
    foreign = [one.backend for one in listed if not one.label.startswith(LABEL_PREFIX)]
    runs = keeping.ledger.list()
    on_record = keeping.rental.machines()
    alive = {machine.label for machine in on_record}
    strays: dict[str, InstanceHandle] = {}
    look_at = {machine.run_id for machine in on_record}
    for handle in ours:
        if handle.label not in alive:
            run = _run_of(handle.label, runs)
            if run is None:
                strays[handle.label] = handle
            else:
                look_at.add(run.run_id)
    now_s = keeping.clock.time()
    left: list[LeftOver] = []
    for run_id in sorted(look_at):
        if owner_of(keeping.run_dir(run_id), clock=keeping.clock) is None:
            keeping.rental.reconcile(run_id=run_id)
            left += [_left_over(one, now_s) for one in keeping.rental.machines(run_id)]
    return Found(
        machines=(*left, *(_stray(handle, now_s) for handle in strays.values())),
        problems=tuple(problems),
        num_foreign={name: foreign.count(name) for name in dict.fromkeys(foreign)},
        strays=strays,
    )


def end_left_overs(keeping: Keeping, found: Found, rule: EndRule) -> Ended:
    """End what the rule chooses, close the runs that this ends, and say what was seen and what not.

    Raises UsageError, before anything is ended, when the rule chooses too many.
    """
    failures: list[PacelineError] = []
    proofs: list[Proof] = []
    for machine in rule.chosen(found):
        try:
            if not machine.is_ours:
                keeping.rental.adopt(found.strays[machine.label])
            proof = keeping.rental.destroy(machine.label, is_thorough=True)
        except PacelineError as exc:
            failures.append(exc)
        else:
            proofs += [proof] if proof is not None else []
    close_ended(keeping)
    return Ended(proofs=tuple(proofs), failures=tuple(failures))


def close_ended(keeping: Keeping) -> None:
    """Put an end on record for every run that has no driver and no machine any more."""
    for run in keeping.ledger.list():
        run_dir = keeping.run_dir(run.run_id)
        if run.outcome is not None:
            forget_driven(run_dir)  # of a driver killed in its last moment
            continue
        is_driven = owner_of(run_dir, clock=keeping.clock) is not None
        if not is_driven and not keeping.rental.machines(run.run_id):
            keeping.ledger.abandon(run, reason="its driver went away; cleaned up afterwards")
            _remove_secrets(run_dir)


OF_THIS_COMPUTER = frozenset({"local", "local-docker"})
"""Backends of which nothing is left to say where they do not run and nothing is on record there."""


def _remove_secrets(run_dir: Path) -> None:
    """Remove a killed driver's tokens, also those that were on their way, and its last words."""
    for folder in (*run_dir.glob(f"{KIT_PREFIX}*"), *run_dir.glob(CONTROL_SECRETS)):
        shutil.rmtree(folder)
    forget_driven(run_dir)


def _listed(
    keeping: Keeping, names: Sequence[str], problems: list[str], *, since_s: float | None
) -> list[InstanceHandle]:
    """Return every machine of the accounts that we have keys for, asking all at once."""

    def ask(name: str) -> list[InstanceHandle] | None:
        backend = keeping.backend_of(name)
        shared = None if since_s is None else _shared(backend, since_s, clock=keeping.clock)
        if shared is not None or not isinstance(backend, SupportsListing):
            return shared
        return backend.list_instances()

    on_record = {machine.backend for machine in keeping.rental.machines()}
    found: list[InstanceHandle] = []
    for answer in ask_all(names, ask, clock=keeping.clock, timeout_s=LIST_TIMEOUT_S):
        name, failure = answer.backend, answer.failure
        if failure is None and answer.value is None:
            problems.append(f"{name} cannot list machines: only what is on record is known")
        elif isinstance(failure, PacelineError | TimeoutError):
            keeping.rental.heard(name, failure)
            # without a key nothing can be rented; what is on record is asked about all the same
            is_idle = name in OF_THIS_COMPUTER and name not in on_record
            if not is_idle and not isinstance(failure, MissingKeyError | MissingExtraError):
                problems.append(f"not asked: {told_by(name, str(failure))}")
        elif failure is not None:
            raise failure
        found += answer.value or []
    return found


def _shared(
    backend: BackendAdapter, since_s: float, *, clock: Clock
) -> list[InstanceHandle] | None:
    """Return a listing that was read for another purpose, where one is soon; None otherwise."""
    if not isinstance(backend, SupportsListedSince):
        return None
    found: list[InstanceHandle] | None = None

    def is_there() -> bool:
        nonlocal found
        found = backend.listed_since(since_s)
        return found is not None

    with suppress(DeadlineExceededError):
        wait_until(
            is_there,
            what="a listing",
            clock=clock,
            timeout_s=SHARED_S_MAX,
            interval_s=_SHARED_POLL_S,
        )
    return found


def _run_of(label: str, runs: Sequence[RunRecord]) -> RunRecord | None:
    """Return the run that a label was made for; of several that fit the longest."""
    fitting = [run for run in runs if label.startswith(f"{LABEL_PREFIX}{run.run_id}-")]
    return max(fitting, key=lambda run: len(run.run_id), default=None)


def _left_over(machine: Machine, now_s: float) -> LeftOver:
    return LeftOver(
        whose=Whose.OURS,
        run_id=machine.run_id,
        label=machine.label,
        backend=machine.backend,
        instance_id=machine.instance.instance_id if machine.instance else None,
        state=machine.state.value,
        dph=machine.offer.dph,
        age_s=now_s - machine.intended_at,
    )


def _stray(handle: InstanceHandle, now_s: float) -> LeftOver:
    return LeftOver(
        whose=Whose.UNKNOWN,
        run_id=None,
        label=handle.label,
        backend=handle.backend,
        instance_id=handle.instance_id,
        state="stray",
        dph=0.0,
        age_s=now_s - handle.created_at,
    )


def end_run(keeping: Keeping, run_id: str, *, clock: Clock) -> list[Proof]:
    """End a run: ask its driver to, or do it when there is none. Returns when it is over.

    What is returned proves the end of what was still there.

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
    proofs = [
        keeping.rental.destroy(machine.label, is_thorough=True)
        for machine in keeping.rental.machines(run_id)
    ]
    close_ended(keeping)
    return [proof for proof in proofs if proof is not None]


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
