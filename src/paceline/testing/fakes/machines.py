"""Machines behind a fake provider: real sshds on loopback, or nothing that answers as if."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.rental.model import ExitCode
from paceline.rental.remote.protocol import Captured, SshTarget
from paceline.testing.fakes.gpus import FakeGpus
from paceline.testing.fakes.machine import FakeMachine
from paceline.testing.fakes.published import PublishedPort


class SshMachines:
    """A real sshd for each rented machine, below one directory.

    With ``port`` all machines listen there, each at an address of its own on loopback, for
    providers whose machines have port 22 and no other.
    """

    public_host = "127.0.0.1"
    """Where ports are published."""

    def __init__(self, root: Path, *, port: int | None = None) -> None:
        self._root = root
        self._port = port
        self._machines: dict[str, FakeMachine] = {}
        self._numbers = itertools.count(1)
        self._gpus: dict[str, FakeGpus] = {}
        self.published: dict[tuple[str, int], PublishedPort] = {}
        """Public ports by machine and port there."""

    def equip(self, instance_id: str, gpus: FakeGpus) -> None:
        """Say what the machine's driver is to show; before its first start."""
        self._gpus[instance_id] = gpus

    def start(
        self,
        instance_id: str,
        public_keys: Iterable[str],
        *,
        environ: Mapping[str, str] | None = None,
    ) -> tuple[str, int]:
        """Have the machine run, with ``environ``, and let these keys in."""
        machine = self._machines.get(instance_id)
        if machine is None:
            machine = self.make(
                self._root / instance_id, environ=environ, gpus=self._gpus.get(instance_id)
            )
            self._machines[instance_id] = machine
        machine.start()
        for key in public_keys:
            machine.authorize(key)
        return self.door_of(instance_id, machine)

    def make(
        self, root: Path, *, environ: Mapping[str, str] | None, gpus: FakeGpus | None
    ) -> FakeMachine:
        """Return a machine that is not started yet."""
        host = "127.0.0.1" if self._port is None else f"127.0.0.{next(self._numbers)}"
        return FakeMachine(root, port=self._port, host=host, environ=environ, gpus=gpus)

    def door_of(self, instance_id: str, machine: FakeMachine) -> tuple[str, int]:
        """Return where the world reaches a machine's sshd."""
        return machine.host, machine.port

    def publish(self, instance_id: str, port: int) -> tuple[str, int]:
        """Have a public port that leads to one of the machine's."""
        key = (instance_id, port)
        if key not in self.published:
            target = (self._machines[instance_id].host, port)
            self.published[key] = PublishedPort(target, host=self.public_host)
        found = self.published[key]
        return found.host, found.port

    def _unpublish(self, instance_id: str) -> None:
        for key in [key for key in self.published if key[0] == instance_id]:
            self.published.pop(key).close()

    def stop(self, instance_id: str) -> None:
        """End its processes; its public ports are others when it runs again."""
        self._unpublish(instance_id)
        machine = self._machines.get(instance_id)
        if machine is not None:
            machine.stop()

    def remove(self, instance_id: str) -> None:
        """End it for good; its directory goes with the root."""
        self._unpublish(instance_id)
        machine = self._machines.pop(instance_id, None)
        if machine is not None:
            machine.stop()


class SilentRemote:
    """A shell on a machine that exists only here: every command succeeds and does nothing."""

    def __init__(self, target: SshTarget, machine_id: str) -> None:
        self.target = target
        self.machine_id = machine_id

    def run(
        self, command: str, *, env: Mapping[str, str], stream: bool, timeout_s: float | None
    ) -> ExitCode:
        """Succeed."""
        return ExitCode(0, 0.0)

    def push(
        self, src: Path, dst: str, *, includes: Iterable[str], excludes: Iterable[str], delete: bool
    ) -> None:
        """Copy nothing."""

    def pull(
        self, src: str, dst: Path, *, includes: Iterable[str], excludes: Iterable[str]
    ) -> None:
        """Copy nothing."""

    def num_processes(self) -> int:
        """Return none."""
        return 0

    def close(self, *, force: bool) -> None:
        """End nothing."""

    def probe(self, *, timeout_s: float = 15.0) -> None:
        """Answer."""

    def capture(self, command: str, *, timeout_s: float = 60.0) -> Captured:
        """Print nothing and succeed."""
        return Captured(code=0, output="", errors="")

    def disconnect(self) -> None:
        """Hang up."""
