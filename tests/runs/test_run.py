"""The driver over fakes that behave: machines that get lost, money that runs out, bugs, delays."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.clock import Clock
from paceline.core.errors import ExitStatus
from paceline.rental import (
    BackendAdapter,
    DeathCause,
    ExitCode,
    GoneUnrecordedError,
    InstanceHandle,
    InstanceStatus,
    NoOffersError,
    NotProvenGoneError,
    Offer,
    OfferConstraints,
    RemoteCommandError,
    SshUnreachableError,
)
from paceline.rental.budget import Budget, Level, Spending
from paceline.rental.death import Death
from paceline.rental.lifecycle import MachineState
from paceline.rental.orchestrator import RentRequest
from paceline.rental.records import Machine, RentedOffer
from paceline.runs.fleet import Fleet, FleetParts
from paceline.runs.journal import Journal
from paceline.runs.model import JobSpec, Outcome, RestartMode, RoleKind, RoleSpec
from paceline.runs.outcome import RunResult
from paceline.runs.plan import SlotView
from paceline.runs.queries import RunView
from paceline.runs.run import COST_EVERY_S, Limits, RunDriver, RunParts
from paceline.store.protocol import StoreError
from paceline.system import new_nonce, system_clock


class FakeCloud:
    """Machines in memory: signs the backend's contract and what a run asks of the rental half."""

    name = "fake"

    def __init__(self) -> None:
        self.alive: dict[str, Machine] = {}
        self.written: list[Machine] = []
        """Gone, and on record still."""
        self.num_rented = 0
        self.usd = 0.0
        self.causes: dict[str, DeathCause] = {}
        self.commands: dict[str, Callable[[str], int]] = {}
        """Role -> what its command does; given the label, returns an exit status."""
        self.refuse: dict[str, Exception] = {}
        self.rent_gate = threading.Event()
        self.rent_gate.set()
        self.ended: dict[str, threading.Event] = {}
        self.never_gone: set[str] = set()
        self.unwritable: GoneUnrecordedError | None = None
        """Raised when a machine has gone, which then stays on record."""
        self.unreadable: StoreError | None = None
        self.unpriced: StoreError | None = None
        """Raised when somebody asks what the run has cost."""
        self.is_bare = False
        """Machines have no files."""
        self.broken_copy: RemoteCommandError | None = None

    # what a run asks of the rental half

    def rent(self, request: RentRequest) -> Machine:
        if request.role in self.refuse:
            raise self.refuse[request.role]
        self.num_rented += 1
        label = f"{request.run_id}-{request.role}-{request.index}-{self.num_rented}"
        machine = Machine(
            label=label,
            run_id=request.run_id,
            role=request.role,
            index=request.index,
            backend="fake",
            offer=RentedOffer(id="o", gpu_name="cpu", num_gpus=1, dph=1.0),
            state=MachineState.INTENDED,
            intended_at=0.0,
        )
        self.alive[label] = machine
        assert self.rent_gate.wait(20)
        handle = InstanceHandle("fake", label, label, 0.0)
        machine = replace(machine, state=MachineState.RUNNING, instance=handle)
        self.ended[label] = threading.Event()
        self.alive[label] = machine
        return machine

    def stop_renting(self, run_id: str) -> None:
        """Nothing is tried twice here."""

    def destroy(self, machine: Machine | str) -> None:
        label = machine if isinstance(machine, str) else machine.label
        known = self.alive.get(label)
        assert known is None or known.instance is not None, "destroyed while being created"
        if known is not None and known.role in self.never_gone:
            raise NotProvenGoneError(f"{label} is still there")
        self.lose(label)
        if self.unwritable is not None and known is not None:
            self.written.append(known)
            raise self.unwritable

    def lose(self, label: str) -> None:
        """Make a machine vanish, with what runs on it."""
        if self.alive.pop(label, None) is not None:
            self.ended[label].set()

    def autopsy(self, machine: Machine) -> Death | None:
        cause = self.causes.get(machine.role)
        if cause is None:
            return None
        return Death(label=machine.label, cause=cause, reason="it says so", bills=False)

    def machines(self, run_id: str | None = None) -> tuple[Machine, ...]:
        if self.unreadable is not None:
            raise self.unreadable
        on_record = (*self.alive.values(), *self.written)
        return tuple(m for m in on_record if run_id in {None, m.run_id})

    def spending(self, run_id: str) -> Spending:
        if self.unpriced is not None:
            raise self.unpriced
        burn_dph = sum(machine.offer.dph for machine in self.machines(run_id))
        return Spending(spent_usd=self.usd, burn_dph=burn_dph, level=Level.WITHIN, hard_in_s=None)

    # what the backend signs

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        raise NoOffersError("not asked in these tests")

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        raise NoOffersError("not asked in these tests")

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        self._reach(h)

    def sync_to(
        self,
        h: InstanceHandle,
        src: Path,
        dst: str,
        *,
        excludes: Iterable[str] = (),
        includes: Iterable[str] = (),
        delete: bool = False,
    ) -> None:
        self._reach(h)

    def run_remote(
        self,
        h: InstanceHandle,
        command: str,
        *,
        env: Mapping[str, str] = {},
        stream: bool = True,
        timeout_s: int | None = None,
    ) -> ExitCode:
        machine = self._reach(h)
        code = int(self.is_bare and command.startswith("test -e"))
        if "stop.sh" in command:
            self.ended[h.label].set()
        elif "watch.sh" in command:
            code = self.commands[machine.role](h.label)
        return ExitCode(code, 0.0)

    def sync_from(
        self,
        h: InstanceHandle,
        src: str,
        dst: Path,
        *,
        includes: Iterable[str] = (),
        excludes: Iterable[str] = (),
    ) -> None:
        self._reach(h)
        if self.broken_copy is not None:
            raise self.broken_copy
        if self.is_bare:
            raise RemoteCommandError(f"{src} does not exist; nothing was copied")
        if src.endswith("/logs"):
            (dst / f"{self.alive[h.label].role}-0.log").write_text("said something\n")

    def status(self, h: InstanceHandle) -> InstanceStatus:
        state = "running" if h.label in self.alive else "destroyed"
        return InstanceStatus(state, "cpu", 1, None, None, {})

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        self.lose(h.label)

    def _reach(self, h: InstanceHandle) -> Machine:
        if h.label not in self.alive:
            raise SshUnreachableError(f"{h.label} does not answer")
        return self.alive[h.label]

    def until_ended(self, label: str) -> int:
        assert self.ended[label].wait(20)
        return 143


