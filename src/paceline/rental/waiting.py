"""Waiting for a machine, the same for every backend."""

from collections.abc import Callable

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.rental.errors import (
    AuthError,
    BackendError,
    BootFailedError,
    InstanceNotFoundError,
    NotProvenGoneError,
    SshUnreachableError,
)
from paceline.rental.model import InstanceState, InstanceStatus

_POLL_S = 5.0
"""How often a provider is asked; RunPod allows a request a second for a whole account."""


def _nothing() -> None:
    """Ask nothing."""


def _no_failure(status: InstanceStatus) -> str | None:
    return None


def wait_running(
    status: Callable[[], InstanceStatus],
    *,
    clock: Clock,
    timeout_s: float,
    what: str = "the machine",
    probe: Callable[[], None] = _nothing,
    failure: Callable[[InstanceStatus], str | None] = _no_failure,
) -> None:
    """Ask ``status`` until it says running, and then ``probe`` until the machine answers it.

    ``failure`` reads in a status why it will never run, where the provider lets that show.

    Raises:
        DeadlineExceededError: it did not within ``timeout_s``.
        InstanceNotFoundError: it says destroyed.
        BootFailedError: it says that it never will.
    """
    said = ""

    def is_running() -> bool:
        nonlocal said
        now = status()
        state = InstanceState.parse(now.state)
        if state is InstanceState.DESTROYED:
            raise InstanceNotFoundError(
                f"{what} went away while it was expected to start; rent another"
            )
        why = failure(now)
        if why is not None:
            raise BootFailedError(f"{what} will not start: {why}; destroy it and rent another")
        if state is not InstanceState.RUNNING:
            said = f"last state {state}"
            return False
        try:
            probe()
        except SshUnreachableError as exc:
            said = str(exc)
            return False
        return True

    try:
        wait_until(
            is_running,
            what=f"{what} becoming usable",
            clock=clock,
            timeout_s=timeout_s,
            interval_s=_POLL_S,
        )
    except DeadlineExceededError as exc:
        raise DeadlineExceededError(f"{exc}; {said}") from exc


def wait_gone(
    status: Callable[[], InstanceStatus],
    *,
    destroy: Callable[[], None],
    clock: Clock,
    timeout_s: float,
    what: str,
) -> bool:
    """Destroy and ask, again and again, until ``status`` says destroyed.

    Return whether there was anything to destroy. ``destroy`` may raise AbsentError, which alone
    proves nothing: some providers do not know their newest machines.

    Raises:
        NotProvenGoneError: it was not seen gone within ``timeout_s``; the machine may bill.
        AuthError: the key was refused.
    """
    said = "no answer"
    num_orders = 0

    def is_gone() -> bool:
        nonlocal said
        try:
            state = _state_of(status)
        except BackendError as exc:
            said = _unless_auth(exc)
            return False
        said = f"state {state}"
        return state is InstanceState.DESTROYED

    def is_gone_or_told() -> bool:
        nonlocal said, num_orders
        if is_gone():
            return True
        num_orders += 1
        try:
            destroy()
        except BackendError as exc:
            said = _unless_auth(exc)
        return is_gone()

    try:
        wait_until(is_gone_or_told, what=what, clock=clock, timeout_s=timeout_s, interval_s=_POLL_S)
    except DeadlineExceededError as exc:
        raise NotProvenGoneError(
            f"{what} was told to go and not seen gone within {timeout_s:g} s, so it may bill: "
            f"{said}; tear down again, or look at the provider's console"
        ) from exc
    return num_orders > 0


def _state_of(status: Callable[[], InstanceStatus]) -> InstanceState:
    try:
        return InstanceState.parse(status().state)
    except InstanceNotFoundError:
        return InstanceState.DESTROYED


def _unless_auth(failure: BackendError) -> str:
    """Return what it says; a refused key is raised on, since waiting does not mend it."""
    if isinstance(failure, AuthError):
        raise failure
    return str(failure)
