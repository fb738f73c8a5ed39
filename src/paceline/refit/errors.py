"""What can go wrong with weights, sorted by what the caller does next."""

from enum import StrEnum

from paceline.core.errors import ExitStatus, PacelineError, UsageError
from paceline.refit.model import ObjectRange


class RefitError(PacelineError):
    """Base for every failure of moving weights."""

    exit_status = ExitStatus.REFIT_FAILED


class PublishError(RefitError):
    """A version could not be made fetchable; the version before is still served."""


class StagingError(PublishError):
    """Source bytes cannot be kept still now: all arenas leased, or weights moved under a lease."""


class NoFreeArenaError(StagingError):
    """All memory for staging holds versions that are still needed: wait, or let one go."""


class VersionSkippedError(StagingError):
    """The version was left out, as the policy for a full ring says; training goes on."""


class FetchError(RefitError):
    """Bytes did not arrive; another source or a later try may help. Nothing was changed.

    ``source`` and ``wanted`` say whose fault it was and what is missing, where that is known.
    """

    def __init__(
        self, message: str, *, source: str = "", wanted: ObjectRange | None = None
    ) -> None:
        super().__init__(message)
        self.source = source
        self.wanted = wanted


class NoRoomError(FetchError):
    """There is no room here for what is fetched. No source is to blame, and none can help."""


class TransferCancelledError(RefitError):
    """Whoever ordered a transfer ended it; nobody is to blame, and nothing was changed."""


class VerifyError(RefitError):
    """Bytes are not what the manifest says. Nothing was changed; the source is to be avoided."""


class LyingSourceError(VerifyError):
    """A source sent bytes that are not what they should be: avoid it, ask another for the range."""

    def __init__(self, message: str, *, source: str, wanted: ObjectRange | None = None) -> None:
        super().__init__(message)
        self.source = source
        self.wanted = wanted


class ApplyError(RefitError):
    """Writing into live parameters failed and was undone: exactly the old version is there."""


class UncertainStateError(RefitError):
    """Writing failed and so did the undo: the engine must not serve until a full version is in."""


class StaleVersionError(RefitError):
    """The version asked for is older than allowed, or no longer kept."""


class BadRequestError(UsageError):
    """A rollout request cannot be served as it is; ``field`` names what to change."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


class EngineBusyError(RefitError):
    """The rollout engine's queue is full: try another engine, or this one later."""


class EngineNotReadyError(RefitError):
    """The rollout engine serves no version now: try another engine, or this one later."""


class GenerationError(RefitError):
    """The model failed while it generated; the same request elsewhere may succeed."""


class ParseReason(StrEnum):
    """Why a document or payload was refused; vectors assert these words."""

    NOT_JSON = "not_json"
    NOT_UTF8 = "not_utf8"
    BAD_MAGIC = "bad_magic"
    UNKNOWN_SCHEMA = "unknown_schema"
    MISSING_FIELD = "missing_field"
    UNKNOWN_FIELD = "unknown_field"
    DUPLICATE_KEY = "duplicate_key"
    WRONG_TYPE = "wrong_type"
    OUT_OF_RANGE = "out_of_range"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    TOO_LARGE = "too_large"
    INCONSISTENT = "inconsistent"
    DIGEST_MISMATCH = "digest_mismatch"
    NOT_CANONICAL = "not_canonical"


class ParseError(VerifyError):
    """A document or payload breaks its format; carries the reason and the place."""

    def __init__(self, reason: ParseReason, where: str, detail: str = "") -> None:
        super().__init__(f"{where}: {reason.value}" + (f" ({detail})" if detail else ""))
        self.reason = reason
        self.where = where


class ControlError(PacelineError):
    """Base for what the control service or the way to it refused."""

    exit_status = ExitStatus.CONTROL_UNAVAILABLE


class ControlUnavailableError(ControlError):
    """The control service does not answer; try again later."""


class AccessRefusedError(ControlError):
    """The token is missing, wrong, or its role may not do this; trying again does not help."""


class InvalidRequestError(ControlError, ValueError):
    """The request is malformed (INVALID_ARGUMENT)."""


class NotFoundError(ControlError):
    """No such version, shard or worker (NOT_FOUND)."""


class AlreadyExistsError(ControlError):
    """The name belongs to something else already (ALREADY_EXISTS)."""


class PreconditionError(ControlError):
    """The request is well formed and not allowed now (FAILED_PRECONDITION)."""


class ExhaustedError(ControlError):
    """A limit of the service is reached (RESOURCE_EXHAUSTED)."""