class Notes:
    """Remembers what was told; ``on_note`` may act on it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.on_note: Callable[[str], None] = lambda text: None

    def note(self, text: str) -> None:
        self.lines.append(text)
        self.on_note(text)

    def progress(self, view: RunView, slots: Iterable[SlotView]) -> None:
        """Take no notice."""


def role(name: str, kind: RoleKind, **more: object) -> RoleSpec:
    base = RoleSpec(name=name, kind=kind, backends=("fake",), gpu="cpu-1x", run="x")
    return replace(base, **more)  # type: ignore[arg-type]


TRAINER = role("trainer", RoleKind.TRAINER)
ROLLOUT = role("rollout", RoleKind.ROLLOUT, restart=RestartMode.ON_FAILURE, max_restarts=1)


class World:
    """One run over one fake cloud."""

    def __init__(self, out: Path, *roles: RoleSpec, budget: Budget | None = None) -> None:
        self.cloud = FakeCloud()
        self.notes = Notes()
        self.out = out
        self.job = JobSpec(name="job", roles=roles, budget=budget)
        self.fleet_more: dict[str, Any] = {}
        self.run_more: dict[str, Any] = {}
        self.clock: Clock = system_clock()

    def execute(self, limits: Limits | None = None) -> RunResult:
        backend: BackendAdapter = self.cloud
        fleet = Fleet(
            FleetParts(
                job=self.job,
                run_id="job-1",
                rental=self.cloud,
                backend=lambda name: backend,
                env_of=lambda slot, name: {},
                secrets_of=lambda role: {},
                ssh_pubkey_path=Path("key"),
                scratch=self.out,
                clock=self.clock,
                nonce=new_nonce,
                **self.fleet_more,
            )
        )
        parts = RunParts(
            job=self.job,
            run_id="job-1",
            out=self.out,
            clock=self.clock,
            rental=self.cloud,
            fleet=fleet,
            control=None,
            watcher=self.notes,
            journal=Journal(self.out / "events.jsonl", clock=self.clock),
            started_at="2026-01-01T00:00:00Z",
            redact=lambda text: text,
            limits=limits or Limits(),
            **self.run_more,
        )
        return RunDriver(parts).execute()


def test_a_lost_machine_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    """A rollout whose machine vanishes gets another; the trainer does not notice."""
    world = World(tmp_path, TRAINER, ROLLOUT)
    replaced = threading.Event()

    def rollout(label: str) -> int:
        if label.endswith("-0-3"):
            replaced.set()
            return world.cloud.until_ended(label)
        world.cloud.lose(label)
        return 137

    world.cloud.commands = {
        "trainer": lambda label: 0 if replaced.wait(20) else 9,
        "rollout": rollout,
    }
    result = world.execute()
    assert (result.outcome, result.status) == (Outcome.SUCCEEDED, ExitStatus.OK)
    assert world.cloud.num_rented == 3
    assert world.cloud.alive == {}


def test_the_hard_cap_tears_down(tmp_path: Path) -> None:
    """Money spent is looked at while the run goes on; at the cap everything ends."""
    world = World(tmp_path, TRAINER, budget=Budget(soft_usd=1.0, hard_usd=2.0))
    world.cloud.usd = 2.5
    world.cloud.commands = {"trainer": world.cloud.until_ended}
    result = world.execute()
    assert result.status is ExitStatus.FAILED
    assert "hard cap of 2.00 USD" in result.message
    assert any("soft cap" in line for line in world.notes.lines)
    assert world.cloud.alive == {}
    assert result.summary["cost_usd"] == 2.5


def test_a_role_that_cannot_be_rented_ends_the_others(tmp_path: Path) -> None:
    """One refusal is the run's, with its own status; what was rented meanwhile goes."""
    world = World(tmp_path, TRAINER, ROLLOUT)
    world.cloud.refuse = {"rollout": NoOffersError("nothing fits rollout")}
    result = world.execute()
    assert result.status is ExitStatus.PROVISION
    assert "nothing fits rollout" in result.message
    assert world.cloud.alive == {}


