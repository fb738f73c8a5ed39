"""What can go wrong with machines, sorted by what the caller does next."""

from paceline.core.errors import ExitStatus, PacelineError
from paceline.rental.model import InstanceHandle


class BackendError(PacelineError, RuntimeError):
    """Base for every failure that comes from a backend."""

    exit_status = ExitStatus.PROVISION


class NoOffersError(BackendError):
    """Nothing on offer fits: relax a constraint or ask another backend."""


class ProvisionError(BackendError):
    """No machine was created, or one may have been: look at ``leaked``.

    ``leaked`` names a machine that exists and bills although the call failed; the caller must
    tear it down. None means that the backend is sure that nothing was created.
    """

    def __init__(self, *args: object, leaked: InstanceHandle | None = None) -> None:
        super().__init__(*args)
        self.leaked = leaked


class InstanceNotFoundError(BackendError):
    """The machine does not exist, or not any more."""


class SshUnreachableError(BackendError):
    """The machine does not answer yet; usually gone after some waiting."""

    exit_status = ExitStatus.NOT_READY


class SshDeniedError(SshUnreachableError):
    """The machine answers and does not take our key: keys arrive late, or it is the wrong one."""


class SshKeyError(BackendError):
    """Our own private key is missing or cannot be used; waiting does not help."""

    exit_status = ExitStatus.PREFLIGHT


class HostKeyChangedError(BackendError):
    """Another machine answers at this address than before; waiting does not help."""

    exit_status = ExitStatus.NOT_READY


class RemoteCommandError(BackendError):
    """A command or copy on a machine could not be carried out."""

    exit_status = ExitStatus.REMOTE_FAILED


class CommandTimeoutError(RemoteCommandError):
    """A command ran past its ``timeout_s``; its whole process group was ended."""


class ConnectionLostError(RemoteCommandError):
    """The machine stopped answering while a command ran, which may be running there still."""


class IllegalMoveError(BackendError):
    """A machine is not in a state from which this can be done; read its record again."""

    exit_status = ExitStatus.FAILED


class NotProvenGoneError(BackendError):
    """A machine was told to go and has not been seen gone; it may still be billing."""

    exit_status = ExitStatus.NOT_PROVEN_GONE


class GoneUnrecordedError(BackendError):
    """A machine was seen gone and the record of it could not be written: nothing bills."""

    exit_status = ExitStatus.PREFLIGHT
