"""Waiting for a machine, the same for every backend."""

from collections.abc import Callable

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.rental.errors import (
    AbsentError,
    AuthError,
    BackendError,
    BootFailedError,
    InstanceNotFoundError,
    NotProvenGoneError,
    SshDeniedError,
    SshUnreachableError,
)
from paceline.rental.model import InstanceState, InstanceStatus

_POLL_S = 5.0
"""How often a provider is asked; RunPod allows a request a second for a whole account."""
_FIRST_POLL_S = 0.25
"""How soon a fresh machine is asked again; some are there in a second."""
FIRST_LOOK_S = 1.25
"""How long nothing is up for sure: where reads are counted, one before that costs the next. It
counts from before the create call, so there is a quarter of a second for that call in it."""
DENIED_S_MAX = 180.0
"""How long a machine may refuse our key: some providers put it there after they say running."""


def wait_running(  # noqa: PLR0913 - what a wait is made of
    status: Callable[[], InstanceStatus],
    *,
    clock: Clock,
    timeout_s: float,
    what: str = "the machine",
    interval_s: float = 5.0,
    probe: Callable[[InstanceStatus], None] | None = None,
    first_look_s: float = 0.0,
) -> None:
    """Ask ``status`` until it says running, and then ``probe`` until it does not raise.

    Args:
        status: what the backend says.
        clock: what waiting is measured by.
        timeout_s: for both together.
        what: the machine, in an error.
        interval_s: between two questions, once it has taken a while.
        probe: reaches the machine itself, at the address that its status has, such as
            ``Reach.probe``: what a provider calls running need not answer.
        first_look_s: how long to wait before the first question; not more than ``timeout_s``.

    Raises:
        DeadlineExceededError: it did not within ``timeout_s``; says what was in the way last.
        InstanceNotFoundError: it says destroyed.
        SshDeniedError: the machine answers and has refused our key for DENIED_S_MAX.
        BackendError: what ``probe`` raises beside SshUnreachableError, such as another host key.
    """
    wait = _Wait(status=status, probe=probe, clock=clock, what=what)
    first_look_s = min(first_look_s, timeout_s)
    clock.sleep(first_look_s)
    try:
        wait_until(
            wait.is_usable,
            what=f"{what} becoming usable",
            clock=clock,
            timeout_s=timeout_s - first_look_s,
            interval_s=interval_s,
            first_interval_s=_FIRST_POLL_S,
        )
    except DeadlineExceededError as exc:
        raise DeadlineExceededError(f"{exc}; {wait.obstacle}") from exc


def failing(
    status: Callable[[], InstanceStatus],
    why: Callable[[InstanceStatus], str | None],
    *,
    what: str,
) -> Callable[[], InstanceStatus]:
    """Return ``status`` for ``wait_running``, but raising once ``why`` says it never will run.

    It raises BootFailedError. For providers that let a failed start show.
    """

    def checked() -> InstanceStatus:
        now = status()
        reason = why(now)
        if reason is not None:
            raise BootFailedError(f"{what} will not start: {reason}; destroy it and rent another")
        return now

    return checked


def newborn_s(created_at: float, *, clock: Clock) -> float:
    """Return how long a machine is too young to be up."""
    return max(0.0, min(FIRST_LOOK_S, created_at + FIRST_LOOK_S - clock.time()))


