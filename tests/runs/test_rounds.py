"""While a run is driven, its record is compared with the providers, beside the driver."""

import json
import threading
from pathlib import Path

from paceline.core.errors import ExitStatus
from paceline.rental.budget import Budget, Level, Spending
from paceline.rental.model import InstanceHandle
from paceline.rental.orchestrator import Tick
from paceline.rental.records import Finding, FindingKind
from paceline.runs.rounds import LOOK_EVERY_S, Rounds
from paceline.store.protocol import StoreError
from paceline.testing.clock import FakeClock
from runs.test_run import TRAINER, World

STRAY = Finding(
    kind=FindingKind.STRAY,
    label="paceline-job-1-trainer-0-ab",
    backend="fake",
    instance=InstanceHandle("fake", "i-7", "paceline-job-1-trainer-0-ab", 0.0),
)
UNPROVEN = Finding(
    kind=FindingKind.NOT_PROVEN, label="x", backend="fake", instance=None, note="status 500"
)
SPENDING = Spending(spent_usd=0.0, burn_dph=0.0, level=Level.WITHIN, hard_in_s=None)


class Provider:
    """Answers a look when it is let, with what was put in."""

    def __init__(self) -> None:
        self.answers: list[tuple[Finding, ...] | Exception] = []
        self.num_looks = 0
        self.gate = threading.Event()
        self.gate.set()

    def tick(self, run_id: str, caps: Budget | None) -> Tick:
        """Return the next answer."""
        self.num_looks += 1
        assert self.gate.wait(20)
        answer = self.answers.pop(0) if self.answers else ()
        if isinstance(answer, Exception):
            raise answer
        return Tick(spending=SPENDING, findings=answer)


class Told:
    """Rounds over a provider, and what was told of them."""

    def __init__(self) -> None:
        self.provider, self.clock = Provider(), FakeClock()
        self.notes: list[str] = []
        self.events: list[tuple[str, object]] = []
        self.rounds = Rounds(
            self.provider,
            run_id="job-1",
            clock=self.clock,
            note=self.notes.append,
            record=lambda name, fields: self.events.append((name, fields.get("instance_id"))),
        )

    def look(self) -> None:
        """Have one look made, and told of."""
        self.clock.advance(LOOK_EVERY_S)
        self.rounds.poll()
        for thread in threading.enumerate():
            if thread.name == "rounds":
                thread.join(20)
        self.rounds.poll()


def test_what_is_found_is_told_once() -> None:
    """A stray is an event with its id; what stays unproven is not told at every look."""
    told = Told()
    told.provider.answers = [(UNPROVEN,), (UNPROVEN, STRAY)]
    told.look()
    told.look()
    assert told.events == [("machine.found", None), ("machine.stray", "i-7")]
    assert ["gc --strays" in note for note in told.notes] == [False, True]


def test_a_look_that_fails_ends_nothing_and_is_made_again() -> None:
    """A locked record, or an adapter's bug, is told; the next look comes in time."""
    told = Told()
    told.provider.answers = [StoreError("database is locked"), KeyError("bug"), (STRAY,)]
    for _ in range(3):
        told.look()
    assert [name for name, _ in told.events] == ["reconcile.failed"] * 2 + ["machine.stray"]
    assert "database is locked" in told.notes[0]


def test_a_provider_that_hangs_holds_nobody_up() -> None:
    """`poll` returns while a look is under way, and does not begin a second one."""
    told = Told()
    told.provider.gate.clear()
    for _ in range(3):
        told.clock.advance(LOOK_EVERY_S)
        told.rounds.poll()
    assert told.provider.num_looks == 1
    told.provider.gate.set()


def test_a_driven_run_looks_and_goes_on(tmp_path: Path) -> None:
    """The driver makes the looks: a stray is in the run's events, and the run succeeds."""
    world = World(tmp_path, TRAINER)
    provider = Provider()
    provider.answers = [(STRAY,)]
    seen = threading.Event()
    world.notes.on_note = lambda text: seen.set() if STRAY.label in text else None
    world.cloud.commands = {"trainer": lambda _: 0 if seen.wait(20) else 9}
    world.run_more = {"ticking": provider}
    assert world.execute().status is ExitStatus.OK
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    strays = [event for event in map(json.loads, lines) if event["event"] == "machine.stray"]
    assert [event["instance_id"] for event in strays] == ["i-7"]
