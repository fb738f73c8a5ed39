"""One create call at a provider, the same for all: keys, ambiguity, what an error means."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.rental.errors import (
    AmbiguousError,
    ApiError,
    AuthError,
    BackendError,
    BalanceError,
    NoAnswerError,
    ProvisionError,
    RequestError,
)
from paceline.rental.model import InstanceHandle

_KEY_BYTES_MAX = 16_384
_PUBLIC_KEY = re.compile(r"(?:ssh|ecdsa|sk)-[a-z0-9@.-]{1,60} ([A-Za-z0-9+/]{4,8192}={0,3})( .*)?")
SETTLE_S = 30.0
"""How long a create call without an answer is looked for; RunPod lists late by seconds."""
_LOOK_INTERVAL_S = 3.0


class Listing(Protocol):
    """Whatever lists machines by label."""

    def __call__(self, *, label_prefix: str) -> list[InstanceHandle]:
        """Return the machines whose label starts so."""
        ...


def create(
    call: Callable[[], InstanceHandle],
    *,
    label: str,
    listing: Listing,
    clock: Clock,
    settle_s: float,
) -> InstanceHandle:
    """Make one create call; where its outcome is unknown, look for ``label`` before giving up.

    Raises:
        ProvisionError: nothing was created, or ``leaked`` was.
        AmbiguousError: nothing under the label is listed after ``settle_s``, which is no proof.
    """
    try:
        return call()
    except NoAnswerError as exc:
        if not exc.was_sent:
            raise provision_error(exc) from exc
        return _find(exc, label=label, listing=listing, clock=clock, settle_s=settle_s)
    except AmbiguousError as exc:
        return _find(exc, label=label, listing=listing, clock=clock, settle_s=settle_s)
    except ApiError as exc:
        raise provision_error(exc) from exc


def provision_error(failure: ApiError, *, leaked: InstanceHandle | None = None) -> ProvisionError:
    """Return what a create that came to nothing means to whoever tries offers one by one."""
    is_wide = isinstance(failure, AuthError | BalanceError | RequestError | AmbiguousError)
    return ProvisionError(
        str(failure), leaked=leaked, is_backend_wide=is_wide and not failure.is_about_offer
    )


def read_public_key(path: Path) -> str:
    """Return the public key in a file, on one line.

    Raises:
        ProvisionError: it cannot be read, or is something else; a private key is never sent.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_KEY_BYTES_MAX).decode("ascii", errors="replace").strip()
    except OSError as exc:
        raise ProvisionError(
            f"the ssh key {path} cannot be read: {exc.strerror}; make one with "
            f"ssh-keygen -t ed25519 -f {path.with_suffix('')}",
            is_backend_wide=True,
        ) from exc
    if _PUBLIC_KEY.fullmatch(text) is None:
        raise ProvisionError(
            f"{path} holds no public ssh key; name the .pub file of a key pair",
            is_backend_wide=True,
        )
    return text


def _find(
    failure: AmbiguousError, *, label: str, listing: Listing, clock: Clock, settle_s: float
) -> InstanceHandle:
    found: list[InstanceHandle] = []
    unread: list[BackendError] = []

    def is_listed() -> bool:
        try:
            listed = listing(label_prefix=label)
        except BackendError as exc:
            unread.append(exc)
            return False
        found.extend(handle for handle in listed if handle.label == label)
        return bool(found)

    try:
        wait_until(
            is_listed,
            what=f"a machine labelled {label}",
            clock=clock,
            timeout_s=settle_s,
            interval_s=_LOOK_INTERVAL_S,
        )
    except DeadlineExceededError:
        why = f" ({unread[-1]})" if unread else ""
        failure.add_note(f"no machine labelled {label} was listed within {settle_s:g} s{why}")
        raise failure from None
    return found[0]
