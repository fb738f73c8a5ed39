"""`kill -9` of the command line at named points of `up`, against a fake cloud with real sshds."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.namespaces import write_hosts
from e2e.operating import Operator
from paceline.core.waiting import wait_until
from paceline.system import system_clock
from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.machine import FakeMachine, has_sshd, make_key_pair
from paceline.testing.fakes.machines import SshMachines
from paceline.testing.fakes.registry import FAKES, serve_fake
from paceline.testing.killed_at import POINTS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server"),
]

JOB = """
name: nine
budget: {soft_usd: 50}
roles:
  task: {backend: BACKEND, gpu: GPU, run: 'echo one line; date +%s%N > $PACELINE_OUT/at'}
"""


class World:
    """An operator, and what could be left behind by a driver that died."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def killed(self, point: str) -> None:
        """Type ``up`` and let it die at a point."""
        words = ["up", "job.yaml", "--yes", "--run-id", "nine", "--out", "out"]
        died = subprocess.run(
            [sys.executable, "-m", "paceline.testing.killed_at", point, *words],
            cwd=self.operator.home,
            env=self.operator.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert died.returncode == -signal.SIGKILL, died.stderr

    def paceline(self, *words: str) -> Any:
        status, out, err = self.operator.type(*words, "--json")
        assert status == 0, err
        return json.loads(out.splitlines()[-1])

    def check_next_call_ends(self, point: str) -> None:
        self.killed(point)
        self.paceline("gc", "--yes")
        assert self.paceline("ls") == []
        assert self.paceline("status", "nine")["state"] == "abandoned"
        left = {path.name for path in (self.operator.state / "runs" / "nine").iterdir()}
        assert left == {"owner.lock"}

    def check_next_call_adopts(self, point: str) -> None:
        self.killed(point)
        found = self.paceline("up", "--resume", "nine")
        assert found["outcome"] == "succeeded"
        assert self.paceline("ls") == []
        assert self.paceline("status", "nine")["state"] == "succeeded"
        log = (self.operator.home / "out" / "logs" / "task-0.log").read_text()
        assert log == "one line\n"


@pytest.fixture
def world(operator: Operator, tmp_path: Path) -> Iterator[World]:
    """One host behind a real sshd."""
    public = make_key_pair(tmp_path / "key")
    machine = FakeMachine(tmp_path / "host", authorized_keys=[public])
    machine.start()
    operator.job(JOB.replace("BACKEND", "ssh").replace("GPU", "cpu-1x"))
    write_hosts(tmp_path / "config", {"box": machine}, key=tmp_path / "key")
    operator.env["PACELINE_CONFIG_DIR"] = str(tmp_path / "config")
    yield World(operator)
    try:
        wait_until(
            lambda: machine.num_processes() == 0,
            what="the host being without processes",
            clock=system_clock(),
            timeout_s=10,
            interval_s=0.05,
        )
        assert list((machine.home / ".paceline" / "machines").glob("*")) == []
        assert not (machine.home / ".lock").is_symlink()
    finally:
        machine.stop()


@pytest.fixture
def cloud(operator: Operator, tmp_path: Path) -> Iterator[FakeCloud]:
    """A marketplace that keeps a bill, with a real sshd behind every machine."""
    machines = SshMachines(tmp_path / "machines")
    cloud: FakeCloud = FAKES["vast"]()(clock=system_clock(), machines=machines, boot_s=0.1)
    operator.job(JOB.replace("BACKEND", "vast").replace("GPU", "h100-1x"))
    with serve_fake(cloud) as found:
        operator.env |= found
        yield cloud
    cloud.close()


OF_UP = [point for point in POINTS if not point.startswith(("update-", "workers-"))]
"""The others are an engine's, and tried in test_serve_killed.py."""


def points(*daily: str) -> list[Any]:
    """Return all points, of which some are tried at every turn and all at night."""
    rest = [point for point in OF_UP if point not in daily]
    return [*daily, *(pytest.param(point, marks=pytest.mark.slow) for point in rest)]


@pytest.mark.parametrize("point", points("create-answered", "set-up", "destroying"))
def test_the_next_call_ends_everything(world: World, point: str) -> None:
    """Wherever the driver died: `gc --yes` ends what it left, and the run is on record as over."""
    world.check_next_call_ends(point)


@pytest.mark.parametrize("point", points("intent-written", "role-begun", "destroyed-unrecorded"))
def test_the_next_call_adopts_everything(world: World, point: str) -> None:
    """Wherever the driver died: the next one takes the run up, and the role runs once."""
    world.check_next_call_adopts(point)


BILLED = [point for point in OF_UP if point != "intent-written"]
"""There nobody knows for a minute whether a machine bills: providers list them late."""


@pytest.mark.slow
@pytest.mark.parametrize("point", BILLED)
def test_no_bill_goes_on_after_the_next_call(
    operator: Operator, cloud: FakeCloud, point: str
) -> None:
    """The same against a provider with a bill: whichever call is next, it stops."""
    world = World(operator)
    if BILLED.index(point) % 2:
        world.check_next_call_ends(point)
    else:
        world.check_next_call_adopts(point)
    assert cloud.billing() == []
