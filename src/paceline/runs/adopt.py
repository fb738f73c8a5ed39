"""Take up a run whose driver is gone: what was asked for, which machines go on, which do not.

A run is more than its driver: roles run on machines, the record says which those are, the control
service's store knows every version and event. So the driver that comes after starts from there and
does what is still to be done; a slot without a machine that runs gets one as if for the first time.
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.core.errors import ExitStatus, PreflightError, UsageError
from paceline.rental import BackendAdapter, BackendError, InstanceState, NotProvenGoneError
from paceline.rental.lifecycle import MachineState
from paceline.rental.records import Finding, Machine
from paceline.runs.files import scratch_of, write_private
from paceline.runs.fleet import Rental
from paceline.runs.journal import RUN_ENDING
from paceline.runs.live import LIVE_NAME
from paceline.runs.model import JobSpec, Outcome, Slot
from paceline.runs.plan import Finish
from paceline.runs.sections import Surroundings
from paceline.runs.spec import is_dir, parse_job
from paceline.runs.wheel import WHEEL_DIR

ORDER_FILE = "order.json"
_DRIVEN_FILES = (ORDER_FILE, LIVE_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """A job as its user wrote it; may hold secrets, in ``env``."""

    name: str
    """What errors call it."""
    base: Path
    """Relative directories in it count from here."""
    text: bytes = field(repr=False)

    def parse(self, *, backends: Collection[str]) -> JobSpec:
        """Return the job. Raises SpecError."""
        around = Surroundings(base=self.base, backends=backends, is_dir=is_dir)
        return parse_job(self.text, source=self.name, around=around)


def save_order(run_dir: Path, source: JobSource, *, out: Path, stream: bool) -> None:
    """Keep what a run was asked to be, for whoever takes it up; nobody else can read it.

    Raises PreflightError.
    """
    fields = {
        "name": source.name,
        "base": str(source.base),
        "text": source.text.decode("latin-1"),  # whatever its encoding is, byte for byte
        "out": str(out),
        "stream": stream,
    }
    write_private(run_dir / ORDER_FILE, json.dumps(fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOrder:
    """What a run was asked to be."""

    source: JobSource
    out: Path
    stream: bool


def load_order(run_dir: Path) -> SavedOrder:
    """Return what a run was asked to be. Raises UsageError when that was not kept."""
    path = run_dir / ORDER_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        text = fields["text"].encode("latin-1")
        source = JobSource(name=fields["name"], base=Path(fields["base"]), text=text)
        return SavedOrder(source=source, out=Path(fields["out"]), stream=fields["stream"])
    except FileNotFoundError as exc:
        raise UsageError(
            f"run {run_dir.name} cannot be taken up: {path} is not there; end it with "
            f"paceline down {run_dir.name}"
        ) from exc
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise PreflightError(
            f"{path} cannot be read ({exc}); end the run with paceline down {run_dir.name}"
        ) from exc


def forget_driven(run_dir: Path) -> None:
    """Remove what only the driver of a run needs, and what one that was killed was writing."""
    for name in _DRIVEN_FILES:
        for path in (run_dir / name, scratch_of(run_dir / name)):
            path.unlink(missing_ok=True)
    shutil.rmtree(run_dir / WHEEL_DIR, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """What becomes of each machine of a run that is taken up."""

    kept: dict[Slot, Machine]
    ended: tuple[Machine, ...]
    """Half booted, stopped, of no slot, or one too many for it."""


def adoption_of(
    machines: Iterable[Machine], slots: Collection[Slot], *, running: Collection[str]
) -> Adoption:
    """Decide: of each slot the newest machine that runs is kept, all others end. Pure.

    Args:
        machines: all that are on record for the run, oldest first.
        slots: what the job asks for.
        running: labels of those whose backend says that they run.
    """
    kept: dict[Slot, Machine] = {}
    ended: list[Machine] = []
    for machine in machines:
        slot = Slot(role=machine.role, index=machine.index)
        is_fit = machine.state is MachineState.RUNNING and machine.label in running
        if not is_fit or slot not in slots:
            ended.append(machine)
            continue
        if slot in kept:
            ended.append(kept[slot])
        kept[slot] = machine
    return Adoption(kept=kept, ended=tuple(ended))


def ending_of(journal: Path) -> Finish | None:
    """Return how a run was ending when its driver went away; None if it was not yet.

    A journal that cannot be read says nothing, and a line that was cut off is none.
    """
    try:
        lines = journal.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if RUN_ENDING not in line:
            continue
        try:
            fields = json.loads(line)
            if fields["event"] == RUN_ENDING:
                return Finish(
                    outcome=Outcome(fields["outcome"]),
                    status=ExitStatus(fields["status"]),
                    reason=fields["reason"],
                )
        except (ValueError, KeyError, TypeError):
            continue
    return None


class Reconciling(Rental, Protocol):
    """A rental half that also mends its record."""

    def reconcile(
        self, *, run_id: str | None = None, backends: Iterable[str] = ()
    ) -> tuple[Finding, ...]:
        """Compare the record with what the backends say, and mend the record."""


def take_over(
    rental: Reconciling,
    run_id: str,
    slots: Collection[Slot],
    *,
    backend: Callable[[str], BackendAdapter],
    note: Callable[[str], None],
) -> dict[Slot, Machine]:
    """Mend a run's record, end the machines that cannot go on, and return those that do.

    Raises:
        BackendError: a provider does not say whether a machine runs: then nothing is decided.
    """
    rental.reconcile(run_id=run_id)
    machines = rental.machines(run_id)
    running = {machine.label for machine in machines if _runs(machine, backend)}
    adoption = adoption_of(machines, slots, running=running)
    for machine in adoption.ended:
        note(f"ending {machine.label}: it was not ready when its driver went away")
        try:
            rental.destroy(machine)
        except NotProvenGoneError as exc:
            note(f"{exc}; the run's end looks again")
    for slot, machine in sorted(adoption.kept.items()):
        note(f"{slot} goes on, on {machine.label}")
    return adoption.kept


def _runs(machine: Machine, backend: Callable[[str], BackendAdapter]) -> bool:
    if machine.instance is None:
        return False
    state = InstanceState.parse(backend(machine.backend).status(machine.instance).state)
    if state is InstanceState.UNKNOWN:
        raise BackendError(
            f"{machine.backend} does not say whether {machine.label} runs; try again in a while"
        )
    return state is InstanceState.RUNNING
