"""Who can dial whom, and how it is done where that is not both: pure.

Three modes. ``direct``: the address that a server listens on is dialled. ``tunnel``: the operator
keeps an ssh connection to each machine, and an address on loopback means the same server on every
machine. ``objectstore``: nobody dials anybody, both write and read a bucket.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.core.errors import ExitStatus, PacelineError
from paceline.runs.model import Reach, RoleKind, Slot

CONTROL = "control"
"""The name of the control service among those who are dialled."""


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
        return Link(source=me, target=CONTROL, mode=Mode.DIRECT, why="same computer")
    if place.dials_control:
        return Link(source=me, target=CONTROL, mode=Mode.DIRECT, why="its address answers there")
    if place.wanted is not Reach.DIRECT and place.can_tunnel:
        return Link(source=me, target=CONTROL, mode=Mode.TUNNEL, why="cannot be dialled from there")
    raise UnreachableError(
        f"{me} on {place.backend} cannot reach the run's control service: its address does not "
        "answer from there and no tunnel is possible or allowed; set refit.listen to an address "
        "of this computer that machines reach, or use a backend with ssh and reach: auto"
    )


def role_link(source: Place, target: Place, *, has_store: bool) -> Link:
    """Return how one role reaches another role's server. Raises UnreachableError.

    Args:
        source: who dials.
        target: who listens.
        has_store: an object store is configured that both can use.
    """

    def link(mode: Mode, why: str) -> Link:
        return Link(source=str(source.slot), target=str(target.slot), mode=mode, why=why)

    wanted = {source.wanted, target.wanted}
    if Reach.OBJECTSTORE in wanted:
        return _by_store(link(Mode.OBJECTSTORE, "the job file says so"), has_store=has_store)
    if source.is_here and target.is_here and Reach.TUNNEL not in wanted:
        return link(Mode.DIRECT, "same computer")
    if target.wanted is Reach.DIRECT and target.address is not None:
        return link(Mode.DIRECT, f"the job file says that {target.address} can be dialled")
    ends = (source, target)
    if all(place.is_here or place.can_tunnel for place in ends):
        return link(Mode.TUNNEL, "through this computer; nobody can dial both ways")
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


def links_of(places: Iterable[Place], *, has_store: bool) -> list[Link]:
    """Return every link of a run. Raises UnreachableError for the first that cannot be."""
    known = list(places)
    found = [control_link(place) for place in known]
    found += [role_link(one, other, has_store=has_store) for one, other in pairs_of(known)]
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
