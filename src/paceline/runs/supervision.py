"""One role on its machine, seen from here: it is begun, watched and stopped, never held.

What runs there does not depend on us. So a call that fails because nobody answers says nothing
about the role: it is made again, until the provider says that the machine is gone or nobody has
answered for longer than patience lasts. Beginning is safe to repeat, by token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.clock import Clock
from paceline.core.retry import RetryPolicy
from paceline.rental import (
    BackendAdapter,
    BackendError,
    CommandTimeoutError,
    ConnectionLostError,
    InstanceHandle,
    InstanceNotFoundError,
    InstanceState,
    RemoteCommandError,
    SshUnreachableError,
)
from paceline.runs.bootstrap import Guest

ASK_TIMEOUT_S = 30
START_TIMEOUT_S = 60
UNTIRING = RetryPolicy(attempts=1_000_000, first_delay_s=0.5, delay_s_max=15.0)
GONE_STATES = frozenset({InstanceState.DESTROYED, InstanceState.STOPPED})

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a machine may be out of reach before its role counts as lost."""

    unreachable_s: float = 900.0
    """Counted from the first failed try after the last that worked, so that the time in which
    this computer slept is not held against the machine."""
    ask_every_s: int = 60
    """How often the provider is asked whether a machine on which a role runs is there still."""
    ask_spot_every_s: int = 20
    """The same for a machine that may be taken back at any moment."""
    retry: RetryPolicy = UNTIRING


class MachineLostError(BackendError):
    """A role's machine is gone, stopped, or out of reach for too long."""


class Supervised:
    """One slot's role on one machine; holds nothing open between calls."""

    def __init__(
        self,
        backend: BackendAdapter,
        handle: InstanceHandle,
        guest: Guest,
        *,
        clock: Clock,
        patience: Patience,
    ) -> None:
        self._backend = backend
        self._handle = handle
        self._guest = guest
        self._clock = clock
        self._patience = patience

    def begin(self, token: str, env: Mapping[str, str]) -> None:
        """Begin the attempt ``token``; one that has begun is left as it is.

        Raises:
            MachineLostError: the machine is gone or does not answer.
            RemoteCommandError: the role cannot be started there.
        """
        ended = self._persist(lambda: self._run(self._guest.start(token), START_TIMEOUT_S, env))
        if ended != 0:
            raise RemoteCommandError(
                f"{self._guest.slot} could not be started on {self._handle.label} (status "
                f"{ended}); is its disk full?"
            )

    def has_begun(self) -> bool:
        """Return whether some attempt was begun on this machine."""
        return self._persist(lambda: self._run(self._guest.has_started, ASK_TIMEOUT_S)) == 0

    def is_ready(self) -> bool:
        """Return whether everything was put on this machine."""
        return self._persist(lambda: self._run(self._guest.is_ready, ASK_TIMEOUT_S)) == 0

    def wait(self, token: str = "") -> int:
        """Return the exit status of an attempt, the latest one without a token.

        Raises MachineLostError.
        """
        code = self._persist(lambda: self._watched(token))
        if code != 0 and self._state() in GONE_STATES:
            # Whoever ended the machine ended the role first.
            raise MachineLostError(f"machine {self._handle.label} is gone")
        return code

    def _watched(self, token: str) -> int:
        """Watch, and ask the provider now and then: a machine that was taken back says nothing.

        Its connection breaks like any other, and a shell is patient with those.
        """
        while True:
            try:
                return self._run(self._guest.watch(token), self._patience.ask_every_s)
            except CommandTimeoutError as exc:
                self._give_up_if_gone(exc)

    def stop(self) -> None:
        """Ask the role to end; fine when nothing runs."""
        self._run(self._guest.stop, ASK_TIMEOUT_S)

    def _run(self, command: str, timeout_s: int | None, env: Mapping[str, str] = {}) -> int:
        ended = self._backend.run_remote(
            self._handle, command, env=env, stream=False, timeout_s=timeout_s
        )
        return ended.code

    def _persist(self, call: Callable[[], _T]) -> _T:
        """Make a call that is safe to repeat until it is answered or the machine is lost."""
        since_s: float | None = None
        tries = 0
        while True:
            try:
                return call()
            except InstanceNotFoundError as exc:
                raise MachineLostError(str(exc)) from exc
            except (SshUnreachableError, ConnectionLostError) as exc:
                self._give_up_if_gone(exc)
                if isinstance(exc, ConnectionLostError):  # so there was a connection
                    since_s, tries = None, 0
                now_s = self._clock.monotonic()
                since_s = now_s if since_s is None else since_s
                if now_s - since_s > self._patience.unreachable_s:
                    away = f"has not answered for {now_s - since_s:.0f} s"
                    raise MachineLostError(f"machine {self._handle.label} {away}: {exc}") from exc
            tries += 1
            self._clock.sleep(self._patience.retry.delay_s(tries, chance=0.5) or 0.0)

    def _give_up_if_gone(self, cause: BackendError) -> None:
        if self._state() in GONE_STATES:
            raise MachineLostError(f"machine {self._handle.label} is gone") from cause

    def _state(self) -> InstanceState:
        """Ask the provider; whoever does not answer knows nothing."""
        try:
            return InstanceState.parse(self._backend.status(self._handle).state)
        except InstanceNotFoundError:
            return InstanceState.DESTROYED
        except BackendError:
            return InstanceState.UNKNOWN
