"""What Nebius's messages mean, both ways, as the JSON that protobuf defines for them. Pure.

Total over values that nobody has seen yet: an enum value that is not known comes as a number.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from paceline.core.address import join_address
from paceline.core.errors import UsageError
from paceline.rental.answers import Refusal, at, count_at, number_at, rows_at, text_at
from paceline.rental.catalogue import NEBIUS, Board, GpuTarget, parse_target, words_of
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
    SelfDestroyRecipe,
)

BACKEND: Final = NEBIUS
LABEL_CHARS_MAX: Final = 128
_NAME_CHARS_MAX = 63
_LABEL_TAG = "paceline-label"
_DISK_GIB_MIN = 50
"""The images of the provider want 40 GB at least."""
_SYNTHETIC_RELIABILITY = 1.0
_SYNTHETIC_MBPS = 10_000.0
_PROJECT = r"project-[a-z0-9]{3,60}"
_OFFER_ID = re.compile(rf"({_PROJECT})/([a-z0-9-]{{1,40}})/([a-z0-9-]{{1,60}})")
_INSTANCE_ID = re.compile(r"computeinstance-[a-z0-9]{3,60}")

_KINDS: Mapping[str, type[ApiError]] = {
    "UNAUTHENTICATED": AuthError,
    "PERMISSION_DENIED": AuthError,
    "NOT_FOUND": AbsentError,
    # our names are unique, so it is most likely ours: look
    "ALREADY_EXISTS": ServerError,
    "FAILED_PRECONDITION": RequestError,
    "INVALID_ARGUMENT": RequestError,
    "OUT_OF_RANGE": RequestError,
    "UNIMPLEMENTED": RequestError,
}
_DEATHS: Final = {"ERROR": DeathCause.UNHEALTHY, "DELETING": DeathCause.DESTROYED}
_STATES: Final = {
    "CREATING": InstanceState.LOADING,
    "STARTING": InstanceState.LOADING,
    "UPDATING": InstanceState.LOADING,
    "RUNNING": InstanceState.RUNNING,
    "STOPPING": InstanceState.STOPPED,
    "STOPPED": InstanceState.STOPPED,
    # DELETING is not gone yet, ERROR and UNSPECIFIED say nothing: unknown
}
_CODES = {1: "CANCELLED", 7: "PERMISSION_DENIED", 8: "RESOURCE_EXHAUSTED"}
_CODES |= {9: "FAILED_PRECONDITION", 10: "ABORTED", 13: "INTERNAL"}


def judge(code: str, text: str, status: object = None) -> Refusal:
    """Return what a gRPC status means; ``status`` is google.rpc.Status where it came along."""
    kind = _KINDS.get(code, ServerError)
    if code == "RESOURCE_EXHAUSTED":
        kind = _exhausted(text, status)
    reasons = [text_at(detail, "code") for detail in rows_at(status, "details")]
    return Refusal(kind=kind, text=" ".join(filter(None, [text, *reasons])), code=code)


def _exhausted(text: str, status: object) -> type[ApiError]:
    """Return which of three things has run out: machines, our limit, or patience."""
    details = rows_at(status, "details")
    said = " ".join([text, *(text_at(detail, "code") for detail in details)]).lower()
    checks = (
        ("not_enough_resources", "resources", CapacityError),
        ("quota_failure", "quota", BalanceError),
        ("too_many_requests", "too many", RateLimitError),
    )
    for name, _, kind in checks:
        if any(at(detail, name) is not None for detail in details):
            return kind
    return next((kind for _, word, kind in checks if word in said), CapacityError)


def operation_refusal(operation: object) -> Refusal | None:
    """Return why an operation failed, or None while it runs or when it went well."""
    code = count_at(operation, "status", "code")
    if code == 0:
        return None
    status = at(operation, "status")
    return judge(_CODES.get(code, "INTERNAL"), text_at(status, "message"), status)


def target_of(c: OfferConstraints) -> tuple[GpuTarget, dict[str, tuple[Board, ...]]]:
    """Return what is asked for and the platforms for it. Raises NoOffersError."""
    try:
        target = parse_target(c.gpu_target)
        return target, words_of(target, BACKEND)
    except UsageError as exc:
        raise NoOffersError(f"nebius: {exc}") from exc


def presets_of(
    platforms: Iterable[Mapping[str, object]], c: OfferConstraints, *, is_spot: bool
) -> list[tuple[str, str, Board]]:
    """Return platform, preset and board of everything that fits and may be had so."""
    target, words = target_of(c)
    return [
        (name, text_at(preset, "name"), words[name][0])
        for platform in platforms
        if (name := text_at(platform, "metadata", "name")) in words
        and (not is_spot or at(platform, "status", "allowed_for_preemptibles") is True)
        for preset in rows_at(platform, "spec", "presets")
        if count_at(preset, "resources", "gpu_count") == target.count
    ]


def is_exhausted(
    advice: Iterable[Mapping[str, object]],
    *,
    region: str,
    platform: str,
    preset: str,
    is_spot: bool,
) -> bool:
    """Return whether fresh advice says that there is none; no advice says nothing."""
    kind = "preemptible" if is_spot else "on_demand"
    said = [
        text_at(row, "status", kind, "availability_level")
        for row in advice
        if text_at(row, "spec", "region") == region
        and text_at(row, "spec", "compute_instance", "platform") == platform
        and preset in (text_at(row, "spec", "compute_instance", "preset", "name"), "")
        and text_at(row, "status", kind, "data_state").endswith("FRESH")
    ]
    return bool(said) and all(level.endswith("LIMIT_REACHED") for level in said)


def cost_of(estimate: object) -> float | None:
    """Return $/h of an estimate, or None where it does not tell."""
    return number_at(estimate, "hourly_cost", "general", "total", "cost")


def offer_of(
    project: Mapping[str, object],
    *,
    platform: str,
    preset: str,
    board: Board,
    dph: float,
    c: OfferConstraints,
) -> Offer:
    """Return an offer at a price that was estimated for it."""
    count = parse_target(c.gpu_target).count
    return Offer(
        backend=BACKEND,
        id=f"{text_at(project, 'metadata', 'id')}/{platform}/{preset}",
        gpu_name=board.name,
        num_gpus=count,
        gpu_total_ram_gb=board.memory_gb * count,
        dph=dph,
        reliability=_SYNTHETIC_RELIABILITY,
        inet_down_mbps=max(_SYNTHETIC_MBPS, c.min_inet_down_mbps),
        disk_space_gb=disk_gib(c.min_disk_gb) * 2**30 / 1e9,
        geolocation=region_of(project),
        raw={
            "platform": platform,
            "preset": preset,
            "synthetic": ("reliability", "inet_down_mbps", "disk_space_gb"),
        },
    )


def region_of(project: Mapping[str, object]) -> str:
    """Return the region of a project, empty where it is not known."""
    return text_at(project, "status", "region")


def sorted_offers(offers: Iterable[Offer], c: OfferConstraints) -> list[Offer]:
    """Return those within the price, cheapest first. Raises NoOffersError for none."""
    fitting = [offer for offer in offers if c.max_dph is None or offer.dph <= c.max_dph]
    if not fitting:
        raise NoOffersError(
            f"nebius: no {c.gpu_target} is to be had under {c.max_dph} $/h in the projects of this "
            "account; allow another backend, or try again later"
        )
    return sorted(fitting, key=lambda offer: offer.dph)


def disk_gib(disk_gb: float) -> int:
    """Return the size of the boot disk that holds ``disk_gb``."""
    return max(_DISK_GIB_MIN, math.ceil(disk_gb * 1e9 / 2**30))


def disk_document(project_id: str, *, disk_gb: float) -> dict[str, object]:
    """Return the request for a boot disk alone, whose price is asked apart."""
    spec = {"size_gibibytes": str(disk_gib(disk_gb)), "type": "NETWORK_SSD"}
    return {"metadata": {"parent_id": project_id, "name": "estimate"}, "spec": spec}


def parse_offer_id(offer_id: str) -> tuple[str, str, str]:
    """Return project, platform and preset. Raises ProvisionError for an offer that never was."""
    found = _OFFER_ID.fullmatch(offer_id)
    if found is None:
        raise ProvisionError(f"nebius has no offer {offer_id!r}; ask for offers again")
    return found.group(1), found.group(2), found.group(3)


def create_document(
    offer_id: str,
    *,
    disk_gb: float,
    image_family: str,
    subnet_id: str,
    user_data: str,
    label: str,
) -> dict[str, object]:
    """Return the request for a machine whose boot disk goes with it.

    Raises:
        ProvisionError: no such offer, or no such label.
    """
    project_id, platform, preset = parse_offer_id(offer_id)
    if not 1 <= len(label) <= LABEL_CHARS_MAX:
        raise ProvisionError(
            f"nebius: a label has 1 to {LABEL_CHARS_MAX} characters, this one {len(label)}",
            is_backend_wide=True,
        )
    name = name_of(label)
    disk = {
        "size_gibibytes": str(disk_gib(disk_gb)),
        "type": "NETWORK_SSD",
        "source_image_family": {"image_family": image_family},
    }
    return {
        "metadata": {"parent_id": project_id, "name": name, "labels": {_LABEL_TAG: label}},
        "spec": {
            "resources": {"platform": platform, "preset": preset},
            "network_interfaces": [
                {
                    "name": "eth0",
                    "subnet_id": subnet_id,
                    "ip_address": {},
                    "public_ip_address": {},
                }
            ],
            # managed: a disk of its own would bill on after any failure
            "boot_disk": {
                "attach_mode": "READ_WRITE",
                "managed_disk": {"name": disk_name_of(label), "spec": disk},
            },
            "cloud_init_user_data": user_data,
            # otherwise a machine that shuts itself down is started again, and billed
            "recovery_policy": "FAIL",
        },
    }


def priced_document(
    project_id: str, *, platform: str, preset: str, is_spot: bool
) -> dict[str, object]:
    """Return as much of a request for a machine as its price depends on."""
    document: dict[str, object] = {
        "metadata": {"parent_id": project_id, "name": "estimate"},
        "spec": {"resources": {"platform": platform, "preset": preset}},
    }
    return as_spot(document) if is_spot else document


def without_disk(document: Mapping[str, object]) -> dict[str, object]:
    """Return the request without its disk, whose price is asked apart."""
    spec = document["spec"]
    given = spec if isinstance(spec, Mapping) else {}
    kept = {name: value for name, value in given.items() if name != "boot_disk"}
    return {**document, "spec": kept}


def project_of(document: Mapping[str, object]) -> str:
    """Return the project that a request is for."""
    return text_at(document, "metadata", "parent_id")


def as_spot(document: Mapping[str, object]) -> dict[str, object]:
    """Return the request for a machine that may be taken back."""
    spec = document["spec"]
    given = dict(spec) if isinstance(spec, Mapping) else {}
    return {**document, "spec": {**given, "preemptible": {"on_preemption": "STOP"}}}


def name_of(label: str) -> str:
    """Return a name that is as unique as the label and not too long."""
    if len(label) <= _NAME_CHARS_MAX:
        return label
    return f"{label[:50]}-{hashlib.sha256(label.encode()).hexdigest()[:12]}"


def disk_name_of(label: str) -> str:
    """Return the name of a machine's boot disk."""
    return f"{name_of(label)[:58]}-boot"


