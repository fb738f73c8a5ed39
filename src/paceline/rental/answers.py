"""Reading what a provider answered, whatever it is: total, nothing here raises. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from paceline.rental.errors import (
    AbsentError,
    ApiError,
    AuthError,
    BalanceError,
    RateLimitError,
    RequestError,
    ServerError,
)

_KINDS: Mapping[int, type[ApiError]] = {
    HTTPStatus.UNAUTHORIZED: AuthError,
    HTTPStatus.PAYMENT_REQUIRED: BalanceError,
    HTTPStatus.FORBIDDEN: AuthError,
    HTTPStatus.NOT_FOUND: AbsentError,
    HTTPStatus.TOO_MANY_REQUESTS: RateLimitError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a provider's mapping reads out of an answer that is no success."""

    kind: type[ApiError]
    text: str
    code: str | None = None
    is_about_offer: bool = False
    """Another offer of the same provider may do better."""


def is_success(status: int) -> bool:
    """Return whether an HTTP status says that all went well."""
    return HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES


def kind_of(status: int) -> type[ApiError]:
    """Return what an HTTP status means where the provider's own words say nothing else."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ServerError
    return _KINDS.get(status, RequestError)


def at(document: object, *path: str) -> object:
    """Return what is under ``path``, or None where there is no such place."""
    for name in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document


def text_at(document: object, *path: str) -> str:
    """Return the text under ``path``; a whole number counts as text, anything else is empty."""
    found = at(document, *path)
    if isinstance(found, str):
        return found.strip()
    return str(found) if isinstance(found, int) and not isinstance(found, bool) else ""


def number_at(document: object, *path: str) -> float | None:
    """Return the finite number under ``path``, also one written as text, or None."""
    found = at(document, *path)
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        return None
    try:
        number = float(found)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def count_at(document: object, *path: str) -> int:
    """Return the whole number under ``path``, or 0."""
    number = number_at(document, *path)
    return int(number) if number is not None and number >= 0 else 0


def rows_at(document: object, *path: str) -> list[Mapping[str, object]]:
    """Return the objects in the list under ``path``; whatever else is in it is left out."""
    found = at(document, *path)
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
