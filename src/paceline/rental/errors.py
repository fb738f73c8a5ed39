"""What can go wrong with machines, sorted by what the caller does next."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import ClassVar, TypedDict, Unpack

from paceline.core.errors import ExitStatus, PacelineError
from paceline.rental.model import InstanceHandle


class BackendError(PacelineError, RuntimeError):
    """Base for every failure that comes from a backend."""

    exit_status = ExitStatus.PROVISION


class Silence(StrEnum):
    """Why a backend that was asked offers nothing."""

    NOTHING_FITS = "nothing_fits"
    """It answered: relax the constraints."""
    REFUSED = "refused"
    """It does not let us in, or not do this: mend that; waiting does not help."""
    UNREACHABLE = "unreachable"
    """It gave no answer that could be used: it may in a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """One backend that offers nothing."""

    backend: str
    silence: Silence
    message: str


class NoOffersError(BackendError):
    """Nothing on offer fits: relax a constraint or ask another backend.

    ``backends`` are those that offer nothing at all, each with why.
    """

    def __init__(self, *args: object, backends: Sequence[Silent] = ()) -> None:
        super().__init__(*args)
        self.backends = tuple(backends)

    @property
    def details(self) -> Mapping[str, object]:
        """Return each backend that offers nothing, and why."""
        return {"backends": [asdict(one) for one in self.backends]} if self.backends else {}


class ProvisionError(BackendError):
    """No machine was created, or one may have been: look at ``leaked``.

    ``leaked`` names a machine that exists and bills although the call failed; the caller must
    tear it down. None means that the backend is sure that nothing was created.
    ``is_backend_wide`` says that no other offer of this backend can do better now: the key, the
    balance or the request itself was refused, not the offer.
    """

    def __init__(
        self,
        *args: object,
        leaked: InstanceHandle | None = None,
        is_backend_wide: bool = False,
    ) -> None:
        super().__init__(*args)
        self.leaked = leaked
        self.is_backend_wide = is_backend_wide


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


class BootFailedError(BackendError):
    """A machine exists and says that it will never run: destroy it and take another offer."""

    exit_status = ExitStatus.NOT_READY


class ApiFacts(TypedDict, total=False):
    """What is known about an answer that was no success."""

    status: int | None
    """Of HTTP."""
    code: str | None
    """The provider's own word, where it has one."""
    request_id: str | None
    document: object
    """The answer's body, decoded; None where it was not JSON."""
    is_about_offer: bool
    """Another offer of the same provider may do better."""


class ApiError(BackendError):
    """A provider did not do what it was asked; each subclass is one thing to do next."""

    advice: ClassVar[str] = "read the message"

    def __init__(self, *args: object, **facts: Unpack[ApiFacts]) -> None:
        super().__init__(*args)
        self.status = facts.get("status")
        self.code = facts.get("code")
        self.request_id = facts.get("request_id")
        self.document = facts.get("document")
        self.is_about_offer = facts.get("is_about_offer", False)


class AuthError(ApiError):
    """The key was refused, is missing, or lacks a right: mend it; repeating is useless."""

    exit_status = ExitStatus.PREFLIGHT
    advice = "check the key with `paceline check`"


class MissingKeyError(AuthError):
    """There is no key at all, so nothing was sent."""

    advice = "run `paceline check` to see where one is looked for"


class BalanceError(ApiError):
    """The account cannot pay, or is at its limit: no other offer of this provider will do."""

    advice = "add credit or raise the limit at the provider, or allow another backend"


class CapacityError(ApiError):
    """What was asked for is taken or sold out: try the next offer."""

    advice = "take another offer"


class AbsentError(ApiError):
    """The thing asked about does not exist."""

    advice = "it is gone, or never was"


class RequestError(ApiError):
    """The provider thinks the request wrong; nothing was done, and repeating is useless."""

    advice = "mend what it names"


class RateLimitError(ApiError):
    """Too many requests; nothing was done. Wait ``rest_s`` and repeat."""

    advice = "wait and try again"

    def __init__(
        self,
        *args: object,
        retry_after_s: float | None = None,
        pace_s: float = 5.0,
        **facts: Unpack[ApiFacts],
    ) -> None:
        super().__init__(*args, **facts)
        self.retry_after_s = retry_after_s
        """What the provider said; None where it did not."""
        self.pace_s = pace_s
        """How far apart such calls are to be, as far as is known."""

    @property
    def rest_s(self) -> float:
        """Return how long to wait before the next such call."""
        return max(self.pace_s, self.retry_after_s or 0.0)


class AmbiguousError(ApiError):
    """Nobody knows whether it was done: look before doing it again."""

    advice = "look whether it was done before doing it again"


class NoAnswerError(AmbiguousError):
    """The connection failed or the answer came too late; ``was_sent`` is False if it never went."""

    def __init__(self, *args: object, was_sent: bool, **facts: Unpack[ApiFacts]) -> None:
        super().__init__(*args, **facts)
        self.was_sent = was_sent


class ServerError(AmbiguousError):
    """The provider failed on its side (5xx)."""


class GarbageError(AmbiguousError):
    """The answer is not what the provider documents: a proxy's page, half a body, another type."""


class GoneUnrecordedError(BackendError):
    """A machine was seen gone and the record of it could not be written: nothing bills."""

    exit_status = ExitStatus.PREFLIGHT


class NotAcceptedError(BackendError):
    """A machine runs and is not what was offered: destroy it and take another."""

    exit_status = ExitStatus.NOT_READY


class BudgetError(BackendError):
    """What was about to be rented does not fit into the hard cap; the machines there are go on."""

    exit_status = ExitStatus.PREFLIGHT


class RentingStoppedError(BackendError):
    """Whoever asked for a machine does not want it any more."""

    exit_status = ExitStatus.INTERRUPTED


class AllRefusedError(NoOffersError):
    """Every backend refuses us for a reason that waiting does not mend, such as a missing key."""

    exit_status = ExitStatus.PREFLIGHT


class NobodyAnsweredError(NoOffersError):
    """No backend gave an answer, so nobody knows what there is: the network, or they, are down."""

    exit_status = ExitStatus.PREFLIGHT


class AttemptsFailedError(NoOffersError):
    """Everything that could be tried was tried; the message has one line per attempt."""


class NeverReadyError(AttemptsFailedError):
    """Machines were made, and none of them could be used."""

    exit_status = ExitStatus.NOT_READY
