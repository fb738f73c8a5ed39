"""Hosts in network namespaces of their own: this computer dials them, and nobody else anybody."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from paceline.testing.fakes.gpus import FakeGpus
from paceline.testing.fakes.machine import FakeMachine, has_sshd, make_key_pair
from paceline.testing.fakes.machines import SshMachines


def can_make() -> bool:
    """Return whether namespaces can be made here."""
    return os.geteuid() == 0 and _program() != "ip" and has_sshd()


def _program() -> str:
    return shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin") or "ip"


def _ip(*words: str) -> None:
    subprocess.run([_program(), *words], check=True, capture_output=True, timeout=20)


class Hosts:
    """Some hosts, each alone with this computer at the other end of its wire."""

    def __init__(
        self, root: Path, names: tuple[str, ...], *, path: str, is_routed: bool = False
    ) -> None:
        self.root = root
        self.path = path
        self.names = names
        self.is_routed = is_routed
        """They send all that is not for their own wire to this computer, which hands nothing on."""
        self.public_host = ""
        """An address of this computer that all of them reach then."""
        self.machines: dict[str, FakeMachine] = {}
        self.places: dict[str, tuple[str, str]] = {}
        """Address and namespace of hosts without a machine yet."""
        self._key = root / "key"

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True)
        public = make_key_pair(self._key)
        for number, name in enumerate(self.names):
            netns = self._netns(name)
            net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 256}"
            ours, theirs = f"{net}.{4 * number + 1}", f"{net}.{4 * number + 2}"
            _ip("netns", "add", netns)
            wire = netns[-13:]
            _ip("link", "add", f"{wire}a", "type", "veth", "peer", "name", f"{wire}b")
            _ip("link", "set", f"{wire}b", "netns", netns)
            _ip("addr", "add", f"{ours}/30", "dev", f"{wire}a")
            _ip("link", "set", f"{wire}a", "up")
            _ip("-n", netns, "addr", "add", f"{theirs}/30", "dev", f"{wire}b")
            _ip("-n", netns, "link", "set", f"{wire}b", "up")
            _ip("-n", netns, "link", "set", "lo", "up")
            if self.is_routed:
                _ip("-n", netns, "route", "add", "default", "via", ours)
                self.public_host = self.public_host or ours
                self.places[name] = (theirs, netns)
                continue
            machine = FakeMachine(
                self.root / name,
                authorized_keys=[public],
                host=theirs,
                netns=netns,
                path=self.path,
            )
            machine.start()
            self.machines[name] = machine
        return self

    def cut(self, name: str) -> None:
        """Take the wire away without a word, as a network does."""
        _ip("link", "set", f"{self._netns(name)[-13:]}a", "down")

    def mend(self, name: str) -> None:
        """Give it back."""
        _ip("link", "set", f"{self._netns(name)[-13:]}a", "up")

    def write_config(self, directory: Path) -> None:
        """Write the hosts.toml that lists them."""
        write_hosts(directory, self.machines, key=self._key)

    def _netns(self, name: str) -> str:
        return f"pl{os.getpid()}{name}"

    def __exit__(self, *_: object) -> None:
        for machine in self.machines.values():
            machine.stop()
        for name in self.names:
            subprocess.run(
                [_program(), "netns", "del", self._netns(name)], check=False, capture_output=True
            )


class RentedHosts(SshMachines):
    """Machines of a provider in namespaces, all behind one public address of this computer."""

    def __init__(self, root: Path, hosts: Hosts) -> None:
        super().__init__(root)
        self.public_host = hosts.public_host
        self._path = hosts.path
        self._places = iter(hosts.places.values())

    def make(
        self, root: Path, *, environ: Mapping[str, str] | None, gpus: FakeGpus | None
    ) -> FakeMachine:
        host, netns = next(self._places)
        return FakeMachine(
            root, host=host, netns=netns, path=self._path, environ=environ, gpus=gpus
        )

    def door_of(self, instance_id: str, machine: FakeMachine) -> tuple[str, int]:
        return self.publish(instance_id, machine.port)


def write_hosts(directory: Path, machines: Mapping[str, FakeMachine], *, key: Path) -> None:
    """Write a hosts.toml that lists machines by name."""
    directory.mkdir(exist_ok=True)
    blocks = [
        f"""[[host]]
name = "{name}"
address = "{machine.host}"
port = {machine.port}
user = "{machine.user}"
identity = "{key}"
gpu = "cpu-1x"
lock = ".lock"
"""
        for name, machine in machines.items()
    ]
    (directory / "hosts.toml").write_text("\n".join(blocks))