def test_a_machine_that_comes_up_late_is_not_forgotten(tmp_path: Path) -> None:
    """A create call under way when the run ends is waited for, then its machine is ended."""
    world = World(tmp_path, TRAINER, ROLLOUT)
    world.cloud.refuse = {"rollout": NoOffersError("nothing fits")}
    world.cloud.rent_gate.clear()

    def on_note(text: str) -> None:
        if text.startswith("ending"):
            threading.Timer(0.4, world.cloud.rent_gate.set).start()

    world.notes.on_note = on_note
    result = world.execute()
    assert result.status is ExitStatus.PROVISION
    assert world.cloud.num_rented == 1
    assert world.cloud.alive == {}


def test_a_bug_in_a_thread_is_raised_after_the_teardown(tmp_path: Path) -> None:
    """What nobody thought of is not hidden, and costs no machine."""
    world = World(tmp_path, TRAINER)

    def broken(label: str) -> int:
        raise ZeroDivisionError(label)

    world.cloud.commands = {"trainer": broken}
    with pytest.raises(ZeroDivisionError):
        world.execute()
    assert world.cloud.alive == {}


def test_an_error_of_ours_in_a_role_is_a_result(tmp_path: Path) -> None:
    """A machine error that is not about reachability counts as lost: the trainer's ends the run."""
    world = World(tmp_path, TRAINER)

    def refused(label: str) -> int:
        raise RemoteCommandError("no shell there")

    world.cloud.commands = {"trainer": refused}
    result = world.execute()
    assert result.status is ExitStatus.FAILED
    assert "trainer-0" in result.message
    assert any("no shell there" in line for line in world.notes.lines)


