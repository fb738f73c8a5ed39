"""Hosts in network namespaces of their own: this computer dials them, and nobody else anybody."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from paceline.testing.fakes.machine import FakeMachine, has_sshd, make_key_pair


def can_make() -> bool:
    """Return whether namespaces can be made here."""
    return os.geteuid() == 0 and _program() != "ip" and has_sshd()


def _program() -> str:
    return shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin") or "ip"


def _ip(*words: str) -> None:
    subprocess.run([_program(), *words], check=True, capture_output=True, timeout=20)


class Hosts:
    """Some hosts, each alone with this computer at the other end of its wire."""

    def __init__(self, root: Path, names: tuple[str, ...], *, path: str) -> None:
        self.root = root
        self.path = path
        self.names = names
        self.machines: dict[str, FakeMachine] = {}
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
