"""How the parts of one run reach each other: tried on each machine, decided, and kept so."""

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from paceline.core.address import LOOPBACK, is_loopback, join_address
from paceline.core.errors import PacelineError
from paceline.rental import SupportsAccess, SupportsPorts
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.records import Machine
from paceline.rental.remote.protocol import Access, DirectoryTarget, SshTarget
from paceline.rental.remote.tunnel import TunnelPlan
from paceline.runs.beacon import Beacon, hear_command, knock_command
from paceline.runs.files import write_atomic
from paceline.runs.model import Reach, RoleSpec, Slot
from paceline.runs.reach import (
    SAME_COMPUTER,
    Forwards,
    Mode,
    Place,
    Shortcut,
    control_link,
    forwards_of,
    links_of,
)
from paceline.runs.shortcuts import Shortcuts, Spot

PROBE_TIMEOUT_S = 20
LINKS_FILE = "links.json"


class Kept(Protocol):
    """A tunnel that is up, and kept so."""

    def close(self) -> None:
        """Let it go down; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the control service listens on this computer."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Return whether only this computer can dial it."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return join_address(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParts:
    """What links are made with."""

    run_id: str
    roles: Mapping[Slot, RoleSpec]
    control: Address
    ports: Mapping[Slot, Sequence[int]]
    """Where each role's servers listen; empty where any port will do."""
    backend: Callable[[str], BackendAdapter]
    open_tunnel: Callable[[SshTarget, TunnelPlan], Kept]
    beacon: Beacon
    shortcuts: Shortcuts
    run_dir: Path
    note: Callable[[str], None]
    has_store: bool = False
    exposed: Collection[Slot] = ()
    """Whose ports were asked to be mapped."""


class Links:
    """The links of one run; several threads may use it."""

    def __init__(self, parts: LinkParts) -> None:
        self._parts = parts
        self._spots: dict[Slot, Spot] = {}
        self._ways: list[Shortcut] = []
        self._tunnels: dict[Slot, Kept] = {}
        self._lock = threading.Lock()

    def join(self, slot: Slot, machine: Machine) -> None:
        """Find out how a slot's machine can be reached, and keep it so from now on.

        Raises:
            UnreachableError: it and another part of the run cannot reach each other.
            BackendError: the machine does not answer, or no tunnel comes up.
        """
        access = self._access(machine)
        place = self._look(slot, machine, access)
        spot = Spot(place=place, machine=machine, access=access)
        with self._lock:
            # Decided with those that are known already; the last to come sees all.
            others = [one for other, one in self._spots.items() if other != slot]
            places = [*(one.place for one in others), place]
            links_of(places, has_store=self._parts.has_store)
            self._spots[slot] = spot
            self._ways = [way for way in self._ways if slot not in (way.source, way.target)]
            before = self._tunnels.pop(slot, None)
        if before is not None:
            before.close()
        forwards = forwards_of(
            place, control_port=self._parts.control.port, ports=self._parts.ports
        )
        if isinstance(access, SshTarget) and (forwards.to_here or forwards.from_here):
            tunnel = self._parts.open_tunnel(access, self._plan(slot, forwards))
            with self._lock:
                self._tunnels[slot] = tunnel
        for other in others:
            self._shorten(spot, other)
        with self._lock:
            self._show(slot)

    def _shorten(self, spot: Spot, other: Spot) -> None:
        """Look for ways between two machines past this computer, and let both know of them."""
        found = self._parts.shortcuts.between(spot, other)
        with self._lock:
            self._ways += found
            for end in (spot, other) if found else ():
                try:
                    self._parts.shortcuts.tell(end, self._ways)
                except PacelineError as exc:
                    self._ways = [way for way in self._ways if way.source != end.slot]
                    self._parts.note(f"{end.slot} goes through this computer: {exc}")

    def env(self, slot: Slot) -> dict[str, str]:
        """Return what a slot's role must know of addresses; nothing while nobody has looked."""
        with self._lock:
            spot = self._spots.get(slot)
        if spot is None:
            return {}
        place = spot.place
        host = LOOPBACK
        if place.is_open:
            host = "0.0.0.0"  # noqa: S104 - its provider's map leads to any address but loopback
        elif place.wanted is Reach.DIRECT and place.address is not None:
            host = place.address
        is_tunnelled = control_link(place).mode is Mode.TUNNEL
        control = Address(host=LOOPBACK, port=self._parts.control.port)
        found = {
            "PACELINE_HOST": host,
            "PACELINE_CONTROL": str(control if is_tunnelled else self._parts.control),
        }
        ports = self._parts.ports.get(slot)
        return found | ({"PACELINE_PORT": str(ports[0])} if ports else {})

    def close(self) -> None:
        """Let all tunnels go down; idempotent."""
        with self._lock:
            tunnels = list(self._tunnels.values())
            self._tunnels.clear()
        for tunnel in tunnels:
            tunnel.close()

    def _access(self, machine: Machine) -> Access | None:
        backend = self._parts.backend(machine.backend)
        return backend.access(machine.handle) if isinstance(backend, SupportsAccess) else None

    def _look(self, slot: Slot, machine: Machine, access: Access | None) -> Place:
        role = self._parts.roles[slot]
        control, beacon = self._parts.control, self._parts.beacon
        is_here = isinstance(access, DirectoryTarget) or self._succeeds(
            machine, hear_command(beacon.port, beacon.word)
        )
        dials = not control.is_loopback and (
            is_here or self._succeeds(machine, knock_command(control.host, control.port))
        )
        return Place(
            slot=slot,
            kind=role.kind,
            backend=machine.backend,
            is_here=is_here,
            dials_control=dials,
            can_tunnel=isinstance(access, SshTarget),
            address=access.host if isinstance(access, SshTarget) else None,
            wanted=role.reach,
            mapped=self._mapped(slot, machine),
        )

    def _mapped(self, slot: Slot, machine: Machine) -> Mapping[int, str]:
        """Return where a machine's ports are, if some were asked for."""
        backend = self._parts.backend(machine.backend)
        if slot not in self._parts.exposed or not isinstance(backend, SupportsPorts):
            return {}
        return backend.status(machine.handle).ports

    def _succeeds(self, machine: Machine, command: str) -> bool:
        backend = self._parts.backend(machine.backend)
        ended = backend.run_remote(machine.handle, command, stream=False, timeout_s=PROBE_TIMEOUT_S)
        return ended.code == 0

    def _plan(self, slot: Slot, forwards: Forwards) -> TunnelPlan:
        control = self._parts.control
        return TunnelPlan(
            name=f"{self._parts.run_id}-{slot}",
            to_here=tuple(
                (port, control.host if port == control.port else LOOPBACK)
                for port in forwards.to_here
            ),
            from_here=forwards.from_here,
        )

    def _show(self, slot: Slot) -> None:
        """Let `status` show the links; note those of the slot that has just come."""
        places = [spot.place for spot in self._spots.values()]
        links = links_of(places, has_store=self._parts.has_store, shortcuts=self._ways)
        found = [asdict(link) for link in links]
        write_atomic(self._parts.run_dir / LINKS_FILE, json.dumps(found, indent=1) + "\n")
        for link in links:
            if link.source == str(slot) and link.why != SAME_COMPUTER:
                self._parts.note(f"{slot} reaches {link.target} by {link.mode}: {link.why}")


def read_links(run_dir: Path) -> list[dict[str, object]]:
    """Return what ``status`` shows of a run's links; none for a run without refit."""
    try:
        found = json.loads((run_dir / LINKS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [link for link in found if isinstance(link, dict)]
