"""What RunPod's payloads mean, both ways. Pure, and total over values that nobody has seen yet."""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from paceline.core.address import PORT_MAX, join_address
from paceline.core.errors import UsageError
from paceline.rental.answers import (
    Refusal,
    at,
    count_at,
    is_success,
    kind_of,
    number_at,
    rows_at,
    text_at,
)
from paceline.rental.catalogue import RUNPOD, Board, GpuTarget, parse_target, words_of
from paceline.rental.errors import (
    AuthError,
    CapacityError,
    GarbageError,
    NoOffersError,
    ProvisionError,
    RequestError,
)
from paceline.rental.model import (
    CredentialReport,
    DeathCause,
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
    SelfDestroyRecipe,
)

BACKEND: Final = RUNPOD
LABEL_CHARS_MAX: Final = 191
SSH_PORT: Final = 22
VOLUME_GB_MIN: Final = 10
NEWBORN_S: Final = 30.0
"""For so long after its creation a pod may be answered 404 although it is there."""

_DISK_USD_PER_GB_MONTH = 0.10
_HOURS_PER_MONTH = 720
_SYNTHETIC_RELIABILITY = 1.0
_SYNTHETIC_MBPS = 1000.0
_OFFER_ID = re.compile(r"(SECURE|COMMUNITY)/([1-9][0-9]{0,2})/([ -.0-~]{1,100})")
_INSTANCE_ID = re.compile(r"[0-9a-z][0-9a-z-]{3,63}")

# A refusal for lack of machines is a 400 like any other; only its prose tells, and it varies.
_SOLD_OUT = (
    "no capacity",
    "does not have the resources",
    "no longer any instances available",
    "out of stock",
    "no instances",
    "insufficient resources",
    "not enough free gpus",
    "spend limit",  # the account's own limit is said to look like capacity
)
_DEATHS: Final = {
    "EXITED": DeathCause.STOPPED,  # a container that ends is started again, so somebody halted it
    "ERROR": DeathCause.UNHEALTHY,
    "TERMINATED": DeathCause.DESTROYED,
}
_STATES: Final = {
    "PROVISIONING": InstanceState.LOADING,
    "STARTING": InstanceState.LOADING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.STOPPED,
    "ERROR": InstanceState.UNKNOWN,
    "TERMINATED": InstanceState.DESTROYED,
}


def judge(status: int, document: object, text: str) -> Refusal | None:
    """Return what is wrong with an answer, or None."""
    if is_success(status):
        return _graphql_refusal(document)
    detail = text_at(document, "detail") or text_at(document, "message")
    errors = at(document, "errors")
    reasons = [str(reason) for reason in errors[:5]] if isinstance(errors, list) else []
    said = "; ".join(filter(None, [detail, *reasons]))
    kind = kind_of(status)
    if status == HTTPStatus.BAD_REQUEST and _is_sold_out(said or text):
        kind = CapacityError
    # 403 is a pool that this account may not use, 400 without known prose may be anything: the
    # next candidate may do. 422 says that the body is wrong for all of them.
    is_about_offer = status in (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN)
    return Refusal(kind=kind, text=said, code=None, is_about_offer=is_about_offer)


def _graphql_refusal(document: object) -> Refusal | None:
    """Return what is wrong where GraphQL says so, which it does with status 200."""
    errors = rows_at(document, "errors")
    if not errors:
        return None
    said = text_at(errors[0], "message")
    is_key = re.search(r"unauthori[sz]ed|api key|forbidden", said, re.IGNORECASE)
    return Refusal(kind=AuthError if is_key else RequestError, text=said)


def _is_sold_out(said: str) -> bool:
    lower = said.lower()
    return any(fragment in lower for fragment in _SOLD_OUT)


def target_of(c: OfferConstraints) -> tuple[GpuTarget, dict[str, tuple[Board, ...]]]:
    """Return what is asked for and RunPod's words for it.

    Raises:
        NoOffersError: RunPod does not have such a GPU.
    """
    try:
        target = parse_target(c.gpu_target)
        return target, words_of(target, BACKEND)
    except UsageError as exc:
        raise NoOffersError(f"runpod: {exc}") from exc


def offers_of(
    rows_by_cloud: Mapping[str, Iterable[Mapping[str, object]]], c: OfferConstraints
) -> list[Offer]:
    """Return what is available now, cheapest first.

    Raises:
        NoOffersError: nothing.
    """
    target, words = target_of(c)
    found = [
        _offer(row, cloud=cloud, target=target, boards=words.get(text_at(row, "id"), ()), c=c)
        for cloud, rows in rows_by_cloud.items()
        for row in rows
    ]
    offers = {offer.id: offer for offer in found if offer is not None}
    if not offers:
        raise NoOffersError(
            f"runpod: no {target} is available in {' or '.join(rows_by_cloud)} under "
            f"{c.max_dph} $/h; try again later, or allow another cloud or backend"
        )
    return sorted(offers.values(), key=lambda offer: offer.dph)


