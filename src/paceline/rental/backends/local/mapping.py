"""What this computer offers, and machine records as text and back. Pure and total."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UsageError
from paceline.rental.catalogue import GpuTarget, parse_target
from paceline.rental.errors import NoOffersError, ProvisionError
from paceline.rental.model import (
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
)

BACKEND = "local"
GPU_NAME = "cpu"
_OFFER_ID = re.compile(r"cpu-(0|[1-9][0-9]{0,4})(?:-([1-9][0-9]{0,3})x)?")
_INSTANCE_ID = re.compile(r"[0-9a-z][0-9a-z-]{0,63}")
_SCHEMA = 1
_LOOPBACK_MBPS = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecord:
    """What is written down about one machine, in its directory."""

    instance_id: str
    label: str
    created_at: float
    num_slots: int

    def handle(self) -> InstanceHandle:
        """Return how others name it."""
        return InstanceHandle(BACKEND, self.instance_id, self.label, self.created_at)


def offers_of(
    c: OfferConstraints, *, num_cpus: int, free_disk_gb: float, ram_gb: int
) -> list[Offer]:
    """Return one offer per CPU slot from which ``c`` can be met.

    Raises:
        NoOffersError: nothing fits; the message says which constraint it was.
    """
    target = _target_of(c.gpu_target)
    if target.count > num_cpus:
        raise NoOffersError(f"local has {num_cpus} CPU slots, {c.gpu_target} asks for more")
    if c.min_disk_gb > free_disk_gb:
        raise NoOffersError(
            f"local has {free_disk_gb:.1f} GB of free disk, {c.min_disk_gb} GB are asked for; "
            "free some or ask for less"
        )
    if c.max_dph is not None and c.max_dph < 0:
        raise NoOffersError(f"local costs nothing, max_dph {c.max_dph} is below that")
    slots = range(num_cpus - target.count + 1)
    return [_offer(slot, target, free_disk_gb=free_disk_gb, ram_gb=ram_gb) for slot in slots]


def parse_offer_id(offer_id: str, *, num_cpus: int) -> int:
    """Return how many slots an offer is for.

    Raises:
        ProvisionError: this computer never made that offer.
    """
    found = _OFFER_ID.fullmatch(offer_id)
    if found is not None:
        num_slots = int(found.group(2) or 1)
        if int(found.group(1)) + num_slots <= num_cpus:
            return num_slots
    raise ProvisionError(
        f"local has no offer {offer_id!r}; ask for offers again (cpu-0 to cpu-{num_cpus - 1})"
    )


def is_instance_id(text: str) -> bool:
    """Return whether a machine of ours could have this id; others must not become a path."""
    return _INSTANCE_ID.fullmatch(text) is not None


def render_record(record: MachineRecord) -> bytes:
    """Return the record as JSON."""
    return json.dumps(
        {
            "schema": _SCHEMA,
            "instance_id": record.instance_id,
            "label": record.label,
            "created_at": record.created_at,
            "num_slots": record.num_slots,
        }
    ).encode()


def parse_record(content: bytes) -> MachineRecord | None:
    """Return what ``render_record`` wrote, or None for anything else; never raises."""
    try:
        found = json.loads(content)
        if found["schema"] != _SCHEMA:
            return None
        return MachineRecord(
            instance_id=str(found["instance_id"]),
            label=str(found["label"]),
            created_at=float(found["created_at"]),
            num_slots=int(found["num_slots"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def status_of(
    record: MachineRecord | None, *, now_s: float, raw: Mapping[str, object]
) -> InstanceStatus:
    """Return the status of a machine that exists; one without a readable record is unknown."""
    if record is None:
        return InstanceStatus(InstanceState.UNKNOWN.value, "", 0, None, None, raw)
    return InstanceStatus(
        state=InstanceState.RUNNING.value,
        gpu_name=GPU_NAME,
        num_gpus=record.num_slots,
        uptime_s=max(0.0, now_s - record.created_at),
        public_endpoint=None,
        raw=raw,
    )


def gone_status() -> InstanceStatus:
    """Return the status of a machine that does not exist."""
    return InstanceStatus(InstanceState.DESTROYED.value, "", 0, None, None, {})


def machine_environ(
    environ: Mapping[str, str], *, interpreter_dir: Path, working_dir: Path
) -> dict[str, str]:
    """Return what the processes of a machine find in their environment.

    It is the user's own, since it is the user's own computer, except that this interpreter's
    programs come first, that relative import paths still mean what they meant, and that
    Paceline's own settings and tokens stay here.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("PACELINE_")}
    kept["PATH"] = ":".join(filter(None, (str(interpreter_dir), kept.get("PATH", "/usr/bin:/bin"))))
    if kept.get("PYTHONPATH"):
        entries = kept["PYTHONPATH"].split(":")
        kept["PYTHONPATH"] = ":".join(str(working_dir / entry) for entry in entries if entry)
    return kept


def _target_of(token: str) -> GpuTarget:
    try:
        target = parse_target(token)
    except UsageError as exc:
        raise NoOffersError(f"local: {exc}") from exc
    if target.gpu != GPU_NAME:
        raise NoOffersError(f"local has CPU slots only (cpu-1x), {token} is something else")
    return target


def _offer(slot: int, target: GpuTarget, *, free_disk_gb: float, ram_gb: int) -> Offer:
    return Offer(
        backend=BACKEND,
        id=f"cpu-{slot}" if target.count == 1 else f"cpu-{slot}-{target.count}x",
        gpu_name=GPU_NAME,
        num_gpus=target.count,
        gpu_total_ram_gb=ram_gb,
        dph=0.0,
        reliability=1.0,
        inet_down_mbps=_LOOPBACK_MBPS,
        disk_space_gb=free_disk_gb,
        geolocation="here",
        raw={"slot": slot},
    )
