"""What we keep about a machine, its label, and both as text and back. Pure."""

import json
import re
from dataclasses import asdict, dataclass
from enum import StrEnum

from paceline.core.errors import UsageError
from paceline.rental.errors import BackendError, NotProvenGoneError
from paceline.rental.lifecycle import MachineState, is_over
from paceline.rental.model import InstanceHandle, Offer

LABEL_PREFIX = "paceline-"
KEY_PREFIX = "machine/"
_SCHEMA = 1
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedOffer:
    """The part of an offer that is still of use after it was taken."""

    id: str
    gpu_name: str
    num_gpus: int
    dph: float
    """The most that it may cost, US dollars per hour for the whole machine."""
    host: str = ""
    """The box or owner behind it, where the backend tells."""
    place: str = ""
    is_spot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine on our record: for what it was rented, where, at what price, how far it is."""

    label: str
    run_id: str
    role: str
    index: int
    backend: str
    offer: RentedOffer
    state: MachineState
    intended_at: float
    """Unix seconds just before the create call; from here on it may bill."""
    instance: InstanceHandle | None = None
    """None while no answer to the create call is known."""
    ended_at: float | None = None
    """Unix seconds when it was proven that nothing bills."""
    net: str = ""
    """How fast it downloaded before it was taken, or why nobody knows; empty: nobody looked."""

    @property
    def handle(self) -> InstanceHandle:
        """How the backend names it. Raises NotProvenGoneError while only the label is known."""
        if self.instance is None:
            raise NotProvenGoneError(
                f"machine {self.label} on {self.backend} has no known id: its create call was "
                "not answered; run `paceline gc`"
            )
        return self.instance

    @property
    def key(self) -> str:
        """Where its record is in the store."""
        return f"{KEY_PREFIX}{self.run_id}/{self.label}"

    def cost_usd(self, *, now_s: float) -> float:
        """Return the price times the time in which it may have billed, by our own clock."""
        if self.state is MachineState.NEVER_CREATED:
            return 0.0
        until_s = self.ended_at if is_over(self.state) and self.ended_at is not None else now_s
        return self.offer.dph * max(0.0, until_s - self.intended_at) / 3600


class FindingKind(StrEnum):
    """What `reconcile` found out about a machine."""

    ADOPTED = "adopted"
    """Its create call was not answered, and it exists: its id is on record now."""
    NEVER_CREATED = "never_created"
    """Its create call was not answered, and nothing came of it."""
    GONE = "gone"
    """It was on record as there and does not exist any more."""
    CAME_BACK = "came_back"
    """It was thought gone and exists: it is on record again."""
    NOT_PROVEN = "not_proven"
    """Nobody can say yet whether it exists; it stays on record."""
    STRAY = "stray"
    """It bears a label of ours and is on no record here: another computer's, or lost with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that `reconcile` found."""

    kind: FindingKind
    label: str
    backend: str
    instance: InstanceHandle | None
    note: str = ""


def is_name(text: str) -> bool:
    """Return whether ``text`` can be part of a machine's label."""
    return _NAME.fullmatch(text) is not None


def make_label(*, run_id: str, role: str, index: int, nonce: str) -> str:
    """Return a label that nobody used before, legal on every provider.

    Raises:
        UsageError: run or role are not lower-case letters, digits and inner dashes.
    """
    for what, name in (("run id", run_id), ("role", role)):
        if not is_name(name):
            raise UsageError(
                f"{what} {name!r} cannot be part of a machine's label; use up to 40 lower-case "
                "letters, digits and inner dashes"
            )
    return f"{LABEL_PREFIX}{run_id}-{role}-{index}-{nonce}"


def offer_summary(offer: Offer, *, dph: float) -> RentedOffer:
    """Return the part of ``offer`` that is kept; ``dph`` is the most that it may cost."""
    return RentedOffer(
        id=offer.id,
        gpu_name=offer.gpu_name,
        num_gpus=offer.num_gpus,
        dph=float(dph),
        host=offer.host,
        place=offer.geolocation,
        is_spot=offer.is_spot,
    )


def offer_of(machine: Machine) -> Offer:
    """Return the offer that a machine was, as far as that was kept."""
    kept = machine.offer
    return Offer(
        backend=machine.backend,
        id=kept.id,
        gpu_name=kept.gpu_name,
        num_gpus=kept.num_gpus,
        gpu_total_ram_gb=0,
        dph=kept.dph,
        reliability=0.0,
        inet_down_mbps=0.0,
        disk_space_gb=0.0,
        geolocation=kept.place,
        raw={},
        host=kept.host,
        is_spot=kept.is_spot,
    )


def render_machine(machine: Machine) -> bytes:
    """Return the record as JSON; ``parse_machine`` gives an equal machine back."""
    instance = machine.instance
    return json.dumps(
        {
            "schema": _SCHEMA,
            "label": machine.label,
            "run_id": machine.run_id,
            "role": machine.role,
            "index": machine.index,
            "backend": machine.backend,
            "offer": asdict(machine.offer),
            "state": machine.state.value,
            "intended_at": machine.intended_at,
            "instance": instance
            and {"instance_id": instance.instance_id, "created_at": instance.created_at},
            "ended_at": machine.ended_at,
            "net": machine.net,
        }
    ).encode()


def parse_machine(content: bytes) -> Machine:
    """Return the machine of a record.

    Raises:
        BackendError: not a record of ours. It may stand for something that bills, so it is
            never passed over in silence.
    """
    try:
        found = json.loads(content)
        if found["schema"] != _SCHEMA:
            raise BackendError(
                f"a machine record has schema {found['schema']!r}, this Paceline reads {_SCHEMA}; "
                "use the Paceline that wrote it"
            )
        instance = found["instance"]
        return Machine(
            label=found["label"],
            run_id=found["run_id"],
            role=found["role"],
            index=found["index"],
            backend=found["backend"],
            offer=RentedOffer(**found["offer"]),
            state=MachineState(found["state"]),
            intended_at=found["intended_at"],
            instance=instance
            and InstanceHandle(
                found["backend"], instance["instance_id"], found["label"], instance["created_at"]
            ),
            ended_at=found["ended_at"],
            net=found.get("net", ""),  # records of before have none
        )
    except (ValueError, TypeError, KeyError) as exc:
        raise BackendError(
            f"a machine record cannot be read ({exc}): {content[:200]!r}; it may stand for a "
            "machine that bills, so look at the provider's own console"
        ) from exc