def user_data_of(public_key: str, *, user: str) -> str:
    """Return the cloud-init text that makes the one user who may log in."""
    blob = " ".join(public_key.split()[:2])
    return (
        "#cloud-config\n"
        "users:\n"
        f"  - name: {user}\n"
        "    sudo: ALL=(ALL) NOPASSWD:ALL\n"
        "    shell: /bin/bash\n"
        f"    ssh_authorized_keys:\n      - {blob}\n"
    )


def image_family_of(image: str, default: str) -> str:
    """Return the image family; a container image means nothing to a virtual machine."""
    kind, _, name = image.partition(":")
    return name if kind == "family" and name else default


def subnet_of(rows: Iterable[Mapping[str, object]]) -> str | None:
    """Return the subnet that machines go into: the default one, else the first."""
    names = [(text_at(row, "metadata", "name"), text_at(row, "metadata", "id")) for row in rows]
    names.sort(key=lambda pair: not pair[0].startswith("default-subnet"))
    return names[0][1] if names else None


def is_instance_id(text: str) -> bool:
    """Return whether a machine could have this id."""
    return _INSTANCE_ID.fullmatch(text) is not None


def label_of(row: Mapping[str, object]) -> str:
    """Return a machine's label: the tag, or the name of one that we did not make."""
    return text_at(row, "metadata", "labels", _LABEL_TAG) or text_at(row, "metadata", "name")


