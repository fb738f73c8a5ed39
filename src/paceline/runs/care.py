"""What a run is watched over with: its journal and who is told, checkpoints, dead-man switches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.core.clock import Clock
from paceline.rental import BackendAdapter, InstanceHandle
from paceline.runs.bootstrap import Guest
from paceline.runs.deadman import Arming, arm, armed_fields, recipe_of
from paceline.runs.fleet import OnMachine
from paceline.runs.journal import Journal
from paceline.runs.model import JobSpec, Slot
from paceline.runs.notices import Notifier
from paceline.runs.pulling import Puller, PullParts

JOURNAL = "events.jsonl"
STORE_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_")
"""Of the variables in which object stores' clients look for credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """The parts of one run that look after it."""

    journal: Journal
    puller: Puller
    arm: OnMachine
    """Sets the dead-man switch of one machine."""


@contextmanager
def care_for(  # noqa: PLR0913 - a part of the composition root
    job: JobSpec,
    run_id: str,
    *,
    out: Path,
    clock: Clock,
    redact: Callable[[str], str],
    environ: Mapping[str, str],
    is_adopted: bool,
) -> Iterator[Care]:
    """Keep the run's journal while entered, and tell whoever asked to be told."""
    journal = Journal(out / JOURNAL, clock=clock)
    notifier = Notifier(
        job.notify, run_id=run_id, clock=clock, redact=redact, record=journal.record
    )
    journal.listen(notifier.tell)
    puller = Puller(
        PullParts(
            run_id=run_id,
            artifacts=job.artifacts,
            out=out,
            clock=clock,
            journal=journal,
            is_adopted=is_adopted,
            store_env=store_environ(environ) if job.artifacts.to else {},
        )
    )
    try:
        yield Care(journal=journal, puller=puller, arm=_armer(job, journal))
    finally:
        notifier.close()


def store_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which object stores' clients look for credentials."""
    return {name: value for name, value in environ.items() if name.startswith(STORE_PREFIXES)}


def _armer(job: JobSpec, journal: Journal) -> OnMachine:
    def set_switch(
        slot: Slot, backend: BackendAdapter, handle: InstanceHandle, guest: Guest
    ) -> None:
        recipe = recipe_of(backend, handle)
        arming = Arming(after_s=job.dead_man.after_s, recipe=recipe, slot=slot)
        arm(backend, handle, guest=guest, arming=arming)
        journal.record("deadman.armed", armed_fields(slot, arming))

    return set_switch
