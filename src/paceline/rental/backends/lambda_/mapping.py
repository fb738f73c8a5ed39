"""What Lambda's payloads mean, both ways. Pure, and total over values that nobody has seen yet."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Final

from paceline.core.address import join_address
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
from paceline.rental.catalogue import LAMBDA, Board, lambda_types, lambda_width, parse_target
from paceline.rental.errors import (
    AbsentError,
    ApiError,
    AuthError,
    BalanceError,
    CapacityError,
    NoOffersError,
    ProvisionError,
    RateLimitError,
    RequestError,
    ServerError,
)
from paceline.rental.model import (
    CredentialReport,
    DeathCause,
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
)

BACKEND: Final = LAMBDA
LABEL_CHARS_MAX: Final = 128
_NAME_CHARS_MAX = 64
_LABEL_TAG = "paceline-label"
_CREATED_TAG = "paceline-created"
"""Unix seconds: the API tells of no time at all."""
_SYNTHETIC_RELIABILITY = 1.0
_SYNTHETIC_MBPS = 10_000.0
_OFFER_ID = re.compile(r"([a-z0-9-]{1,40})/(gpu_[a-z0-9_]{1,60})")
_INSTANCE_ID = re.compile(r"[0-9a-f]{32}")

_KINDS: Mapping[str, type[ApiError]] = {
    "global/invalid-api-key": AuthError,
    "global/account-inactive": AuthError,
    "global/invalid-address": RequestError,
    "global/object-does-not-exist": AbsentError,
    "global/quota-exceeded": BalanceError,
    "instance-operations/launch/insufficient-capacity": CapacityError,
    "instance-operations/launch/file-system-in-wrong-region": CapacityError,
    # their statuses are unverified, their meaning is not: the provider failed on its side
    "global/internal-error": ServerError,
    "global/unknown": ServerError,
    "provider/internal-unavailable": ServerError,
}
_DEATHS: Final = {
    "preempted": DeathCause.PREEMPTED,
    "unhealthy": DeathCause.UNHEALTHY,
    "terminating": DeathCause.DESTROYED,
    "terminated": DeathCause.DESTROYED,
}
_STATES: Final = {
    "booting": InstanceState.LOADING,
    "active": InstanceState.RUNNING,
    "terminated": InstanceState.DESTROYED,
    "preempted": InstanceState.DESTROYED,
    # unhealthy is a failure; terminating is not gone yet: both are unknown
}


def judge(status: int, document: object, text: str) -> Refusal | None:
    """Return what is wrong with an answer, or None. The code decides, where there is one."""
    if is_success(status):
        return None
    code = text_at(document, "error", "code")
    said = " ".join(
        filter(None, (text_at(document, "error", name) for name in ("message", "suggestion")))
    )
    kind = _KINDS.get(code, kind_of(status))
    if document is None and "1015" in text:
        kind = RateLimitError  # the limit is kept by the network in front, in its own words
    return Refusal(kind=kind, text=said, code=code or None)


def offers_of(types: Mapping[str, object], c: OfferConstraints) -> list[Offer]:
    """Return an offer per type and region that says it has some, cheapest first.

    What is listed is refused now and then at launch, and the other way round.

    Raises:
        NoOffersError: none.
    """
    try:
        wanted = lambda_types(parse_target(c.gpu_target))
    except UsageError as exc:
        raise NoOffersError(f"lambda: {exc}") from exc
    offers = [
        offer
        for name, board in wanted.items()
        for region in rows_at(types, name, "regions_with_capacity_available")
        if (offer := _offer(types.get(name), name, board, region, c)) is not None
    ]
    if not offers:
        raise NoOffersError(
            f"lambda: none of {', '.join(wanted)} with {c.min_disk_gb} GB of disk under "
            f"{c.max_dph} $/h has capacity now; capacity comes and goes within minutes"
        )
    return sorted(offers, key=lambda offer: offer.dph)


def _offer(
    entry: object, name: str, board: Board, region: Mapping[str, object], c: OfferConstraints
) -> Offer | None:
    cents = number_at(entry, "instance_type", "price_cents_per_hour")
    storage_gib = number_at(entry, "instance_type", "specs", "storage_gib") or 0.0
    disk_gb = storage_gib * 2**30 / 1e9
    place = text_at(region, "name")
    width = lambda_width(name) or 0
    if cents is None or cents <= 0 or _OFFER_ID.fullmatch(f"{place}/{name}") is None:
        return None
    dph = cents / 100
    if disk_gb < c.min_disk_gb or (c.max_dph is not None and dph > c.max_dph):
        return None
    facts = entry if isinstance(entry, Mapping) else {}
    return Offer(
        backend=BACKEND,
        id=f"{place}/{name}",
        gpu_name=board.name,
        num_gpus=width,
        gpu_total_ram_gb=board.memory_gb * width,
        dph=dph,
        reliability=_SYNTHETIC_RELIABILITY,
        inet_down_mbps=max(_SYNTHETIC_MBPS, c.min_inet_down_mbps),
        disk_space_gb=disk_gb,
        geolocation=place,
        raw={
            **facts,
            "synthetic": ("reliability", "inet_down_mbps"),
            "architecture": "arm64" if board.is_arm else "x86_64",
        },
    )


def launch_body(
    offer_id: str, *, image: str, key_name: str, label: str, now_s: float
) -> dict[str, object]:
    """Return the body of a launch.

    ``image`` counts where it is ``family:NAME`` or ``id:ID``, Lambda's own images; a container
    image means nothing to a virtual machine, which then gets Lambda's default.

    Raises:
        ProvisionError: Lambda would refuse it, or never made such an offer.
    """
    region, type_name = parse_offer_id(offer_id)
    if not 1 <= len(label) <= LABEL_CHARS_MAX:
        raise ProvisionError(
            f"lambda: a label has 1 to {LABEL_CHARS_MAX} characters, this one {len(label)}",
            is_backend_wide=True,
        )
    body: dict[str, object] = {
        "region_name": region,
        "instance_type_name": type_name,
        "ssh_key_names": [key_name],
        "name": label[:_NAME_CHARS_MAX],
        "tags": [
            {"key": _LABEL_TAG, "value": label},
            {"key": _CREATED_TAG, "value": f"{now_s:.3f}"},
        ],
    }
    kind, _, name = image.partition(":")
    if kind in ("family", "id") and name:
        body["image"] = {kind: name}
    return body


def parse_offer_id(offer_id: str) -> tuple[str, str]:
    """Return region and type. Raises ProvisionError for an offer that never was."""
    found = _OFFER_ID.fullmatch(offer_id)
    if found is None:
        raise ProvisionError(f"lambda has no offer {offer_id!r}; ask for offers again")
    return found.group(1), found.group(2)


def key_name_of(blob: str) -> str:
    """Return the name under which a key is registered: the same key has the same name."""
    return f"paceline-{hashlib.sha256(blob.encode()).hexdigest()[:12]}"


def is_instance_id(text: str) -> bool:
    """Return whether a machine could have this id; others must not become a path."""
    return _INSTANCE_ID.fullmatch(text) is not None


def label_of(row: Mapping[str, object]) -> str:
    """Return a machine's label: its name, or the tag where that goes on after the name ends."""
    name = text_at(row, "name")
    tag = _tag(row, _LABEL_TAG)
    return tag if len(name) == _NAME_CHARS_MAX and tag.startswith(name) else name


