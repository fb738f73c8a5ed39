"""An event's fields as JSON text of bounded size: how they cross the wire and lie in the store."""

import json
from collections.abc import Mapping

from paceline.refit.errors import InvalidRequestError

FIELDS_CHARS_MAX = 64 * 1024
"""Longest JSON text of one event's fields."""


def render_fields(fields: Mapping[str, object]) -> str:
    """Return an event's fields as JSON text; equal fields give equal text.

    Raises:
        InvalidRequestError: not JSON (NaN and infinity are not), or over FIELDS_CHARS_MAX.
    """
    try:
        text = json.dumps(fields, allow_nan=False, separators=(",", ":"), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"event fields are not JSON: {exc}") from exc
    _check_fields_size(text)
    return text


def parse_fields(text: str) -> dict[str, object]:
    """Return an event's fields. Raises InvalidRequestError as render_fields does."""
    _check_fields_size(text)
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"event fields are not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise InvalidRequestError("event fields are not a JSON object")
    return fields


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON number")


def _check_fields_size(text: str) -> None:
    if len(text) > FIELDS_CHARS_MAX:
        raise InvalidRequestError(
            f"event fields are {len(text)} characters of JSON; at most {FIELDS_CHARS_MAX} are kept"
        )