def handle_of(row: Mapping[str, object], *, now_s: float) -> InstanceHandle | None:
    """Return how a listed machine is named, or None for a row without an id."""
    instance_id = text_at(row, "metadata", "id")
    if not is_instance_id(instance_id):
        return None
    created_s = _epoch_s(text_at(row, "metadata", "created_at"))
    return InstanceHandle(
        BACKEND, instance_id, label_of(row), now_s if created_s is None else created_s
    )


def status_of(
    row: Mapping[str, object] | None,
    *,
    now_s: float,
    ssh_user: str = "ubuntu",
    ssh_port: int = 22,
) -> InstanceStatus:
    """Return the status of a machine as the provider tells it; None is one that is gone."""
    if row is None:
        return InstanceStatus(InstanceState.DESTROYED.value, "", 0, None, None, {})
    state = _state(row)
    address = _address(row)
    if state is InstanceState.RUNNING and not address:
        state = InstanceState.LOADING
    created_s = _epoch_s(text_at(row, "metadata", "created_at"))
    preset = text_at(row, "spec", "resources", "preset")
    width = re.match(r"([0-9]+)gpu-", preset)
    endpoint = f"ssh://{ssh_user}@{join_address(address, ssh_port)}"
    return InstanceStatus(
        state=state.value,
        gpu_name=text_at(row, "spec", "resources", "platform"),
        num_gpus=int(width.group(1)) if width else 0,
        uptime_s=None if created_s is None else max(0.0, now_s - created_s),
        public_endpoint=endpoint if state is InstanceState.RUNNING else None,
        raw=dict(row),
    )


