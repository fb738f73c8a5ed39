"""What a run is driven with, and how long the steps of its ending may take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.core.clock import Clock
from paceline.refit.control.protocol import ControlPlane
from paceline.runs.fleet import Fleet, Rental
from paceline.runs.journal import Journal
from paceline.runs.model import JobSpec
from paceline.runs.plan import Finish, SlotView
from paceline.runs.pulling import Puller
from paceline.runs.queries import RunView
from paceline.runs.rounds import Ticking


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


class Beats(Protocol):
    """What keeps the dead-man switches of a run's machines from firing."""

    def poll(self) -> None:
        """Renew what is due; never blocks."""
        ...


class NoBeats:
    """For a run whose machines have no switch."""

    def poll(self) -> None:
        """Do nothing."""


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
    chance: Callable[[], float] = float
    """Random numbers in [0, 1), for jitter; without any, none."""
    puller: Puller | None = None
    """Brings checkpoints here, or to an object store, while the run lasts."""
    beats: Beats = field(default_factory=NoBeats)
    ticking: Ticking | None = None
    """Compares the record with what the providers say while the run lasts."""
    live: Path | None = None
    """Where the present state is written for whoever asks."""