def _tag(row: Mapping[str, object], key: str) -> str:
    tags = rows_at(row, "tags")
    return next((text_at(tag, "value") for tag in tags if text_at(tag, "key") == key), "")


def handle_of(row: Mapping[str, object], *, now_s: float) -> InstanceHandle | None:
    """Return how a listed machine is named, or None for one that is gone or has no id."""
    instance_id = text_at(row, "id")
    if not is_instance_id(instance_id) or _state(row) is InstanceState.DESTROYED:
        return None
    created_s = number_at({"at": _tag(row, _CREATED_TAG)}, "at")
    return InstanceHandle(
        BACKEND, instance_id, label_of(row), now_s if created_s is None else created_s
    )


def status_of(
    row: Mapping[str, object] | None,
    h: InstanceHandle,
    *,
    now_s: float,
    ssh_user: str = "ubuntu",
    ssh_port: int = 22,
) -> InstanceStatus:
    """Return the status of a machine as the provider tells it; None is one that is gone."""
    if row is None:
        return InstanceStatus(InstanceState.DESTROYED.value, "", 0, None, None, {})
    state = _state(row)
    address = text_at(row, "ip")
    if state is InstanceState.RUNNING and not address:
        state = InstanceState.LOADING
    type_name = text_at(row, "instance_type", "name")
    is_running = state is InstanceState.RUNNING
    endpoint = f"ssh://{ssh_user}@{join_address(address, ssh_port)}"
    return InstanceStatus(
        state=state.value,
        gpu_name=text_at(row, "instance_type", "gpu_description"),
        num_gpus=count_at(row, "instance_type", "specs", "gpus") or lambda_width(type_name) or 0,
        # by our own clock: the provider tells no times
        uptime_s=max(0.0, now_s - h.created_at),
        public_endpoint=endpoint if is_running else None,
        raw=dict(row),
    )


def _state(row: Mapping[str, object]) -> InstanceState:
    return _STATES.get(text_at(row, "status").lower(), InstanceState.UNKNOWN)


def failure_of(status: InstanceStatus) -> str | None:
    """Return why a machine will never run, where that shows."""
    word = text_at(status.raw, "status").lower()
    return f"its status is {word}" if word in ("unhealthy", "terminating") else None


def death_cause(status: InstanceStatus) -> DeathCause | None:
    """Return why a machine that ran does not any more, where that shows."""
    return _DEATHS.get(text_at(status.raw, "status").lower())


def is_terminating(status: InstanceStatus | None) -> bool:
    """Return whether it goes already: telling it again has been answered global/unknown."""
    return status is not None and text_at(status.raw, "status").lower() == "terminating"


def key_blob(public_key: str) -> str:
    """Return the part of a public key that identifies it: type and data, without the comment."""
    return " ".join(public_key.split()[:2])


def key_names(rows: Iterable[Mapping[str, object]], blob: str) -> list[str]:
    """Return the names under which a key is registered already."""
    return [
        text_at(row, "name")
        for row in rows
        if key_blob(text_at(row, "public_key")) == blob and text_at(row, "name")
    ]


def is_duplicate(failure: RequestError) -> bool:
    """Return whether a key was refused because its name is taken: somebody was quicker."""
    said = f"{failure.code} {at(failure.document, 'error', 'message')}".lower()
    return "duplicate" in said or "must be unique" in said


def no_key_report() -> CredentialReport:
    """Return what to do without a key."""
    return CredentialReport(
        found_in=None,
        is_valid=False,
        advice="set LAMBDA_API_KEY, or write `api_key = ...` to ~/.lambda_cloud/lambda_keys; keys "
        "are made at https://cloud.lambda.ai/api-keys",
    )
