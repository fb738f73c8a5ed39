"""Machines that are network namespaces of this one, on links of a given rate. Root on Linux only.

Every network is a bridge in a namespace of its own; every machine has a link to each of its
networks, shaped in both directions. What has no link in common has no way to each other.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

BURST = "256kb"
QUEUE = "60ms"
PATH = "/usr/sbin:/sbin:/usr/bin:/bin"


class NetworkRefusedError(Exception):
    """Namespaces cannot be made here; says why."""


class Networks:
    """Namespaces and links, until closed."""

    def __init__(self) -> None:
        """Make nothing but the namespace that the bridges are in. Raises NetworkRefusedError."""
        self._prefix = f"pl{os.getpid():x}"
        self._hub = f"{self._prefix}-hub"
        self._namespaces: list[str] = []
        self._links = itertools.count()
        self._subnets: dict[str, int] = {}
        self._hosts: dict[str, Iterator[int]] = {}
        self._machines: dict[str, dict[str, str]] = {}
        self._namespace(self._hub)

    def add(self, machine: str, links: Mapping[str, int | None]) -> None:
        """Make a machine with a link to each network, at so many Mbit/s both ways or unlimited."""
        name = self._name(machine)
        self._namespace(name)
        self._machines[machine] = {}
        for network, mbit in links.items():
            self._machines[machine][network] = self._connect(name, network, mbit)

    def address(self, machine: str, network: str) -> str:
        """Return a machine's address in a network."""
        return self._machines[machine][network]

    def add_address(self, machine: str, address: str) -> None:
        """Give a machine an address of its own in no network; ``route`` says who reaches it."""
        _ip(self._name(machine), "addr", "add", f"{address}/32", "dev", "lo")

    def route(self, machine: str, address: str, *, via: str, network: str) -> None:
        """Let a machine reach an address through another one of its network."""
        gate = self.address(via, network)
        _ip(self._name(machine), "route", "add", f"{address}/32", "via", gate)

    def command(self, machine: str, argv: Sequence[str]) -> Sequence[str]:
        """Return the command line that runs ``argv`` on a machine."""
        return (_tool("ip"), "netns", "exec", self._name(machine), *argv)

    def sent_bytes(self, machine: str, network: str) -> int:
        """Return what a machine has sent into a network, headers of all layers included."""
        number = list(self._machines[machine]).index(network)
        path = f"/sys/class/net/eth{number}/statistics/tx_bytes"
        return int(_run(*self.command(machine, ["cat", path])))

    def close(self) -> None:
        """Take everything away; processes inside lose their network."""
        for name in reversed(self._namespaces):
            subprocess.run([_tool("ip"), "netns", "del", name], check=False)
        self._namespaces.clear()

    def _name(self, machine: str) -> str:
        return f"{self._prefix}-{machine}"

    def _namespace(self, name: str) -> None:
        _run(_tool("ip"), "netns", "add", name)
        self._namespaces.append(name)
        _ip(name, "link", "set", "lo", "up")

    def _connect(self, name: str, network: str, mbit: int | None) -> str:
        if network not in self._subnets:
            self._subnets[network] = len(self._subnets)
            self._hosts[network] = itertools.count(1)
            _ip(self._hub, "link", "add", f"br-{network}", "type", "bridge")
            _ip(self._hub, "link", "set", f"br-{network}", "up")
        inside = f"eth{len(self._machines[name.removeprefix(self._prefix + '-')])}"
        outside = f"{self._prefix}{next(self._links)}"
        address = f"10.77.{self._subnets[network]}.{next(self._hosts[network])}"
        _run(
            *(_tool("ip"), "link", "add", outside, "netns", self._hub, "type", "veth"),
            *("peer", "name", inside, "netns", name),
        )
        _ip(self._hub, "link", "set", outside, "master", f"br-{network}", "up")
        _ip(name, "addr", "add", f"{address}/24", "dev", inside)
        _ip(name, "link", "set", inside, "up")
        if mbit is not None:
            _shape(self._hub, outside, mbit)
            _shape(name, inside, mbit)
        return address


@contextmanager
def networks() -> Iterator[Networks]:
    """Yield networks, and take them away. Raises NetworkRefusedError."""
    made = Networks()
    try:
        yield made
    finally:
        made.close()


def _shape(namespace: str, device: str, mbit: int) -> None:
    _run(
        *(_tool("ip"), "netns", "exec", namespace, _tool("tc"), "qdisc", "add", "dev", device),
        *("root", "tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", QUEUE),
    )


def _ip(namespace: str, *words: str) -> None:
    _run(_tool("ip"), "-n", namespace, *words)


def _tool(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        raise NetworkRefusedError(f"{name} is not installed: apt-get install iproute2")
    return found


def _run(*argv: str) -> str:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkRefusedError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