def _offer(
    row: Mapping[str, object],
    *,
    cloud: str,
    target: GpuTarget,
    boards: tuple[Board, ...],
    c: OfferConstraints,
) -> Offer | None:
    memory_gb = number_at(row, "memory") or 0.0
    board = next((board for board in boards if board.fits_memory_mb(memory_gb * 1024)), None)
    gpu_dph = number_at(row, "price", cloud.lower())
    count_max = number_at(row, "maxCount", cloud.lower())
    if board is None or gpu_dph is None or gpu_dph <= 0:
        return None
    dph = price_of(gpu_dph * target.count, disk_gb=c.min_disk_gb)
    checks = (
        at(row, cloud.lower()) is not False,
        text_at(row, "availability").upper() not in ("", "NONE"),
        count_max is None or count_max >= target.count,
        c.max_dph is None or dph <= c.max_dph,
    )
    if not all(checks):
        return None
    places = [
        text_at(place, "id")
        for place in rows_at(row, "dataCenters")
        if text_at(place, "availability").upper() != "NONE"
    ]
    return Offer(
        backend=BACKEND,
        id=f"{cloud}/{target.count}/{text_at(row, 'id')}",
        gpu_name=board.name,
        num_gpus=target.count,
        gpu_total_ram_gb=round(memory_gb * target.count),
        dph=dph,
        reliability=_SYNTHETIC_RELIABILITY,
        inet_down_mbps=max(_SYNTHETIC_MBPS, c.min_inet_down_mbps),
        disk_space_gb=float(max(c.min_disk_gb, VOLUME_GB_MIN)),
        geolocation=", ".join(filter(None, places[:3])),
        raw={**row, "synthetic": ("reliability", "inet_down_mbps", "disk_space_gb")},
    )


def price_of(gpus_dph: float, *, disk_gb: int, container_disk_gb: int = 20) -> float:
    """Return $/h with the disks that a pod of ours has."""
    disks_gb = max(disk_gb, VOLUME_GB_MIN) + container_disk_gb
    return round(gpus_dph + disks_gb * _DISK_USD_PER_GB_MONTH / _HOURS_PER_MONTH, 6)


def create_body(  # noqa: PLR0913 - what a pod is made of
    offer_id: str,
    *,
    disk_gb: int,
    container_disk_gb: int,
    image: str,
    public_key: str,
    label: str,
    ports: Iterable[int] = (),
) -> dict[str, object]:
    """Return the body of a create call; unknown fields would be refused, so there are none.

    Raises:
        ProvisionError: RunPod would refuse it, or never made such an offer.
    """
    found = _OFFER_ID.fullmatch(offer_id)
    if found is None:
        raise ProvisionError(f"runpod has no offer {offer_id!r}; ask for offers again")
    if not 1 <= len(label) <= LABEL_CHARS_MAX:
        raise ProvisionError(
            f"runpod: a label has 1 to {LABEL_CHARS_MAX} characters, this one {len(label)}",
            is_backend_wide=True,
        )
    if not image:
        raise ProvisionError("runpod: a pod needs an image; name one", is_backend_wide=True)
    return {
        "name": label,
        "image": image,
        "cloud": found.group(1),
        "gpu": {"id": found.group(3), "count": int(found.group(2))},
        # The container's disk is wiped by a restart, which comes after every exit by itself.
        "disk": container_disk_gb,
        "mounts": {"persistent": {"size": max(disk_gb, VOLUME_GB_MIN), "path": "/workspace"}},
        # without it there is never a direct address, and the proxy has neither rsync nor scp
        "ports": ["22/tcp", *(f"{port}/tcp" for port in ports)],
        "env": {"PUBLIC_KEY": public_key, "SSH_PUBLIC_KEY": public_key},
        "startSsh": True,
    }


def is_instance_id(text: str) -> bool:
    """Return whether a pod could have this id; others must not become a path."""
    return _INSTANCE_ID.fullmatch(text) is not None


def handle_of(row: Mapping[str, object], *, now_s: float) -> InstanceHandle | None:
    """Return how a listed pod is named, or None for one that is gone or has no id."""
    pod_id = text_at(row, "id")
    if not is_instance_id(pod_id) or text_at(row, "status").upper() == "TERMINATED":
        return None
    created_s = _epoch_s(text_at(row, "createdAt"))
    created_at = now_s if created_s is None else min(created_s, now_s)
    return InstanceHandle(BACKEND, pod_id, text_at(row, "name"), created_at)


def status_of(
    row: Mapping[str, object] | None,
    h: InstanceHandle,
    *,
    now_s: float,
    ssh_user: str = "root",
    was_ended: bool = False,
) -> InstanceStatus:
    """Return the status of a pod as the provider tells it.

    None is a pod that is gone, unless it is so young that the provider may not know it yet;
    ``was_ended`` says that it knew the pod when it took our order to terminate it.
    """
    if row is None:
        is_young = abs(now_s - h.created_at) < NEWBORN_S and not was_ended
        is_newborn = is_instance_id(h.instance_id) and is_young
        state = InstanceState.LOADING if is_newborn else InstanceState.DESTROYED
        return InstanceStatus(state.value, "", 0, None, None, {})
    state = _STATES.get(text_at(row, "status").upper(), InstanceState.UNKNOWN)
    endpoint = endpoint_of(row, ssh_user=ssh_user)
    if state is InstanceState.RUNNING and endpoint is None:
        state = InstanceState.LOADING
    created_s = _epoch_s(text_at(row, "createdAt"))
    return InstanceStatus(
        state=state.value,
        gpu_name=text_at(row, "gpu", "id"),
        num_gpus=count_at(row, "gpu", "count"),
        # the provider's own uptime is coarse and starts again after a restart
        uptime_s=None if created_s is None else max(0.0, now_s - created_s),
        public_endpoint=endpoint if state is InstanceState.RUNNING else None,
        raw=dict(row),
        ports=ports_of(row),
    )


