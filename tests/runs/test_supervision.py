"""A role is begun once, watched from anywhere, and lost only with its machine."""

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.core.waiting import wait_until
from paceline.rental import (
    ConnectionLostError,
    ExitCode,
    InstanceHandle,
    InstanceStatus,
    SshUnreachableError,
)
from paceline.runs.bootstrap import Guest
from paceline.runs.model import Slot
from paceline.runs.scripts import LOG_BYTES_MAX, render_scripts
from paceline.runs.supervision import MachineLostError, Patience, Supervised
from paceline.system import system_clock
from paceline.testing.clock import FakeClock

SLOT = Slot(role="task", index=0)


class Machine:
    """A run's directory on a machine, and its shell."""

    def __init__(self, base: Path, run: str, shell: str) -> None:
        self.base = base
        self.shell = shell
        (base / "kit").mkdir(parents=True)
        (base / "secrets").mkdir()
        for name, text in render_scripts(str(SLOT), run=run, setup=None).items():
            (base / "kit" / name).write_text(text)
        self.sh("prepare.sh")

    def sh(self, script: str, *words: str) -> int:
        argv = [self.shell, str(self.base / "kit" / script), *words]
        return subprocess.run(argv, check=False, timeout=30, start_new_session=True).returncode

    @property
    def log(self) -> Path:
        return self.base / "logs" / "task-0.log"

    def supervisor(self, token: str) -> int:
        path = self.base / "state" / "task-0" / token / "pid"
        wait_until(path.exists, what="a pid", clock=system_clock(), timeout_s=10, interval_s=0.01)
        return int(path.read_text().split()[0])


@pytest.fixture(params=["dash", "bash"])
def shell(request: pytest.FixtureRequest) -> str:
    return f"/bin/{request.param}"


def test_an_attempt_begins_once(tmp_path: Path, shell: str) -> None:
    """The same token again starts nothing; watching twice gives the same status."""
    machine = Machine(tmp_path / "r", "echo ran; exit 7", shell)
    assert [machine.sh("start.sh", "a") for _ in range(3)] == [0, 0, 0]
    assert [machine.sh("watch.sh", "a"), machine.sh("watch.sh")] == [7, 7]
    assert machine.log.read_text() == "ran\n"
    assert machine.sh("start.sh", "b") == 0
    assert machine.sh("watch.sh", "b") == 7
    assert machine.log.read_text() == "ran\nran\n"
    assert (machine.base / "state" / "task-0" / "ended").is_symlink()


def test_a_role_outlives_whoever_started_it(tmp_path: Path, shell: str) -> None:
    """The starter's whole group is gone, and the role goes on to its own end."""
    machine = Machine(tmp_path / "r", "sleep 0.5; echo done", shell)
    starter = subprocess.Popen(
        [shell, "-c", f"{shell} {machine.base}/kit/start.sh a; sleep 60"], start_new_session=True
    )
    machine.supervisor("a")
    starter.kill()
    starter.wait()
    assert machine.sh("watch.sh", "a") == 0
    assert machine.log.read_text() == "done\n"


def test_stop_ends_the_role_and_not_its_report(tmp_path: Path, shell: str) -> None:
    """TERM reaches the role; its status is 143; stopping what has ended does nothing."""
    machine = Machine(tmp_path / "r", "echo up; exec sleep 60", shell)
    machine.sh("start.sh", "a")
    machine.supervisor("a")
    wait_until(
        lambda: machine.log.exists() and machine.log.read_text() == "up\n",
        what="the role",
        clock=system_clock(),
        timeout_s=10,
        interval_s=0.01,
    )
    assert machine.sh("stop.sh") == 0
    assert machine.sh("watch.sh", "a") == 143
    assert machine.sh("stop.sh") == 0


def test_a_supervisor_that_is_killed_is_an_end(tmp_path: Path, shell: str) -> None:
    """Nobody waits for ever for what can say nothing any more."""
    machine = Machine(tmp_path / "r", "exec sleep 60", shell)
    machine.sh("start.sh", "a")
    os.killpg(os.getpgid(machine.supervisor("a")), signal.SIGKILL)
    assert machine.sh("watch.sh", "a") == 137
    assert "was killed" in machine.log.read_text()