def _state(row: Mapping[str, object]) -> InstanceState:
    word = text_at(row, "status", "state")
    if word == "STOPPED" and at(row, "status", "reconciling") is True:
        return InstanceState.LOADING  # the first state of a new machine
    return _STATES.get(word, InstanceState.UNKNOWN)


def _address(row: Mapping[str, object]) -> str:
    for interface in rows_at(row, "status", "network_interfaces"):
        address = text_at(interface, "public_ip_address", "address").partition("/")[0]
        if address:
            return address
    return ""


def failure_of(status: InstanceStatus) -> str | None:
    """Return why a machine that is to start never will, where that shows.

    Lack of capacity can come after the create was accepted: it stops without having run.
    """
    word = text_at(status.raw, "status", "state")
    if word == "STOPPED" and status.state == InstanceState.STOPPED:
        return "it stopped instead of starting, most likely for lack of capacity or quota"
    return f"its state is {word}" if word in ("ERROR", "DELETING") else None


def death_cause(status: InstanceStatus, *, is_spot: bool) -> DeathCause | None:
    """Return why a machine that ran does not any more, where that shows."""
    word = text_at(status.raw, "status", "state")
    if word in ("STOPPED", "STOPPING"):  # how a preemption looks; there is no other word for it
        return DeathCause.PREEMPTED if is_spot else DeathCause.STOPPED
    return DeathCause.DESTROYED if status.state == InstanceState.DESTROYED else _DEATHS.get(word)


def is_going(status: InstanceStatus | None) -> bool:
    """Return whether it is being deleted already; a second order would be refused."""
    return status is not None and text_at(status.raw, "status", "state") == "DELETING"


def no_key_report() -> CredentialReport:
    """Return what to do without credentials."""
    return CredentialReport(
        found_in=None,
        is_valid=False,
        advice="set NEBIUS_IAM_TOKEN to what `nebius iam get-access-token` prints, or put a "
        "service account's credentials into ~/.nebius/credentials.json",
    )


def self_destroy_recipe() -> SelfDestroyRecipe:
    """Return how a machine halts itself; to delete itself it would need the account's token."""
    return SelfDestroyRecipe(
        command="sudo -n shutdown -h now",
        env={},
        guarantee="The machine stops and stays stopped; its boot disk bills on until it is torn "
        "down from outside, and that a stopped machine's GPUs do not bill is unverified.",
    )


def _epoch_s(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
