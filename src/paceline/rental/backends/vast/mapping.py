"""What Vast's payloads mean, both ways. Pure, and total over values that nobody has seen yet."""

import re
from collections.abc import Iterable, Mapping
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
from paceline.rental.catalogue import VAST, Board, parse_target, words_of
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

BACKEND: Final = VAST
DISK_GB_MIN: Final = 8
LABEL_CHARS_MAX: Final = 256
DAY_S: Final = 86_400.0
_HOURS_PER_MONTH = 720
_OFFER_ID = re.compile(r"[0-9]{1,18}")

_KEY_TROUBLE = re.compile(
    r"user key|auth_error|session expired|log in again|api key", re.IGNORECASE
)
_NO_CREDIT = re.compile(r"missing_billing|\bcredit|\bbalance", re.IGNORECASE)
"""The code for an empty account is not known for sure; missing_billing is, on a start."""

# First those that pass by themselves, then those that do not; both seen in status_msg.
_PASSING = (
    "retrying",
    "downloading",
    "extracting",
    "verifying checksum",
    "download complete",
    "pull complete",
    "waiting",
)
_FATAL = (
    "error pulling image",
    "oci runtime create failed",
    "failed to start containers",
    "error response from daemon",
    "manifest unknown",
    "repository does not exist",
    "no such image",
    "pull access denied",
)
_STATES: Final = {
    "": InstanceState.LOADING,  # a contract; the host has not reported yet
    "loading": InstanceState.LOADING,
    "created": InstanceState.LOADING,
    "running": InstanceState.RUNNING,
    "exited": InstanceState.STOPPED,
    "stopped": InstanceState.STOPPED,
    # offline, unknown, frozen, scheduling and whatever comes next are unknown
}


def judge(status: int, document: object, text: str) -> Refusal | None:
    """Return what is wrong with an answer, or None.

    A status alone says little here: a bad key is often a 404, and 200 may mean failure.
    """
    code = text_at(document, "error")
    message = next(
        (found for name in ("msg", "message", "detail") if (found := text_at(document, name))), ""
    )
    if is_success(status) and at(document, "success") is not False:
        return None
    kind = _kind(status, code, f"{code} {message}" if document is not None else text[:500])
    return Refusal(
        kind=kind,
        text=message or code,
        code=code or None,
        # an unexplained "no" to one offer says nothing about the next
        is_about_offer=kind is RequestError and is_success(status),
    )


def _kind(status: int, code: str, said: str) -> type[ApiError]:
    by_status = kind_of(status)
    if by_status in (RateLimitError, ServerError):
        return by_status
    is_not_ours = status == HTTPStatus.FORBIDDEN and code == "invalid_args"
    checks = (
        (_KEY_TROUBLE.search(said) is not None, AuthError),
        ("no_such_ask" in said or is_not_ours, CapacityError),
        (code in ("no_such_instance", "not_found", "invalid_id"), AbsentError),
        (_NO_CREDIT.search(said) is not None, BalanceError),
        # A 404 that does not say what is missing may come from anything on the way.
        (by_status is AbsentError, ServerError),
    )
    return next((kind for is_so, kind in checks if is_so), by_status)


def query_of(
    c: OfferConstraints, *, is_spot: bool, num_offers_max: int, filters: Mapping[str, object]
) -> dict[str, object]:
    """Return the search for what ``c`` asks.

    Raises:
        NoOffersError: Vast does not have such a GPU.
    """
    words = _words(c)
    boards = [board for found in words.values() for board in found]
    query: dict[str, object] = {
        "gpu_name": {"in": sorted(words)},
        "num_gpus": {"eq": parse_target(c.gpu_target).count},
        # MiB per GPU; the band itself is checked on what comes back
        "gpu_ram": {"gte": min(board.memory_gb for board in boards) * 1024 * 0.93},
        "disk_space": {"gte": max(c.min_disk_gb, DISK_GB_MIN)},
        "inet_down": {"gte": c.min_inet_down_mbps},
        "reliability2": {"gte": c.min_reliability},
        "duration": {"gte": c.min_duration_days * DAY_S},
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "external": {"eq": False},
        **filters,
        "order": [["dph_total", "asc"]],
        "type": "bid" if is_spot else "on-demand",
        "limit": num_offers_max,
        "allocated_storage": float(max(c.min_disk_gb, DISK_GB_MIN)),
    }
    return query


