"""Who can dial whom, and how it is done where that is not both: pure.

Three modes. ``direct``: the address that a server listens on is dialled, or the one that its
provider maps to it. ``tunnel``: somebody keeps an ssh connection, and an address on loopback means
the same server on every machine. ``objectstore``: nobody dials anybody, both write and read a
bucket.

The operator keeps a tunnel to every machine that needs one: what everything falls back to. Between
a trainer and a rollout there may be a shortcut that leaves the operator's line out, which is tried
when both are there: a mapped port that answers, or a tunnel that the trainer keeps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.core.address import LOOPBACK, join_address
from paceline.core.errors import ExitStatus, PacelineError
from paceline.runs.model import Reach, RoleKind, RoleSpec, Slot

CONTROL = "control"
"""The name of the control service among those who are dialled."""


SAME_COMPUTER = "same computer"


class Mode(StrEnum):
    """How one process reaches another."""

    DIRECT = "direct"
    TUNNEL = "tunnel"
    OBJECTSTORE = "objectstore"


class UnreachableError(PacelineError):
    """Two parts of a run cannot reach each other in any way that is allowed."""

    exit_status = ExitStatus.PREFLIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is known of one slot's machine: by its backend's nature, or because it was tried."""

    slot: Slot
    kind: RoleKind
    backend: str
    is_here: bool
    """Its loopback is this computer's."""
    dials_control: bool
    """It was tried: the control service's own address answers from there."""
    can_tunnel: bool
    """It is behind an sshd that lets us in."""
    address: str | None = None
    """Where its sshd is, and so perhaps its other ports."""
    wanted: Reach = Reach.AUTO
    """What the job file says."""
    mapped: Mapping[int, str] = field(default_factory=dict)
    """Port of its -> ``host:port`` by which its provider lets the world in."""

    @property
    def is_open(self) -> bool:
        """Return whether its servers are to be dialled by mapped addresses."""
        is_meant = self.kind is RoleKind.TRAINER or self.wanted is Reach.DIRECT
        return is_meant and bool(self.mapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortcut:
    """A way from one slot to another's servers that was tried, works, and leaves the operator out.

    Weights are read over TLS and may be dialled by whoever is let in; an engine's routes are plain
    text, so by itself nobody takes them through the open: only ssh, or the word of the job file.
    """

    source: Slot
    target: Slot
    mode: "Mode"
    why: str
    ways: Mapping[int, str]
    """Port of the target -> what the source dials for it."""

    @property
    def routes(self) -> dict[str, str]:
        """What the source's table of routes says."""
        return {join_address(LOOPBACK, port): way for port, way in self.ways.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How one part of a run reaches another, and why so."""

    source: str
    target: str
    mode: Mode
    why: str


def control_link(place: Place) -> Link:
    """Return how a role reaches the control service. Raises UnreachableError."""
    me = str(place.slot)
    if place.wanted is Reach.TUNNEL and place.can_tunnel:
        return Link(source=me, target=CONTROL, mode=Mode.TUNNEL, why="the job file says so")
    if place.is_here:
        return Link(source=me, target=CONTROL, mode=Mode.DIRECT, why=SAME_COMPUTER)
    if place.dials_control:
        return Link(source=me, target=CONTROL, mode=Mode.DIRECT, why="its address answers there")
    if place.wanted is not Reach.DIRECT and place.can_tunnel:
        return Link(source=me, target=CONTROL, mode=Mode.TUNNEL, why="cannot be dialled from there")
    raise UnreachableError(
        f"{me} on {place.backend} cannot reach the run's control service: its address does not "
        "answer from there and no tunnel is possible or allowed; set refit.listen to an address "
        "of this computer that machines reach, or use a backend with ssh and reach: auto"
    )


def exposed(
    roles: Mapping[Slot, RoleSpec], ports: Mapping[Slot, Sequence[int]], *, has_http: bool
) -> dict[Slot, tuple[int, ...]]:
    """Return which ports of each slot's machine should be reached from outside.

    A trainer's, which speak TLS, unless the job file says otherwise; an engine's only if it does.
    """
    allowed = {RoleKind.ROLLOUT: {Reach.DIRECT}}
    if has_http:
        allowed[RoleKind.TRAINER] = {Reach.AUTO, Reach.DIRECT}
    return {
        slot: tuple(ports[slot])
        for slot, role in roles.items()
        if slot in ports and role.reach in allowed.get(role.kind, ())
    }


def may_shorten(one: Place, other: Place) -> bool:
    """Return whether a way past the operator is worth looking for between two machines."""
    is_free = {one.wanted, other.wanted} <= {Reach.AUTO, Reach.DIRECT}
    return is_free and not (one.is_here or other.is_here)


def role_link(
    source: Place, target: Place, *, has_store: bool, shortcut: Shortcut | None = None
) -> Link:
    """Return how one role reaches another role's server. Raises UnreachableError.

    Args:
        source: who dials.
        target: who listens.
        has_store: an object store is configured that both can use.
        shortcut: what was found between them.
    """

    def link(mode: Mode, why: str) -> Link:
        return Link(source=str(source.slot), target=str(target.slot), mode=mode, why=why)

    wanted = {source.wanted, target.wanted}
    if Reach.OBJECTSTORE in wanted:
        return _by_store(link(Mode.OBJECTSTORE, "the job file says so"), has_store=has_store)
    if source.is_here and target.is_here and Reach.TUNNEL not in wanted:
        return link(Mode.DIRECT, SAME_COMPUTER)
    if shortcut is not None:
        return link(shortcut.mode, shortcut.why)
    if target.wanted is Reach.DIRECT and target.address is not None and not target.mapped:
        return link(Mode.DIRECT, f"the job file says that {target.address} can be dialled")
    ends = (source, target)
    if all(place.is_here or place.can_tunnel for place in ends):
        return link(Mode.TUNNEL, "kept by the operator: no way between them was found that works")
    lone = next(place for place in ends if not (place.is_here or place.can_tunnel))
    why = f"{lone.slot} on {lone.backend} has no port and no ssh to come in by"
    return _by_store(link(Mode.OBJECTSTORE, why), has_store=has_store)


def _by_store(link: Link, *, has_store: bool) -> Link:
    if not has_store:
        raise UnreachableError(
            f"{link.source} reaches {link.target} by an object store alone ({link.why}), and none "
            "is configured: add objectstore to refit.transports and its URL, or choose a backend "
            "with ssh"
        )
    return link


def pairs_of(places: Iterable[Place]) -> Iterator[tuple[Place, Place]]:
    """Yield who dials whom: engines fetch weights from trainers, trainers ask engines."""
    known = list(places)
    for one in known:
        for other in known:
            if {one.kind, other.kind} == {RoleKind.TRAINER, RoleKind.ROLLOUT}:
                yield one, other


def links_of(
    places: Iterable[Place], *, has_store: bool, shortcuts: Iterable[Shortcut] = ()
) -> list[Link]:
    """Return every link of a run. Raises UnreachableError for the first that cannot be."""
    known = list(places)
    found = [control_link(place) for place in known]
    ways = {(way.source, way.target): way for way in shortcuts}
    found += [
        role_link(one, other, has_store=has_store, shortcut=ways.get((one.slot, other.slot)))
        for one, other in pairs_of(known)
    ]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """What one machine's tunnel carries; a port means the same server on both its ends."""

    to_here: tuple[int, ...] = ()
    """Ports on the machine's loopback that lead to this computer's."""
    from_here: tuple[int, ...] = ()
    """Ports on this computer's loopback that lead to the machine's."""


def forwards_of(
    place: Place, *, control_port: int, ports: Mapping[Slot, Sequence[int]]
) -> Forwards:
    """Return what must be forwarded for a slot; nothing where everything is dialled directly.

    It does not depend on which machines the others have: those come and go.

    Args:
        place: whose machine it is.
        control_port: where the control service listens on this computer.
        ports: where each role's servers listen, wherever it is.
    """
    if not place.can_tunnel or (place.is_here and place.wanted is not Reach.TUNNEL):
        return Forwards()
    needs_control = control_link(place).mode is Mode.TUNNEL
    to_here = [control_port] if needs_control else []
    if place.wanted is Reach.OBJECTSTORE:
        return Forwards(to_here=tuple(to_here))
    to_here += [port for slot in sorted(ports) if slot != place.slot for port in ports[slot]]
    own = () if place.wanted is Reach.DIRECT else tuple(ports.get(place.slot, ()))
    return Forwards(to_here=tuple(to_here), from_here=own)
