"""What a run does about deaths, money and errands that fail, over fakes that behave."""

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import ExitStatus
from paceline.rental import BackendAdapter, DeathCause, InstanceHandle, RemoteCommandError
from paceline.rental.budget import Budget
from paceline.runs.bootstrap import Guest
from paceline.runs.fleet import Fleet
from paceline.runs.journal import Journal
from paceline.runs.live import read_live
from paceline.runs.model import ArtifactSpec, Outcome, RestartMode, Slot
from paceline.runs.plan import FAST_EXITS_MAX
from paceline.runs.pulling import Puller, PullParts
from paceline.runs.run import Limits
from paceline.store.protocol import StoreError
from paceline.system import system_clock
from runs.test_run import ROLLOUT, TRAINER, World


def events(world: World, name: str) -> list[Mapping[str, object]]:
    lines = (world.out / "events.jsonl").read_text().splitlines()
    return [found for line in lines if (found := json.loads(line))["event"] == name]


def test_a_trainer_whose_machine_is_lost_goes_on_elsewhere(tmp_path: Path) -> None:
    """The policy holds for the trainer; what prepares a start is asked before each, with its place.

    The rollout is not touched.
    """
    trainer = replace(TRAINER, restart=RestartMode.ON_FAILURE, max_restarts=0)
    world = World(tmp_path, trainer, ROLLOUT)
    prepared: list[tuple[str, str]] = []
    world.fleet_more = {"prepare": lambda slot, b, h, g: prepared.append((str(slot), h.label))}
    world.cloud.causes = {"trainer": DeathCause.PREEMPTED}
    first = threading.Event()

    def train(label: str) -> int:
        if first.is_set():
            return 0
        first.set()
        world.cloud.lose(label)
        return 137

    world.cloud.commands = {"trainer": train, "rollout": world.cloud.until_ended}
    result = world.execute()
    assert (result.outcome, world.cloud.num_rented) == (Outcome.SUCCEEDED, 3)
    labels = [label for slot, label in prepared if slot == "trainer-0"]
    assert len(labels) == len(set(labels)) == 2
    assert [label for slot, label in prepared if slot == "rollout-0"] != []
    assert len([slot for slot, _ in prepared if slot == "rollout-0"]) == 1
    (lost,) = events(world, "machine.lost")
    assert lost["cause"] == DeathCause.PREEMPTED
    assert any("was taken back by its provider" in line for line in world.notes.lines)
    roles = result.summary["roles"]
    assert isinstance(roles, list)
    assert [(r["role"], r["machines_lost"], r["restarts"]) for r in roles] == [
        ("trainer", 1, 0),
        ("rollout", 0, 0),
    ]