def offers_of(
    rows: Iterable[Mapping[str, object]], c: OfferConstraints, *, is_spot: bool = False
) -> list[Offer]:
    """Return the offers that really fit, cheapest first; rows that make no sense are left out.

    Raises:
        NoOffersError: none does.
    """
    words = _words(c)
    found = [_offer(row, words, c, is_spot=is_spot) for row in rows]
    offers = {offer.id: offer for offer in found if offer is not None}
    if not offers:
        price = "any price" if c.max_dph is None else f"a price up to {c.max_dph:g} $/h"
        raise NoOffersError(
            f"vast: no machine for {c.gpu_target} with {c.min_disk_gb} GB of disk, "
            f"{c.min_inet_down_mbps} Mbit/s, reliability {c.min_reliability} and {price} "
            "is on offer; relax one of them or try again later"
        )
    return sorted(offers.values(), key=lambda offer: offer.dph)


def _offer(
    row: Mapping[str, object],
    words: Mapping[str, tuple[Board, ...]],
    c: OfferConstraints,
    *,
    is_spot: bool,
) -> Offer | None:
    disk_gb = max(c.min_disk_gb, DISK_GB_MIN)
    memory_mb = number_at(row, "gpu_ram") or 0.0
    boards = words.get(text_at(row, "gpu_name").replace("_", " "), ())
    board = next((board for board in boards if board.fits_memory_mb(memory_mb)), None)
    dph = price_of(row, disk_gb=disk_gb, is_spot=is_spot)
    count = count_at(row, "num_gpus")
    disk_space_gb = number_at(row, "disk_space") or 0.0
    checks = (
        board is not None,
        _OFFER_ID.fullmatch(text_at(row, "id")) is not None,
        count == parse_target(c.gpu_target).count,
        disk_space_gb >= disk_gb,
        dph is not None and dph >= 0 and (c.max_dph is None or dph <= c.max_dph),
    )
    if not all(checks) or board is None or dph is None:
        return None
    return Offer(
        backend=BACKEND,
        id=text_at(row, "id"),
        gpu_name=board.name,
        num_gpus=count,
        gpu_total_ram_gb=round(memory_mb * count / 1024),
        dph=dph,
        reliability=number_at(row, "reliability2") or number_at(row, "reliability") or 0.0,
        inet_down_mbps=number_at(row, "inet_down") or 0.0,
        disk_space_gb=disk_space_gb,
        geolocation=text_at(row, "geolocation").strip(", "),
        raw=dict(row),
        host=text_at(row, "machine_id"),
    )


def price_of(row: Mapping[str, object], *, disk_gb: float, is_spot: bool) -> float | None:
    """Return $/h for the whole machine with the disk asked for, or None where it is not told."""
    base = number_at(row, "dph_base")
    storage = number_at(row, "storage_cost")
    if base is None or storage is None:
        return number_at(row, "dph_total")
    if is_spot:
        base = max(base, number_at(row, "min_bid") or 0.0)
    return round(base + storage * disk_gb / _HOURS_PER_MONTH, 6)


def create_body(
    *,
    disk_gb: int,
    image: str,
    public_key: str,
    label: str,
    max_dph: float | None,
    ports: Iterable[int] = (),
) -> dict[str, object]:
    """Return the body of a create call; with ``max_dph`` it is a bid.

    Raises:
        ProvisionError: Vast would refuse it.
    """
    if not 1 <= len(label) <= LABEL_CHARS_MAX:
        raise ProvisionError(
            f"vast: a label has 1 to {LABEL_CHARS_MAX} characters, this one {len(label)}",
            is_backend_wide=True,
        )
    if not image:
        raise ProvisionError("vast: a machine needs an image; name one", is_backend_wide=True)
    body: dict[str, object] = {
        "client_id": "me",
        "image": image,
        "disk": max(disk_gb, DISK_GB_MIN),
        "label": label,
        "runtype": "ssh_direct",
        "target_state": "running",
        "env": {f"-p {port}:{port}": "1" for port in ports},
        "onstart": onstart_of(public_key),
        # rather no machine than one that waits, stopped and billed, for its GPUs
        "cancel_unavail": True,
    }
    if max_dph is not None:
        body["price"] = min(max(round(max_dph, 4), 0.001), 128.0)
    return body


