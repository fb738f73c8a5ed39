"""Run one command on a machine, over as many connections as it takes."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.errors import UsageError
from paceline.rental.errors import (
    BackendError,
    CommandTimeoutError,
    ConnectionLostError,
    HostKeyChangedError,
    InstanceNotFoundError,
    RemoteCommandError,
    SshKeyError,
)
from paceline.rental.remote.channel import Channel, ChannelBrokenError, ask, open_line, refuse
from paceline.rental.remote.frames import Output, Word
from paceline.rental.remote.script import (
    COMMAND_MARK,
    HEARTBEAT_S,
    Job,
    render_end,
    render_job,
)

_RETRY_DELAYS_S = (0.2, 1.0, 2.0, 5.0)
_END_TRIES = 3

Sink = Callable[[int, bytes], None]
"""(1 for standard output or 2 for standard error, the next bytes) -> taken."""


def pass_through(stream: int, content: bytes) -> None:
    """Write a job's output to our own, after whatever we have said ourselves."""
    (sys.stdout if stream == 1 else sys.stderr).flush()
    view = memoryview(content)
    while view:
        view = view[os.write(stream, view) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a job's machine may be out of reach."""

    reattach_s: float = 300.0
    """From the first connection that failed after the last sign of life, so that the time in which
    this computer slept counts for nothing; then its job is given up, and may be running still."""
    grace_s: float = 5.0
    """Between asking a job's processes to end and killing them."""
    silence_s: float = 6.0 * HEARTBEAT_S
    """A machine that is followed and says nothing for so long has lost its connection."""


class Follower:
    """Follows one job to its end; used once."""

    def __init__(
        self, channel: Channel, job: Job, *, clock: Clock, patience: Patience, sink: Sink
    ) -> None:
        self._channel = channel
        self._job = job
        self._clock = clock
        self._patience = patience
        self._sink = sink
        self._num_seen = {1: 0, 2: 0}
        self._may_have_started = False
        self._has_started = False
        self._heard_s = clock.monotonic()
        self._failed_s: float | None = None
        """When connections began to fail; None while they work."""

    def run(self, *, timeout_s: float | None) -> int:
        """Start the job, pass on its output, and return its exit status.

        Raises:
            SshUnreachableError: the machine did not answer, and nothing was started.
            ConnectionLostError: it stopped answering; the job may be running.
            CommandTimeoutError: the job was ended after ``timeout_s``.
        """
        deadline_s = None if timeout_s is None else self._clock.monotonic() + timeout_s
        try:
            return self._until_exit(deadline_s)
        except _DeadlineError as exc:
            self._end(self._patience.grace_s)
            raise CommandTimeoutError(
                f"{self._channel.name}: a command was ended after {timeout_s:g} s; give it a "
                "longer timeout_s or look at its log"
            ) from exc
        except (BackendError, UsageError):
            raise
        except BaseException:
            # Ctrl-C, or whoever reads the output has had enough.
            if self._may_have_started:
                self._end(0.0)
            raise

    def _until_exit(self, deadline_s: float | None) -> int:
        num_failures = 0
        while True:
            seen = self._heard_s
            try:
                return self._attach(deadline_s)
            except ChannelBrokenError as exc:
                self._channel.reset()
                self._give_up_if_hopeless(self._channel.error_of(exc.said), exc)
            num_failures = 0 if self._heard_s > seen else num_failures
            delay_s = _RETRY_DELAYS_S[min(num_failures, len(_RETRY_DELAYS_S) - 1)]
            num_failures += 1
            self._clock.sleep(delay_s)
            if deadline_s is not None and self._clock.monotonic() >= deadline_s:
                raise _DeadlineError

    def _give_up_if_hopeless(self, error: BackendError, broken: ChannelBrokenError) -> None:
        """Raise unless the job may be running and its machine may come back."""
        if not self._may_have_started:
            raise error from broken
        if isinstance(error, HostKeyChangedError | SshKeyError | InstanceNotFoundError):
            raise error from broken
        now_s = self._clock.monotonic()
        self._failed_s = now_s if self._failed_s is None else self._failed_s
        away_s = now_s - self._failed_s
        if away_s > self._patience.reattach_s:
            raise ConnectionLostError(
                f"{self._channel.name} has not answered for {away_s:.0f} s while a command ran; "
                f"it may be running there still ({error})"
            ) from broken

    def _attach(self, deadline_s: float | None) -> int:
        script = render_job(
            self._job,
            may_start=not self._has_started,
            num_out=self._num_seen[1],
            num_err=self._num_seen[2],
        )
        silence_s = self._patience.silence_s
        with open_line(self._channel, script, clock=self._clock, silence_s=silence_s) as line:
            for event in line.events(deadline_s=deadline_s):
                self._heard_s = self._clock.monotonic()
                self._failed_s = None
                # From the greeting on, the shell there has the script or a part of it.
                self._may_have_started = True
                if isinstance(event, Output):
                    self._sink(event.stream, event.content)
                    self._num_seen[event.stream] += len(event.content)
                elif isinstance(event, Word):
                    code = self._take(event)
                    if code is not None:
                        line.acknowledge()
                        return code
        raise _DeadlineError

    def _take(self, word: Word) -> int | None:
        """Note what a word says; return the exit status if that is it."""
        refuse(self._channel, word)
        if word.letter == "S":
            self._has_started = True
        if word.letter != "X":
            return None
        if not word.rest.isdigit():
            raise RemoteCommandError(
                f"{self._channel.name}: a command ended and its exit status was not recorded; "
                "is the disk there full?"
            )
        return int(word.rest)

    def _end(self, grace_s: float) -> None:
        """End the job's processes. Raises ConnectionLostError if that cannot be seen."""
        script = render_end(
            home=self._channel.home,
            jobs=self._channel.jobs,
            mark=(COMMAND_MARK, self._job.id),
            job_id=self._job.id,
            grace_s=grace_s,
        )
        for tries in range(_END_TRIES):
            try:
                left = ask(self._channel, script, clock=self._clock)
            except InstanceNotFoundError:
                return
            except BackendError as exc:
                if tries == _END_TRIES - 1:
                    raise ConnectionLostError(
                        f"{self._channel.name}: a command was to be ended and the machine does "
                        f"not answer; it may be running there still ({exc})"
                    ) from exc
                self._clock.sleep(_RETRY_DELAYS_S[tries])
            else:
                if left.rest.strip():
                    raise RemoteCommandError(
                        f"{self._channel.name}: processes {left.rest.split()} do not end, not "
                        "even by SIGKILL"
                    )
                return


class _DeadlineError(Exception):
    """The caller's time is over."""
