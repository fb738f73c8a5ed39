"""Our errors and gRPC's status codes, one table read in both directions."""

from typing import Final

import grpc

from paceline.core.errors import PacelineError
from paceline.refit.control.auth import UnauthenticatedError
from paceline.refit.control.records import DamagedRecordError
from paceline.refit.errors import (
    AccessRefusedError,
    AlreadyExistsError,
    ControlError,
    ControlUnavailableError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from paceline.store.protocol import StoreError

_CODES: Final[tuple[tuple[type[PacelineError], grpc.StatusCode], ...]] = (
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (AccessRefusedError, grpc.StatusCode.PERMISSION_DENIED),
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (PreconditionError, grpc.StatusCode.FAILED_PRECONDITION),
    (ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ControlUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (StoreError, grpc.StatusCode.UNAVAILABLE),
    (DamagedRecordError, grpc.StatusCode.INTERNAL),
)
"""Subclasses first."""

_OURS_ALONE: Final = (StoreError, DamagedRecordError)
"""A client hears that the service is unavailable or has failed; the store is not its affair."""

_ERRORS: Final = {
    code: kind
    for kind, code in _CODES
    if issubclass(kind, ControlError) and kind not in _OURS_ALONE
}

_ADVICE: Final = {
    grpc.StatusCode.UNAVAILABLE: (
        ControlUnavailableError,
        "it is down, unreachable or starting; check that it runs and that the address is right",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (ControlUnavailableError, "it did not answer in time"),
    grpc.StatusCode.CANCELLED: (ControlUnavailableError, "the connection was closed"),
    grpc.StatusCode.UNIMPLEMENTED: (
        ControlError,
        "it does not know this call; use a control service of this release",
    ),
}
"""What a code from the way to the service means to us."""

DETAILS_CHARS_MAX: Final = 400
"""Of an error text on the wire: gRPC percent-encodes it into a header of 8 KiB at most."""


def code_of(error: PacelineError) -> grpc.StatusCode:
    """Return the status that tells a client about ``error``."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.UNKNOWN


def details_of(error: PacelineError) -> str:
    """Return the text that goes with ``code_of``."""
    return str(error)[:DETAILS_CHARS_MAX]


def error_of(code: grpc.StatusCode, details: str, *, address: str, call: str) -> ControlError:
    """Return what a failed call means, in our terms."""
    if code in _ADVICE:
        made, advice = _ADVICE[code]
        said = f" ({details})" if details else ""
        return made(f"control service at {address}, {call}: {advice}{said}")
    kind = _ERRORS.get(code, ControlError)
    if kind is ControlError:
        details = f"it failed with {code.name}: {details}"
    return kind(f"control service at {address}, {call}: {details}")