def onstart_of(public_key: str) -> str:
    """Return what the container runs when it starts.

    The key goes in here and by an attach call: Vast rewrites the authorized keys after some
    hours, and then only attached ones stay. Logins land in tmux unless told otherwise. The
    variables with which a machine may end itself are missing in ssh sessions.
    """
    blob = " ".join(public_key.split()[:2])
    return (
        "touch ~/.no_auto_tmux; mkdir -p ~/.ssh /workspace; chmod 700 ~/.ssh; "
        f"echo '{blob}' >> ~/.ssh/authorized_keys; chmod 600 ~/.ssh/authorized_keys; "
        "env | grep -E '^CONTAINER_(ID|API_KEY)=' >> /etc/environment"
    )


def check_offer_id(offer_id: str) -> str:
    """Return it. Raises ProvisionError if Vast never made such an offer."""
    if _OFFER_ID.fullmatch(offer_id) is None:
        raise ProvisionError(f"vast has no offer {offer_id!r}; ask for offers again")
    return offer_id


def is_instance_id(text: str) -> bool:
    """Return whether a machine could have this id; others must not become a path."""
    return _OFFER_ID.fullmatch(text) is not None


def created_id(document: object) -> str | None:
    """Return the id in the answer to a create call, also in one that says no.

    A bid that is too low is refused and leaves a stopped machine behind, named in the refusal.
    """
    found = text_at(document, "new_contract")
    return found if is_instance_id(found) else None


def handle_of(row: Mapping[str, object], *, now_s: float) -> InstanceHandle | None:
    """Return how a listed machine is named, or None for a row without an id."""
    instance_id = text_at(row, "id")
    if not is_instance_id(instance_id):
        return None
    started_s = number_at(row, "start_date")
    return InstanceHandle(
        BACKEND, instance_id, text_at(row, "label"), now_s if started_s is None else started_s
    )


def status_of(
    row: Mapping[str, object] | None, *, now_s: float, ssh_user: str = "root"
) -> InstanceStatus:
    """Return the status of a machine as the provider tells it; None is one that is gone."""
    if row is None:
        return InstanceStatus(InstanceState.DESTROYED.value, "", 0, None, None, {})
    endpoint = endpoint_of(row, ssh_user=ssh_user)
    state = _state(row)
    if state is InstanceState.RUNNING and endpoint is None:
        state = InstanceState.LOADING
    started_s = number_at(row, "start_date")
    return InstanceStatus(
        state=state.value,
        gpu_name=text_at(row, "gpu_name"),
        num_gpus=count_at(row, "num_gpus"),
        uptime_s=None if started_s is None else max(0.0, now_s - started_s),
        public_endpoint=endpoint if state is InstanceState.RUNNING else None,
        raw=dict(row),
        ports=ports_of(row),
    )


def ports_of(row: Mapping[str, object]) -> dict[int, str]:
    """Return where each TCP port of a machine is reached, by the provider's map; ssh apart."""
    host = text_at(row, "public_ipaddr")
    found: dict[int, str] = {}
    published = at(row, "ports")
    for name in published if isinstance(published, Mapping) and host else ():
        inside, _, kind = str(name).partition("/")
        places = rows_at(row, "ports", str(name))
        outside = count_at(places[0], "HostPort") if places else 0
        if kind == "tcp" and inside.isdecimal() and inside != "22" and 0 < outside <= PORT_MAX:
            found[int(inside)] = join_address(host, outside)
    return found


def _state(row: Mapping[str, object]) -> InstanceState:
    if is_stopped_for_good(row):
        return InstanceState.STOPPED
    actual = at(row, "actual_status")
    if actual is not None and not isinstance(actual, str):
        return InstanceState.UNKNOWN
    return _STATES.get((actual or "").strip().lower(), InstanceState.UNKNOWN)


def is_stopped_for_good(row: Mapping[str, object]) -> bool:
    """Return whether nobody means it to run again; for a bid that is being outbid."""
    names = ("cur_state", "intended_status", "next_state")
    return all(text_at(row, name).lower() == "stopped" for name in names)


