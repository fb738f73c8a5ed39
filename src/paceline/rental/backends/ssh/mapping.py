"""What a host says and what that means, its lock as text, and what it is told. Pure and total.

A host is taken while a link stands at its lock's path: making a link either works or does not,
whoever else tries, and its text, which points to nothing, is the whole record of the machine.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.errors import UsageError
from paceline.rental.catalogue import parse_target
from paceline.rental.errors import NoOffersError
from paceline.rental.model import (
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
)
from paceline.rental.remote.admitted import SWEEP

BACKEND = "ssh"
TAKEN = 10
"""Exit status of the reservation when somebody else was quicker."""
SMALL_DISK = 11
_CPU = "cpu"
_SCHEMA = 1
_INSTANCE_ID = re.compile(r"([a-z0-9][a-z0-9-]{0,39})\.([0-9a-f]{8})")
_FACT = re.compile(r"^([a-z_]+)=(.*)$", re.MULTILINE)
_LOCK_CHARS_MAX = 3000
_ASSUMED_MBPS = 1000.0
_SWEEP = f"{SWEEP}sweep .ssh/authorized_keys || :\n"
"""A run that was killed half-way may have let another of its machines in here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """Who has a host, and as what."""

    instance_id: str
    label: str
    created_at: float
    operator: str
    """Whom to ask, ``user@computer``."""

    def handle(self) -> InstanceHandle:
        """Return how others name the machine."""
        return InstanceHandle(BACKEND, self.instance_id, self.label, self.created_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host said of itself."""

    lock: Lock | None
    is_locked: bool
    """Also when the lock is not ours to read."""
    disk_gb: float
    ram_gb: int
    num_gpus: int


def make_instance_id(host: str, nonce: str) -> str:
    """Return the name of a machine on ``host``."""
    return f"{host}.{nonce}"


def host_of(instance_id: str) -> str | None:
    """Return the host of a machine, None for a name that no machine of ours has."""
    found = _INSTANCE_ID.fullmatch(instance_id)
    return None if found is None else found.group(1)


def machine_dir(directory: str, instance_id: str) -> str:
    """Return where a machine's files are on its host."""
    return f"{directory.rstrip('/')}/machines/{instance_id}"


def render_lock(lock: Lock) -> str:
    """Return the lock's text. Raises UsageError where the label makes it too long for a link."""
    text = json.dumps(
        {
            "schema": _SCHEMA,
            "instance_id": lock.instance_id,
            "label": lock.label,
            "created_at": lock.created_at,
            "operator": lock.operator,
        }
    )
    if len(text) > _LOCK_CHARS_MAX:
        raise UsageError("the label is too long for a host's lock; use a shorter one")
    return text


def parse_lock(text: str) -> Lock | None:
    """Return what ``render_lock`` wrote, None for anything else; never raises."""
    try:
        found = json.loads(text)
        if found["schema"] != _SCHEMA:
            return None
        return Lock(
            instance_id=str(found["instance_id"]),
            label=str(found["label"]),
            created_at=float(found["created_at"]),
            operator=str(found["operator"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def parse_facts(output: str) -> HostFacts:
    """Return what the look script printed; what is missing or odd counts as nothing."""
    found = dict(_FACT.findall(output))
    text = found.get("lock", "")
    return HostFacts(
        lock=parse_lock(text),
        is_locked=bool(text),
        disk_gb=_number(found.get("disk_kb")) * 1024 / 1e9,
        ram_gb=int(_number(found.get("ram_kb")) * 1024 / 1e9),
        num_gpus=int(_number(found.get("gpus"))),
    )


def look_script(*, directory: str, lock: str) -> str:
    """Return the command that prints what ``parse_facts`` reads. Changes nothing."""
    where = shlex.quote(directory)
    return f"""
printf 'lock=%s\\n' "$(readlink {shlex.quote(lock)})"
there={where}
while [ ! -d "$there" ]; do there=$(dirname "$there"); done
df -Pk "$there" | awk 'NR == 2 {{ print "disk_kb=" $4 }}'
awk '/^MemTotal:/ {{ print "ram_kb=" $2 }}' /proc/meminfo
printf 'gpus=%s\\n' "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
"""


def take_script(*, directory: str, lock_path: str, lock: Lock, disk_gb: int) -> str:
    """Return the command that takes the host and makes the machine's directories.

    It exits with TAKEN, and prints whose it is, where it is taken. What an earlier machine left,
    whose owner was killed half-way, goes when the host is ours.
    """
    mine = machine_dir(directory, lock.instance_id)
    return f"""
umask 077
lock={shlex.quote(lock_path)} mine={shlex.quote(mine)}
mkdir -p {shlex.quote(directory)} || exit 1
free=$(df -Pk {shlex.quote(directory)} | awk 'NR == 2 {{ print $4 }}')
[ "$((free * 1024 / 1000000000))" -ge {disk_gb} ] || exit {SMALL_DISK}
if ! ln -sn {shlex.quote(render_lock(lock))} "$lock"; then
  [ -L "$lock" ] || exit 1
  readlink "$lock"
  exit {TAKEN}
fi
mkdir -p "$mine/workspace" "$mine/jobs" || {{ rm -f "$lock"; exit 1; }}
for other in {shlex.quote(directory.rstrip("/"))}/machines/*; do
  [ "$other" = "$mine" ] || rm -rf -- "$other"
done
{_SWEEP}"""


def close_script(*, directory: str, instance_id: str) -> str:
    """Return the command after which no new command of the machine can start."""
    mine = shlex.quote(machine_dir(directory, instance_id))
    return f"cd {mine} 2>/dev/null || exit 0; [ ! -d workspace ] || mv workspace closing"


def release_script(*, directory: str, lock_path: str, lock_text: str, instance_id: str) -> str:
    """Return the command that removes the machine's files and then, if it is still ours, its lock.

    The lock goes last: who is killed before that finds the machine and ends it again.
    """
    mine = shlex.quote(machine_dir(directory, instance_id))
    path = shlex.quote(lock_path)
    return (
        f"chmod -R u+rwX {mine} 2>/dev/null; rm -rf -- {mine} || exit 1; "
        f"{_SWEEP}"
        f'if [ "$(readlink {path})" = {shlex.quote(lock_text)} ]; then rm -f -- {path}; fi'
    )


def objection(facts: HostFacts, c: OfferConstraints, *, gpu: str, dph: float) -> str | None:
    """Return why a host does not fit, None if it does."""
    if mismatch := _mismatch(c.gpu_target, gpu):
        return mismatch
    target = parse_target(gpu)
    if target.gpu != _CPU and facts.num_gpus != target.count:
        return f"hosts.toml says {target.count} GPUs and nvidia-smi shows {facts.num_gpus}"
    if facts.is_locked:
        who = facts.lock.operator if facts.lock else "somebody"
        return f"taken by {who}" + (f" as {facts.lock.label}" if facts.lock else "")
    if facts.disk_gb < c.min_disk_gb:
        return f"has {facts.disk_gb:.0f} GB of free disk, {c.min_disk_gb} GB are asked for"
    if c.max_dph is not None and dph > c.max_dph:
        return f"costs {dph:g} $/h, the limit is {c.max_dph:g} $/h"
    return None


def is_candidate(c: OfferConstraints, gpu: str) -> bool:
    """Return whether a host with ``gpu`` is worth asking."""
    return _mismatch(c.gpu_target, gpu) is None


def offer_of(
    facts: HostFacts, c: OfferConstraints, *, name: str, address: str, dph: float
) -> Offer:
    """Return the host as an offer; a host is taken whole."""
    target = parse_target(c.gpu_target)
    return Offer(
        backend=BACKEND,
        id=name,
        gpu_name=target.gpu,
        num_gpus=target.count,
        gpu_total_ram_gb=facts.ram_gb if target.gpu == _CPU else 0,
        dph=dph,
        reliability=1.0,
        inet_down_mbps=_ASSUMED_MBPS,
        disk_space_gb=facts.disk_gb,
        geolocation=address,
        raw={"synthetic": ["reliability", "inet_down_mbps", "gpu_total_ram_gb"]},
    )


def status_of(
    lock: Lock | None, instance_id: str, *, now_s: float, endpoint: str, raw: Mapping[str, object]
) -> InstanceStatus:
    """Return the status of a machine whose host has ``lock`` now."""
    if lock is None or lock.instance_id != instance_id:
        return gone_status()
    return InstanceStatus(
        state=InstanceState.RUNNING.value,
        gpu_name=str(raw.get("gpu", "")),
        num_gpus=int(str(raw.get("num_gpus", 0))),
        uptime_s=max(0.0, now_s - lock.created_at),
        public_endpoint=endpoint,
        raw=raw,
    )


def gone_status() -> InstanceStatus:
    """Return the status of a machine that does not exist."""
    return InstanceStatus(InstanceState.DESTROYED.value, "", 0, None, None, {})


def _mismatch(asked: str, gpu: str) -> str | None:
    try:
        wanted, has = parse_target(asked), parse_target(gpu)
    except UsageError as exc:
        raise NoOffersError(f"ssh: {exc}") from exc
    fits = wanted.count <= has.count if has.gpu == _CPU else wanted.count == has.count
    return None if wanted.gpu == has.gpu and fits else f"has {gpu}, {asked} is asked for"


def _number(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