def test_a_crash_loop_ends_with_the_last_lines_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever max_restarts allows, the run stops and shows why; the event says so too."""
    monkeypatch.setattr("paceline.runs.plan.FIRST_DELAY_S", 0.01)
    world = World(tmp_path, TRAINER, replace(ROLLOUT, max_restarts=1000))
    world.cloud.commands = {"trainer": world.cloud.until_ended, "rollout": lambda label: 3}
    result = world.execute()
    assert result.status is ExitStatus.FAILED
    assert f"exited with status 3, {FAST_EXITS_MAX} times in a row" in result.message
    assert "said something" in result.message
    (told,) = events(world, "role.crash_loop")
    assert (told["role"], told["code"], told["times"]) == ("rollout", 3, FAST_EXITS_MAX)


def test_money_is_looked_at_while_machines_are_rented(tmp_path: Path) -> None:
    """A run that is over its cap before it has begun to work ends there, machines and all."""
    world = World(tmp_path, TRAINER, budget=Budget(soft_usd=1.0, hard_usd=2.0))
    world.cloud.usd = 2.0
    world.cloud.rent_gate.clear()

    def on_note(text: str) -> None:
        if text.startswith("ending"):
            threading.Timer(0.2, world.cloud.rent_gate.set).start()

    world.notes.on_note = on_note
    result = world.execute()
    assert "hard cap of 2.00 USD" in result.message
    assert events(world, "role.started") == []
    assert world.cloud.alive == {}


def test_the_end_for_money_begins_while_pulling_still_fits(tmp_path: Path) -> None:
    """Below the cap there is time to pull, and it is used; nothing of it is an error."""
    budget = Budget(soft_usd=1.0, hard_usd=2.0, grace_s=3600.0)
    world = World(tmp_path, TRAINER, budget=budget)
    world.cloud.usd = 1.7  # one machine at 1 USD an hour: a fifth of the cap is kept back
    world.cloud.commands = {"trainer": world.cloud.until_ended}
    result = world.execute()
    assert "hard cap of 2.00 USD is reached: 1.70 USD spent" in result.message
    assert "not pulled" not in result.message
    assert (tmp_path / "logs" / "trainer-0.log").exists()
    (soft,) = events(world, "budget.soft")
    (hard,) = events(world, "budget.hard")
    assert (soft["spent_usd"], soft["burn_dph"], hard["hard_usd"]) == (1.7, 1.0, 2.0)


def test_past_the_cap_nothing_is_pulled(tmp_path: Path) -> None:
    """When every second costs what is not there, machines go at once, and that is said."""
    world = World(tmp_path, TRAINER, budget=Budget(soft_usd=1.0, hard_usd=2.0))
    world.cloud.usd = 2.5
    world.cloud.commands = {"trainer": world.cloud.until_ended}
    result = world.execute()
    assert "artifacts were not pulled" in result.message
    assert not (tmp_path / "logs" / "trainer-0.log").exists()
    assert world.cloud.alive == {}


def test_a_record_that_cannot_be_read_stops_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the cost cannot be read it is reckoned from what was burning, and that is said."""
    monkeypatch.setattr("paceline.runs.run.COST_EVERY_S", 0.1)
    world = World(tmp_path, TRAINER, budget=Budget(soft_usd=50.0, hard_usd=100.0))
    told = threading.Event()

    def trainer(label: str) -> int:
        world.cloud.unreadable = StoreError("store: locked")
        assert told.wait(20)
        world.cloud.unreadable = None
        return 0

    world.notes.on_note = lambda text: told.set() if "reckoned, not read" in text else None
    world.cloud.commands = {"trainer": trainer}
    result = world.execute()
    assert result.outcome is Outcome.SUCCEEDED
    assert len([line for line in world.notes.lines if "reckoned" in line]) == 1


class BrokenPuller(Puller):
    """Fails at every pull, which here is at once and again and again."""

    def __init__(self, world: World) -> None:
        journal = Journal(world.out / "events.jsonl", clock=system_clock())
        artifacts = ArtifactSpec(every_s=0.01)
        super().__init__(
            PullParts(
                run_id="job-1",
                artifacts=artifacts,
                out=world.out,
                clock=system_clock(),
                journal=journal,
            )
        )
        self.num_pulls = 0
        self.enough = threading.Event()

    def pull(self, slot: Slot, backend: BackendAdapter, handle: InstanceHandle, g: Guest) -> None:
        self.num_pulls += 1
        if self.num_pulls >= 3:
            self.enough.set()
        raise RemoteCommandError("no space left on the machine")


def test_an_errand_that_fails_costs_no_role_anything(tmp_path: Path) -> None:
    """A pull that fails again and again is told once, and the role runs on."""
    world = World(tmp_path, TRAINER)
    puller = BrokenPuller(world)
    world.run_more = {"puller": puller, "live": tmp_path / "live.json"}
    world.fleet_more = {"arm": lambda *where: None}

    def trainer(label: str) -> int:
        assert puller.enough.wait(20)
        return 0

    world.cloud.commands = {"trainer": trainer}
    real = Fleet.start

    def start(self: Fleet, slot: Slot) -> None:
        puller.use(self)
        real(self, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fleet, "start", start)
        result = world.execute()
    assert result.outcome is Outcome.SUCCEEDED
    assert world.cloud.num_rented == 1
    assert len([line for line in world.notes.lines if "no space left" in line]) == 1
    live = read_live(tmp_path / "live.json")
    assert live is not None
    assert live["burn_dph"] in {0.0, 1.0}


def test_a_machine_is_beaten_for_until_it_is_gone(tmp_path: Path) -> None:
    """Also while artifacts are pulled and machines destroyed: the switch must not fire in that."""
    world = World(tmp_path, TRAINER)
    phases: list[bool] = []

    class Beats:
        is_ending = False

        def poll(self) -> None:
            phases.append(self.is_ending)

    beats = Beats()
    world.run_more = {"beats": beats}

    def on_note(text: str) -> None:
        beats.is_ending = beats.is_ending or text.startswith("ending")

    world.notes.on_note = on_note
    world.cloud.commands = {"trainer": lambda label: 0}
    world.cloud.never_gone = {"trainer"}
    world.execute(Limits(gone_s=0.5))
    assert {True, False} == set(phases)