def test_a_long_log_is_set_aside_when_the_role_starts_again(tmp_path: Path, shell: str) -> None:
    """Rotated by renaming, so that nobody who reads it loses anything; the oldest goes."""
    machine = Machine(tmp_path / "r", "echo new", shell)
    for number in range(4):
        with machine.log.open("wb") as file:
            file.truncate(LOG_BYTES_MAX + 1 + number)
        machine.sh("start.sh", f"t{number}")
        machine.sh("watch.sh", f"t{number}")
    sizes = [machine.log.with_name(f"task-0.log.{n}").stat().st_size for n in (1, 2, 3)]
    assert sizes == [LOG_BYTES_MAX + 1 + n for n in (3, 2, 1)]
    assert not machine.log.with_name("task-0.log.4").exists()
    assert machine.log.read_text() == "new\n"


class Flaky:
    """A backend whose machine answers some calls and not others."""

    name = "flaky"

    def __init__(self, *answers: int | Exception, clock: FakeClock, state: str = "running") -> None:
        self.answers = list(answers)
        self.clock = clock
        self.state = state
        self.commands: list[str] = []
        self.asleep_s = 0.0
        """How long this computer sleeps during the first call."""

    def run_remote(
        self,
        h: InstanceHandle,
        command: str,
        *,
        env: Mapping[str, str] = {},
        stream: bool = True,
        timeout_s: int | None = None,
    ) -> ExitCode:
        self.commands.append(command)
        self.clock.advance(self.asleep_s)
        self.asleep_s = 0.0
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            self.clock.advance(10.0)
            raise answer
        return ExitCode(answer, 0.0)

    def status(self, h: InstanceHandle) -> InstanceStatus:
        return InstanceStatus(self.state, "cpu", 1, None, None, {})


def supervised(backend: Flaky) -> Supervised:
    return Supervised(
        backend,  # type: ignore[arg-type]  # only what is asked of it
        InstanceHandle("flaky", "i", "label", 0.0),
        Guest(run_id="r", slot=SLOT),
        clock=backend.clock,
        patience=Patience(unreachable_s=300.0),
    )


AWAY, CUT = SshUnreachableError("no answer"), ConnectionLostError("cut")


def test_a_lost_connection_is_not_a_lost_role() -> None:
    """Calls are made again with the same token until one is answered."""
    backend = Flaky(AWAY, CUT, AWAY, 0, clock=FakeClock())
    supervised(backend).begin("t", {})
    assert backend.commands == ["sh r/kit/start.sh t"] * 4
    assert supervised(Flaky(CUT, AWAY, CUT, AWAY, 5, clock=FakeClock())).wait("t") == 5


def test_an_hour_asleep_is_not_held_against_a_machine() -> None:
    """Whichever clock jumps: patience begins with the first try that failed afterwards."""
    backend = Flaky(CUT, AWAY, AWAY, 0, clock=FakeClock())
    backend.asleep_s = 3600.0
    assert supervised(backend).wait("t") == 0
    backend = Flaky(CUT, AWAY, 0, clock=FakeClock())
    backend.clock.set_time(backend.clock.time() + 3600.0)
    assert supervised(backend).wait("t") == 0


def test_patience_ends() -> None:
    """A machine that never answers again is lost, with how long that was."""
    with pytest.raises(MachineLostError, match="has not answered for"):
        supervised(Flaky(AWAY, clock=FakeClock())).wait("t")


@pytest.mark.parametrize("state", ["stopped", "destroyed"])
def test_a_machine_that_is_gone_is_lost_at_once(state: str) -> None:
    """The provider's word ends the waiting; also when the role ended with its machine."""
    for answer in (AWAY, 143):
        backend = Flaky(answer, clock=FakeClock(), state=state)
        with pytest.raises(MachineLostError, match="is gone"):
            supervised(backend).wait("t")
        assert len(backend.commands) == 1
