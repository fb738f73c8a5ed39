"""Waiting for a machine, the same for every backend."""

from collections.abc import Callable

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.rental.errors import InstanceNotFoundError, SshDeniedError, SshUnreachableError
from paceline.rental.model import InstanceState, InstanceStatus

DENIED_S_MAX = 180.0
"""How long a machine may refuse our key: some providers put it there after they say running."""


def wait_running(
    status: Callable[[], InstanceStatus],
    *,
    clock: Clock,
    timeout_s: float,
    what: str = "the machine",
    interval_s: float = 5.0,
    probe: Callable[[], None] | None = None,
) -> None:
    """Ask ``status`` until it says running, and then ``probe`` until it does not raise.

    Args:
        status: what the backend says.
        clock: what waiting is measured by.
        timeout_s: for both together.
        what: the machine, in an error.
        interval_s: between two questions.
        probe: reaches the machine itself, such as ``NetworkRemote.probe``: what a provider calls
            running need not answer.

    Raises:
        DeadlineExceededError: it did not within ``timeout_s``; says what was in the way last.
        InstanceNotFoundError: it says destroyed.
        SshDeniedError: the machine answers and has refused our key for DENIED_S_MAX.
        BackendError: what ``probe`` raises beside SshUnreachableError, such as another host key.
    """
    wait = _Wait(status=status, probe=probe, clock=clock, what=what)
    try:
        wait_until(
            wait.is_usable,
            what=f"{what} becoming usable",
            clock=clock,
            timeout_s=timeout_s,
            interval_s=interval_s,
        )
    except DeadlineExceededError as exc:
        raise DeadlineExceededError(f"{exc}; {wait.obstacle}") from exc


class _Wait:
    def __init__(
        self,
        *,
        status: Callable[[], InstanceStatus],
        probe: Callable[[], None] | None,
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
        state = InstanceState.parse(self._status().state)
        if state is InstanceState.DESTROYED:
            raise InstanceNotFoundError(
                f"{self._what} went away while it was expected to start; rent another"
            )
        self.obstacle = f"its backend says {state}"
        return state is InstanceState.RUNNING and self._answers()

    def _answers(self) -> bool:
        if self._probe is None:
            return True
        try:
            self._probe()
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