def ports_of(row: Mapping[str, object]) -> dict[int, str]:
    """Return where each TCP port of a pod is reached, as far as it is public; ssh apart."""
    found: dict[int, str] = {}
    for entry in rows_at(row, "runtime", "ports"):
        inside, outside = count_at(entry, "private"), count_at(entry, "public")
        host = text_at(entry, "ip")
        is_tcp = text_at(entry, "type") == "tcp" and inside != SSH_PORT
        if is_tcp and host and 0 < inside <= PORT_MAX and 0 < outside <= PORT_MAX:
            found[inside] = join_address(host, outside)
    return found


def failure_of(status: InstanceStatus) -> str | None:
    """Return why a pod will never run, where that shows."""
    word = text_at(status.raw, "status").upper()
    return "its status is ERROR; its logs may say why" if word == "ERROR" else None


def death_cause(status: InstanceStatus) -> DeathCause | None:
    """Return why a pod that ran does not any more, where that shows."""
    return _DEATHS.get(text_at(status.raw, "status").upper())


def endpoint_of(row: Mapping[str, object], *, ssh_user: str) -> str | None:
    """Return the direct address; the proxy can do nothing but a terminal."""
    host, port = text_at(row, "ssh", "direct", "host"), count_at(row, "ssh", "direct", "port")
    if not host or not port:
        for entry in rows_at(row, "runtime", "ports"):
            if count_at(entry, "private") == SSH_PORT and text_at(entry, "type") == "tcp":
                host, port = text_at(entry, "ip"), count_at(entry, "public")
    is_there = bool(host) and 0 < port <= PORT_MAX
    return f"ssh://{ssh_user}@{join_address(host, port)}" if is_there else None


def cost_of(rows: Iterable[Mapping[str, object]]) -> float | None:
    """Return what the books say that a pod has cost, or None without an entry."""
    amounts = [number_at(row, "totalAmount") or 0.0 for row in rows]
    return sum(amounts) if amounts else None


def log_lines(events: str, *, num_lines: int) -> str:
    """Return the lines in a text of server-sent events, oldest first."""
    lines = [
        _log_line(event.removeprefix("data:").strip())
        for event in events.splitlines()
        if event.startswith("data:")
    ]
    return "\n".join(lines[-num_lines:])


def _log_line(data: str) -> str:
    try:
        return text_at(json.loads(data), "line") or data
    except (ValueError, RecursionError):
        return data


def balance_of(account: Mapping[str, object]) -> float:
    """Return the credit left.

    Raises:
        GarbageError: the answer does not tell; 0 would be a lie.
    """
    balance_usd = number_at(account, "clientBalance")
    if balance_usd is None:
        raise GarbageError("runpod: the account was answered without a balance")
    return balance_usd


def no_key_report() -> CredentialReport:
    """Return what to do without a key."""
    return CredentialReport(
        found_in=None,
        is_valid=False,
        advice="set RUNPOD_API_KEY, or write api_key under [default] in ~/.runpod/config.toml; "
        "keys are made at https://console.runpod.io/user/settings",
    )


def report_of(account: Mapping[str, object], *, found_in: str) -> CredentialReport:
    """Return what a key that was accepted is worth."""
    balance_usd = number_at(account, "clientBalance")
    is_empty = balance_usd is not None and balance_usd <= 0
    return CredentialReport(
        found_in=found_in,
        is_valid=True,
        balance_usd=balance_usd,
        account=text_at(account, "id"),
        advice="add credit: at least one hour's price is needed to rent" if is_empty else "",
    )


def self_destroy_recipe(api_url: str) -> SelfDestroyRecipe:
    """Return how a pod ends itself with the key that each pod has for itself alone.

    The key is known to reach the API; that it may call DELETE of v2 is unverified.
    """
    return SelfDestroyRecipe(
        command=(
            "{ test -n \"$RUNPOD_API_KEY\" || export $(tr '\\0' '\\n' < /proc/1/environ | "
            "grep -E '^RUNPOD_(API_KEY|POD_ID)='); }; "
            "printf 'Authorization: Bearer %s\\n' \"$RUNPOD_API_KEY\" | "
            f"curl -fsS -m 60 -X DELETE -H @- {api_url}/v2/pods/$RUNPOD_POD_ID"
        ),
        env={},
        guarantee="Nothing bills afterwards; it needs curl in the image, the pod's own network, "
        "and that the pod's own key may delete it.",
    )


def _epoch_s(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