def wait_gone(  # noqa: PLR0913 - what an end is made of
    status: Callable[[], InstanceStatus],
    *,
    destroy: Callable[[], None],
    clock: Clock,
    timeout_s: float,
    what: str,
    is_going: Callable[[InstanceStatus | None], bool] | None = None,
    seen: InstanceStatus | None = None,
) -> bool:
    """Destroy and ask, again and again, until ``status`` says destroyed.

    The order comes first: a look before it would only cost a place in the provider's pace. With
    ``is_going`` it comes second, and not to what that says is on its way out already: some
    providers refuse to end it twice. ``seen`` is a look so young that it stands for the first.
    ``destroy`` may raise AbsentError, which alone proves nothing: some providers do not know
    their newest machines.
    Return whether there was anything to destroy.

    Raises:
        NotProvenGoneError: it was not seen gone within ``timeout_s``; the machine may bill.
        AuthError: the key was refused.
    """
    leaving = _Leaving(status=status, destroy=destroy, is_going=is_going, seen=seen)
    ready = leaving.is_gone_when_told if is_going is None else leaving.is_gone_or_told
    try:
        wait_until(
            ready,
            what=what,
            clock=clock,
            timeout_s=timeout_s,
            interval_s=_POLL_S,
            first_interval_s=_FIRST_POLL_S,
        )
    except DeadlineExceededError as exc:
        raise NotProvenGoneError(
            f"{what} was told to go and not seen gone within {timeout_s:g} s, so it may bill: "
            f"{leaving.said}; tear down again, or look at the provider's console"
        ) from exc
    return leaving.was_there


def _unless_auth(failure: BackendError) -> str:
    """Return what it says; a refused key is raised on, since waiting does not mend it."""
    if isinstance(failure, AuthError):
        raise failure
    return str(failure)


class _Wait:
    def __init__(
        self,
        *,
        status: Callable[[], InstanceStatus],
        probe: Callable[[InstanceStatus], None] | None,
        clock: Clock,
        what: str,
    ) -> None:
        self.obstacle = ""
        self._status = status
        self._probe = probe
        self._clock = clock
        self._what = what
        self._denied_s: float | None = None

    def is_usable(self) -> bool:
        status = self._status()
        state = InstanceState.parse(status.state)
        if state is InstanceState.DESTROYED:
            raise InstanceNotFoundError(
                f"{self._what} went away while it was expected to start; rent another"
            )
        self.obstacle = f"its backend says {state}"
        return state is InstanceState.RUNNING and self._answers(status)

    def _answers(self, status: InstanceStatus) -> bool:
        if self._probe is None:
            return True
        try:
            self._probe(status)
        except SshDeniedError as exc:
            now_s = self._clock.monotonic()
            self._denied_s = now_s if self._denied_s is None else self._denied_s
            if now_s - self._denied_s > DENIED_S_MAX:
                raise
            self.obstacle = str(exc)
        except SshUnreachableError as exc:
            self._denied_s = None
            self.obstacle = str(exc)
        else:
            return True
        return False


class _Leaving:
    """A machine on its way out, and what was said of it last."""

    def __init__(
        self,
        *,
        status: Callable[[], InstanceStatus],
        destroy: Callable[[], None],
        is_going: Callable[[InstanceStatus | None], bool] | None,
        seen: InstanceStatus | None,
    ) -> None:
        self.said = "no answer"
        self.was_there = False
        self._status = status
        self._destroy = destroy
        self._is_going = is_going
        self._seen = seen
        self._has_looked = seen is not None

    def is_gone_or_told(self) -> bool:
        """Look, and give the order only to what is there; one look is enough for what goes."""
        if not self._has_looked and self._is_gone():
            return True
        self._has_looked = False
        if self._is_going is not None and self._is_going(self._seen):
            self.was_there = True
            return False
        return self.is_gone_when_told()

    def is_gone_when_told(self) -> bool:
        """Give the order and look."""
        try:
            self._destroy()
        except AbsentError as exc:
            self.said = str(exc)
        except BackendError as exc:
            self.said = _unless_auth(exc)
            self.was_there = True
        else:
            self.was_there = True
        return self._is_gone()

    def _is_gone(self) -> bool:
        try:
            self._seen = self._status()
        except InstanceNotFoundError:
            return True
        except BackendError as exc:
            self.said = _unless_auth(exc)
            return False
        state = InstanceState.parse(self._seen.state)
        self.said = f"state {state}"
        return state is InstanceState.DESTROYED