def test_a_machine_that_is_not_proven_gone_is_named(tmp_path: Path) -> None:
    """A success whose machine does not go has a status of its own and names the machine."""
    world = World(tmp_path, TRAINER)
    world.cloud.commands = {"trainer": lambda label: 0}
    world.cloud.never_gone = {"trainer"}
    result = world.execute(Limits(gone_s=0.5))
    assert result.status is ExitStatus.NOT_PROVEN_GONE
    assert "job-1-trainer-0-1" in result.message
    assert "paceline gc" in result.message


def test_what_happened_is_in_the_journal(tmp_path: Path) -> None:
    """Starts, ends and the finish are on disk, in order, whoever reads them later."""
    world = World(tmp_path, TRAINER)
    world.cloud.commands = {"trainer": lambda label: 3}
    world.execute()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    names = [line.partition('"event": "')[2].partition('"')[0] for line in lines]
    assert names == ["role.started", "role.exited", "run.ending", "run.finished"]


def test_whoever_watches_may_go_away(tmp_path: Path) -> None:
    """A terminal that is closed ends neither the run nor its teardown."""
    world = World(tmp_path, TRAINER, ROLLOUT)
    world.cloud.commands = {"trainer": lambda label: 0, "rollout": world.cloud.until_ended}

    def closed(text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    world.notes.on_note = closed
    result = world.execute()
    assert (result.outcome, result.status) == (Outcome.SUCCEEDED, ExitStatus.OK)
    assert world.cloud.alive == {}
    assert "watcher.lost" in (tmp_path / "events.jsonl").read_text()


def test_a_machine_that_cannot_be_written_off_is_not_waited_for(tmp_path: Path) -> None:
    """Gone is gone, also when the disk is full: the run ends at once and says what is missing."""
    world = World(tmp_path, TRAINER)
    world.cloud.commands = {"trainer": lambda label: 0}
    world.cloud.unwritable = GoneUnrecordedError("machine x is gone, but that is not on record")
    result = world.execute()
    assert (result.outcome, result.status) == (Outcome.SUCCEEDED, ExitStatus.PREFLIGHT)
    assert "is gone, but that is not on record" in result.message


def test_a_record_that_cannot_be_read_holds_no_teardown_up(tmp_path: Path) -> None:
    """Without the record the machines that this run rented are ended all the same."""
    world = World(tmp_path, TRAINER)

    def trainer(label: str) -> int:
        world.cloud.unreadable = StoreError("store: the disk fails")
        return 0

    world.cloud.commands = {"trainer": trainer}
    world.cloud.unwritable = GoneUnrecordedError("gone, but not on record")
    result = world.execute()
    assert result.status is ExitStatus.PREFLIGHT
    assert world.cloud.alive == {}


def test_what_a_machine_does_not_have_yet_is_not_missed(tmp_path: Path) -> None:
    """A run that is stopped before its machines are set up complains of no lost artifacts."""
    world = World(tmp_path, TRAINER, ROLLOUT)
    world.cloud.is_bare = True
    world.cloud.refuse = {"rollout": NoOffersError("nothing fits")}
    result = world.execute()
    assert "artifacts" not in result.message


def test_artifacts_that_fail_at_once_are_missed(tmp_path: Path) -> None:
    """A pull that has failed before it is waited for is told like any other."""
    world = World(tmp_path, TRAINER, replace(ROLLOUT, count=3))
    world.cloud.commands = {"trainer": lambda label: 0, "rollout": world.cloud.until_ended}
    world.cloud.broken_copy = RemoteCommandError("no space left")
    result = world.execute()
    assert result.status is ExitStatus.PREFLIGHT
    assert result.message.count("no space left") == 4


def test_a_record_that_is_locked_for_a_while_ends_no_run(tmp_path: Path) -> None:
    """What cannot be read now is said, once, and the work goes on."""
    world = World(tmp_path, TRAINER)
    told = threading.Event()

    def on_note(text: str) -> None:
        if "is reckoned, not read: store: database is locked" in text:
            told.set()

    def trainer(label: str) -> int:
        code = 0 if told.wait(20) else 9
        world.cloud.unpriced = None
        return code

    world.notes.on_note = on_note
    world.cloud.unpriced = StoreError("store: database is locked")
    world.cloud.commands = {"trainer": trainer}
    result = world.execute()
    assert (result.outcome, result.status) == (Outcome.SUCCEEDED, ExitStatus.OK)
    assert sum("is reckoned, not read" in line for line in world.notes.lines) == 1


class TurnedClock:
    """The real clock, on which time can pass at once, or be set wrong."""

    def __init__(self) -> None:
        self._real = system_clock()
        self._passed_s = 0.0
        self._set_by_s = 0.0

    def time(self) -> float:
        return self._real.time() + self._passed_s + self._set_by_s

    def monotonic(self) -> float:
        return self._real.monotonic() + self._passed_s

    def sleep(self, seconds: float) -> None:
        self._real.sleep(seconds)

    def let_pass(self, seconds: float) -> None:
        self._passed_s += seconds

    def set_by(self, seconds: float) -> None:
        self._set_by_s += seconds


class Meter(World):
    """A run of one machine at a dollar an hour, by a clock that is turned."""

    def __init__(self, out: Path, *, budget: Budget) -> None:
        super().__init__(out, TRAINER, budget=budget)
        self.clock: TurnedClock = TurnedClock()
        self.read = threading.Event()
        since_s = self.clock.time()

        spending = self.cloud.spending

        def measured(run_id: str) -> Spending:
            self.read.set()
            spent_usd = max(0.0, self.clock.time() - since_s) / 3600
            return replace(spending(run_id), spent_usd=spent_usd)

        self.cloud.spending = measured  # type: ignore[method-assign]

    def let_pass(self, seconds: float) -> None:
        """Let time pass, and the driver look at the money after it, twice."""
        self.clock.let_pass(seconds)
        for _ in range(2):
            self.read.clear()
            assert self.read.wait(20)
            self.clock.let_pass(COST_EVERY_S)

    def told_usd(self) -> float:
        lines = (self.out / "events.jsonl").read_text().splitlines()
        (end,) = [event for event in map(json.loads, lines) if event["event"] == "run.finished"]
        return float(end["cost_usd"])


def test_a_clock_that_is_set_back_makes_nothing_cheaper(tmp_path: Path) -> None:
    """Half an hour, the clock an hour back, half an hour: a dollar, and it is said once."""
    world = Meter(tmp_path, budget=Budget(soft_usd=0.9, hard_usd=5.0))

    def trainer(label: str) -> int:
        world.let_pass(1800)
        world.clock.set_by(-3600)
        world.let_pass(1800)
        return 0

    world.cloud.commands = {"trainer": trainer}
    assert world.execute().status is ExitStatus.OK
    assert world.told_usd() == pytest.approx(1.0, abs=0.03)
    assert sum("clock was set back by 3" in line for line in world.notes.lines) == 1
    assert sum("soft cap" in line for line in world.notes.lines) == 1


@pytest.mark.parametrize(("hard_usd", "outcome"), [(5.0, "succeeded"), (0.8, "stopped")])
def test_a_computer_that_slept_pays_and_tears_nothing_down(
    tmp_path: Path, hard_usd: float, outcome: str
) -> None:
    """An hour that only the wall clock knows of is billed; only the hard cap ends a run for it."""
    world = Meter(tmp_path, budget=Budget(soft_usd=0.5, hard_usd=hard_usd))

    def trainer(label: str) -> int:
        world.clock.set_by(3600)
        world.let_pass(10)
        return world.cloud.until_ended(label) if hard_usd < 1 else 0

    world.cloud.commands = {"trainer": trainer}
    result = world.execute()
    assert world.told_usd() == pytest.approx(1.0, abs=0.03)
    assert world.cloud.num_rented == 1
    assert (result.outcome is Outcome.SUCCEEDED) == (outcome == "succeeded")
