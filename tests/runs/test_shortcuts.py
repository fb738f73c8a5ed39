"""What is tried between two machines: for real where it can be on one computer."""

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.core.waiting import wait_until
from paceline.rental import ExitCode, InstanceHandle
from paceline.rental.lifecycle import MachineState
from paceline.rental.records import Machine, RentedOffer
from paceline.runs.beacon import Beacon
from paceline.runs.model import Reach, RoleKind, Slot
from paceline.runs.reach import Mode, Place
from paceline.runs.shortcuts import ROUTES_FILE, Shortcuts, Spot
from paceline.system import system_clock

pytestmark = pytest.mark.enable_socket
TRAINER, ROLLOUT = Slot(role="trainer", index=0), Slot(role="rollout", index=0)


class Folders:
    """Machines that are folders of this computer; only what shortcuts ask for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands: list[str] = []

    def folder(self, h: InstanceHandle) -> Path:
        return self.root / h.instance_id

    def run_remote(
        self, h: InstanceHandle, command: str, *, stream: bool, timeout_s: int
    ) -> ExitCode:
        self.commands.append(command)
        argv = ["/bin/sh", "-c", command]
        done = subprocess.run(argv, cwd=self.folder(h), check=False, timeout=timeout_s)
        return ExitCode(done.returncode, 0.0)

    def sync_to(self, h: InstanceHandle, src: Path, dst: str) -> None:
        shutil.copytree(src, self.folder(h) / dst, dirs_exist_ok=True)

    def sync_from(self, h: InstanceHandle, src: str, dst: Path) -> None:
        shutil.copy(self.folder(h) / src, dst)


class Scene:
    """A trainer with one port, and a rollout, that look as if they were far away."""

    def __init__(self, root: Path) -> None:
        self.backend: Any = Folders(root)
        self.notes: list[str] = []
        self.port, self.engine_port = free_port(), free_port()
        self.shortcuts = Shortcuts(
            run_id="r",
            ports={TRAINER: (self.port,), ROLLOUT: (self.engine_port,)},
            backend=lambda _name: self.backend,
            word="ab12",
            has_http=True,
            note=self.notes.append,
        )
        self.trainer = self.spot(TRAINER, mapped={self.port: f"127.0.0.1:{self.port}"})
        self.rollout = self.spot(ROLLOUT)

    def spot(self, slot: Slot, *, mapped: Mapping[int, str] | None = None, **more: Any) -> Spot:
        (self.backend.root / slot.role).mkdir(exist_ok=True)
        label = f"paceline-r-{slot}-ab"
        machine = Machine(
            label=label,
            run_id="r",
            role=slot.role,
            index=slot.index,
            backend="b",
            offer=RentedOffer(id="o", gpu_name="g", num_gpus=1, dph=0.0),
            state=MachineState.RUNNING,
            intended_at=0.0,
            instance=InstanceHandle("b", slot.role, label, 0.0),
        )
        place = Place(
            slot=slot,
            kind=RoleKind(slot.role),
            backend="b",
            is_here=False,
            dials_control=False,
            can_tunnel=True,
            mapped=mapped or {},
            **more,
        )
        return Spot(place=place, machine=machine, access=None)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - is closed at once
        except OSError:
            return False
    return True


def test_a_mapped_port_that_says_the_word_is_dialled(scene: Scene) -> None:
    """It is the trainer's that is heard; afterwards the port is the role's, and routes are told."""
    [way] = scene.shortcuts.between(scene.rollout, scene.trainer)
    assert (way.source, way.target, way.mode) == (ROLLOUT, TRAINER, Mode.DIRECT)
    scene.shortcuts.tell(scene.rollout, [way])
    scene.shortcuts.tell(scene.trainer, [way])
    table = scene.backend.root / "rollout" / "r" / ROUTES_FILE
    address = f"127.0.0.1:{scene.port}"
    assert json.loads(table.read_text()) == {address: address}
    assert json.loads((scene.backend.root / "trainer" / "r" / ROUTES_FILE).read_text()) == {}
    assert scene.notes == []


def test_the_port_is_free_again_after_it_was_tried(scene: Scene) -> None:
    """Also of a beacon that nobody heard."""
    closed = scene.spot(TRAINER, mapped={scene.port: f"127.0.0.1:{free_port()}"})
    assert scene.shortcuts.between(closed, scene.rollout) == []
    wait_for(lambda: is_free(scene.port))


def test_another_server_behind_the_mapped_port_is_no_way(scene: Scene) -> None:
    """Somebody answers there, and it is not the trainer."""
    with Beacon("other") as other:
        wrong = scene.spot(TRAINER, mapped={scene.port: f"127.0.0.1:{other.port}"})
        assert scene.shortcuts.between(wrong, scene.rollout) == []


def test_a_role_that_listens_already_is_knocked_at(scene: Scene) -> None:
    """A rollout that is replaced finds the trainer at work: its port cannot say a word for us."""
    with socket.create_server(("0.0.0.0", scene.port)):  # noqa: S104 - as the trainer's own
        [way] = scene.shortcuts.between(scene.trainer, scene.rollout)
    assert way.source == ROLLOUT


@pytest.mark.parametrize("more", [{"wanted": Reach.TUNNEL}, {"wanted": Reach.OBJECTSTORE}])
def test_nothing_is_tried_where_the_job_file_says_how(scene: Scene, more: Any) -> None:
    """No command runs on any machine."""
    assert scene.shortcuts.between(scene.trainer, scene.spot(ROLLOUT, **more)) == []
    assert scene.backend.commands == []


def wait_for(ready: Callable[[], bool]) -> None:
    wait_until(ready, what="it", clock=system_clock(), timeout_s=30, interval_s=0.05)
