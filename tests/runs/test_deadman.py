"""The dead-man switch by itself: a real shell script, fired by silence and by nothing else."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental import SelfDestroyRecipe
from paceline.runs.bootstrap import Guest
from paceline.runs.deadman import (
    PROCESS_STOP,
    Arming,
    beat_command,
    render_switch,
)
from paceline.runs.model import Slot
from paceline.system import system_clock

CLOCK = system_clock()
SLOT = Slot(role="task", index=0)
GUEST = Guest(run_id="run", slot=SLOT)
DESTROY = SelfDestroyRecipe(command="echo gone >> ../destroyed", env={"KEY": "a b"}, guarantee="x")


class Machine:
    """A folder with a run's layout and a switch of two naps of a second."""

    def __init__(self, home: Path, recipe: SelfDestroyRecipe, *, after_s: float = 1.0) -> None:
        self.home = home
        self.run = home / "run"
        for name in ("deadman", "logs", "kit", "state"):
            (self.run / name).mkdir(parents=True)
        arming = Arming(after_s=after_s, recipe=recipe, slot=SLOT, grace_s=0.3)
        (self.run / "deadman/switch.sh").write_text(render_switch(arming))
        (self.run / "deadman/lease").write_text("armed\n")
        self.switch = subprocess.Popen(
            ["/bin/sh", str(self.run / "deadman/switch.sh")], cwd=home, start_new_session=True
        )

    @property
    def has_fired(self) -> bool:
        return (self.run / "deadman/fired").exists()

    @property
    def log(self) -> str:
        return (self.run / "logs/deadman-task-0.log").read_text()

    def beat(self, word: str) -> None:
        subprocess.run(["/bin/sh", "-c", beat_command(GUEST, word)], cwd=self.home, check=True)

    def await_it(self, what: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = CLOCK.monotonic() + timeout_s
        while not what():
            assert CLOCK.monotonic() < deadline, self.log
            CLOCK.sleep(0.05)

    def end(self) -> None:
        if self.switch.poll() is None:
            os.killpg(self.switch.pid, signal.SIGKILL)
        self.switch.wait()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    machines: list[Machine] = []

    def make(recipe: SelfDestroyRecipe, **more: float) -> Machine:
        machines.append(Machine(tmp_path / str(len(machines)), recipe, **more))
        return machines[-1]

    yield make
    for machine in machines:
        machine.end()


def test_silence_fires_and_a_late_beat_stands_it_down(made: Callable[..., Machine]) -> None:
    """Beats put the end off; silence brings it, with the reason; a beat after that ends the tries.

    The order to end is given again while the machine is there, as a provider may ignore one.
    """
    machine = made(DESTROY)
    machine.await_it((machine.run / "deadman/pid").exists)
    for word in ("a", "b", "c"):
        CLOCK.sleep(0.6)
        machine.beat(word)
    assert not machine.has_fired, "more than a second has passed, with beats in it"
    machine.await_it((machine.run / "destroyed").exists)
    assert "nobody has asked after this machine for 1 s: ending it (try 1)" in machine.log
    machine.await_it(lambda: (machine.run / "destroyed").read_text().count("gone") >= 2)
    machine.beat("somebody")
    machine.await_it(lambda: "standing down" in machine.log)
    assert not machine.has_fired


def test_the_same_word_again_is_no_beat(made: Callable[..., Machine]) -> None:
    """Only a change counts: a file that is touched, or copied back, does not."""
    machine = made(DESTROY)
    for _ in range(4):
        CLOCK.sleep(0.4)
        machine.beat("armed")
    machine.await_it(lambda: machine.has_fired, timeout_s=3)


def test_a_failed_end_is_tried_again_and_logged(made: Callable[..., Machine]) -> None:
    """A provider that cannot be reached now is asked again."""
    flaky = "test -e ../once || { : > ../once; echo no network; exit 7; }; echo gone > ../destroyed"
    machine = made(SelfDestroyRecipe(command=flaky, env={}, guarantee="x"))
    machine.await_it((machine.run / "destroyed").exists, timeout_s=20)
    assert "no network" in machine.log
    assert "ending it failed with status 7" in machine.log


def test_where_a_machine_cannot_end_itself_its_roles_are_ended(
    made: Callable[..., Machine],
) -> None:
    """The process is asked, then killed, and the log says that the machine bills on."""
    machine = made(PROCESS_STOP)
    role = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
    attempt = machine.run / "state/task-0/abcd"
    attempt.mkdir(parents=True)
    (attempt / "pid").write_text(f"{role.pid} 1 boot {role.pid}\n")
    assert role.wait(timeout=20) == -signal.SIGKILL
    machine.await_it(lambda: "cannot be ended from inside" in machine.log)
    assert machine.switch.wait(timeout=5) == 0


def test_term_ends_the_switch_at_once(made: Callable[..., Machine]) -> None:
    """A teardown does not wait for a nap."""
    machine = made(DESTROY, after_s=600.0)
    machine.await_it((machine.run / "deadman/pid").exists)
    machine.switch.terminate()
    assert machine.switch.wait(timeout=2) == 0
    assert not machine.has_fired


@given(st.floats(5, 30 * 86400))
def test_naps_add_up_to_what_was_asked_for(after_s: float) -> None:
    """As long as was asked for, give or take a tenth."""
    arming = Arming(after_s=after_s, recipe=PROCESS_STOP, slot=SLOT)
    total_s = arming.nap_s * arming.num_naps
    assert abs(total_s - after_s) <= 0.1 * after_s