def failure_of(status: InstanceStatus) -> str | None:
    """Return why a machine will never run, where that shows; only ``status_msg`` tells."""
    if status.state == InstanceState.STOPPED and is_stopped_for_good(status.raw):
        return "it is stopped for good; a bid may have been too low"
    message = text_at(status.raw, "status_msg")
    said = message.lower()
    is_starting = text_at(status.raw, "actual_status").lower() in ("", "loading", "created")
    if not is_starting or any(fragment in said for fragment in _PASSING):
        return None
    return message[:300] if any(fragment in said for fragment in _FATAL) else None


def death_cause(status: InstanceStatus, *, is_spot: bool) -> DeathCause | None:
    """Return why a machine that ran does not any more, where that shows."""
    word = text_at(status.raw, "actual_status").lower()
    if is_stopped_for_good(status.raw):
        return DeathCause.OUTBID if is_spot else DeathCause.STOPPED
    if word in ("offline", "unknown"):
        return DeathCause.HOST_LOST
    if word == "exited":  # the container ended although it is meant to run
        return DeathCause.UNHEALTHY
    # a bid that loses is stopped, not destroyed
    return DeathCause.DESTROYED if status.state == InstanceState.DESTROYED else None


def endpoint_of(row: Mapping[str, object], *, ssh_user: str) -> str | None:
    """Return the direct address where there is one, else the proxy's."""
    host = text_at(row, "public_ipaddr")
    published = rows_at(row, "ports", "22/tcp")
    port = count_at(published[0], "HostPort") if published else 0
    if not host or not port:
        host, port = text_at(row, "ssh_host"), count_at(row, "ssh_port")
        if "jupyter" in text_at(row, "image_runtype"):
            port += 1  # the proxy's ssh is one above what the record says
    is_there = bool(host) and 0 < port <= PORT_MAX
    return f"ssh://{ssh_user}@{join_address(host, port)}" if is_there else None


def cost_of(rows: Iterable[Mapping[str, object]], instance_id: str) -> float | None:
    """Return what the books say that a machine has cost, or None without an entry."""
    amounts = [
        number_at(row, "amount") or 0.0
        for row in rows
        if text_at(row, "source") == f"instance-{instance_id}"
    ]
    return sum(amounts) if amounts else None


def _words(c: OfferConstraints) -> dict[str, tuple[Board, ...]]:
    try:
        return words_of(parse_target(c.gpu_target), BACKEND)
    except UsageError as exc:
        raise NoOffersError(f"vast: {exc}") from exc


def balance_of(user: Mapping[str, object]) -> float:
    """Return the credit left; one of two fields has it."""
    credit = number_at(user, "credit")
    return credit if credit is not None else number_at(user, "balance") or 0.0


def no_key_report() -> CredentialReport:
    """Return what to do without a key."""
    return CredentialReport(
        found_in=None,
        is_valid=False,
        advice="set VAST_API_KEY, or write the key to ~/.config/vastai/vast_api_key; keys are "
        "made at https://cloud.vast.ai/manage-keys/",
    )


def report_of(user: Mapping[str, object], *, found_in: str) -> CredentialReport:
    """Return what a key that was accepted is worth."""
    balance_usd = balance_of(user)
    return CredentialReport(
        found_in=found_in,
        is_valid=True,
        balance_usd=balance_usd,
        account=text_at(user, "email") or text_at(user, "id"),
        advice="" if balance_usd > 0 else "add credit: without it nothing can be rented",
    )


def self_destroy_recipe(api_url: str) -> SelfDestroyRecipe:
    """Return how a machine ends itself with the key that each container has for itself alone."""
    return SelfDestroyRecipe(
        command=(
            "if [ -r /etc/environment ]; then set -a; . /etc/environment; set +a; fi; "
            "printf 'Authorization: Bearer %s\\n' \"$CONTAINER_API_KEY\" | "
            f"curl -fsS -m 60 -X DELETE -H @- {api_url}/api/v0/instances/$CONTAINER_ID/"
        ),
        env={},
        guarantee="Nothing bills afterwards; it needs curl in the image and the container's own "
        "network.",
    )
