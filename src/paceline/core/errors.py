"""The root of every error that Paceline raises on purpose, with the exit status it means."""

from collections.abc import Mapping
from enum import IntEnum
from typing import ClassVar


class ExitStatus(IntEnum):
    """Exit status of the command line, one per thing that the caller does next."""

    OK = 0
    FAILED = 1
    """The run or command did what was asked and it failed (a role exited non-zero)."""
    USAGE = 2
    """Something given was wrong: an option, a job file. Nothing was started."""
    PREFLIGHT = 10
    """Something around is missing or refused: credentials, the network, a port, disk, a file."""
    PROVISION = 20
    """No machine could be rented."""
    NOT_READY = 30
    """A machine was rented and never became usable."""
    REMOTE_FAILED = 40
    """A command on a machine failed."""
    REFIT_FAILED = 50
    """Weights could not be published, fetched, verified or applied."""
    CONTROL_UNAVAILABLE = 51
    """The control service is down, refused the token, or answered nonsense."""
    NOT_PROVEN_GONE = 60
    """A machine may still be billing; the message names it."""
    INTERRUPTED = 130


class PacelineError(Exception):
    """Base of our errors: the message says what happened, to what, and what to do next."""

    exit_status: ClassVar[ExitStatus] = ExitStatus.FAILED

    @property
    def details(self) -> Mapping[str, object]:
        """Return what a program can use beside the message; values are JSON."""
        return {}


class UsageError(PacelineError, ValueError):
    """What was given is wrong; nothing was started."""

    exit_status = ExitStatus.USAGE


class PreflightError(PacelineError):
    """Something around us is missing or refused; nothing was started."""

    exit_status = ExitStatus.PREFLIGHT


class MissingExtraError(PreflightError):
    """An optional library is not installed; the message holds the command that installs it."""


class DeadlineExceededError(PacelineError, TimeoutError):
    """A bounded wait ended without what it waited for."""

    exit_status = ExitStatus.NOT_READY
