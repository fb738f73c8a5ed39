"""From the JSON of a completion request to typed values, or an error that names the field."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from paceline.refit.errors import BadRequestError
from paceline.refit.generators.protocol import Sampling

PROMPTS_MAX: Final = 256

T = TypeVar("T")

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What somebody wants completed."""

    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    wants_logprobs: bool
    is_stream: bool = False
    """Tokens are sent as they come."""
    wants_usage: bool = False
    """A stream ends with the counts of tokens."""
    max_staleness: int | None = None
    """How many versions behind the newest the weights may be; None: as the engine is set."""


NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}
"""Fields of the OpenAI protocol that are accepted only where they ask for nothing."""


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Parse and check one body; unknown fields are refused, because ignoring one would be a lie.

    Raises:
        BadRequestError: with the field, ``body`` for the document itself.
    """
    fields = _load(body)
    for name, allowed in NEUTRAL.items():
        if fields.pop(name, None) not in allowed:
            raise BadRequestError(name, "is not supported here; leave it out")
    fields.pop("user", None)
    model = _take(fields, "model", _text)
    prompts = _prompts(fields.pop("prompt", None))
    logprobs = _take(fields, "logprobs", _integer)
    if logprobs not in (None, 0):
        raise BadRequestError("logprobs", "must be 0 or null: only the chosen tokens' are kept")
    sampling = _sampling(fields)
    is_stream = _take(fields, "stream", _flag) or False
    options = _take(fields, "stream_options", _stream_options)
    if options is not None and not is_stream:
        raise BadRequestError("stream_options", "means nothing without stream")
    max_staleness = _take(fields, "max_staleness", _integer)
    if max_staleness is not None and max_staleness < 0:
        raise BadRequestError("max_staleness", "must be 0 or more")
    if fields:
        raise BadRequestError(min(fields), "is not a field of this request")
    return CompletionRequest(
        model=model,
        prompts=prompts,
        sampling=sampling,
        wants_logprobs=logprobs is not None,
        is_stream=is_stream,
        wants_usage=options or False,
        max_staleness=max_staleness,
    )


def _load(body: bytes) -> dict[str, object]:
    try:
        document = json.loads(body)
        # JSON can spell half a character ("\ud800"), which is no text and cannot be written.
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise BadRequestError("body", "holds a lone surrogate, which is no text") from exc
    except (ValueError, RecursionError) as exc:
        raise BadRequestError("body", f"is not JSON: {type(exc).__name__}") from exc
    if not isinstance(document, dict):
        raise BadRequestError("body", "must be a JSON object")
    return document


def _sampling(fields: dict[str, object]) -> Sampling:
    """Take the sampling fields out; null means the default, as everywhere in this protocol."""
    readers: dict[str, Callable[[str, object], object]] = {
        "max_tokens": _integer,
        "temperature": _number,
        "top_p": _number,
        "top_k": _integer,
        "n": _integer,
        "seed": _integer,
        "stop": _stops,
        "stop_token_ids": _tokens,
        "ignore_eos": _flag,
    }
    taken = {name: _take(fields, name, reader) for name, reader in readers.items()}
    given = {name: value for name, value in taken.items() if value is not None}
    return Sampling(**given)  # type: ignore[arg-type]  # each reader returns its field's type


def _take(fields: dict[str, object], name: str, reader: Callable[[str, object], T]) -> T | None:
    value = fields.pop(name, None)
    return None if value is None else reader(name, value)


def _prompts(value: object) -> tuple[Prompt, ...]:
    """Read a text, a list of tokens, or a list of either."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise BadRequestError("prompt", "must be a text, a list of tokens, or a list of those")
    if _is_integer(value[0]):
        return (_tokens("prompt", value),)
    if len(value) > PROMPTS_MAX:
        raise BadRequestError("prompt", f"must hold at most {PROMPTS_MAX} prompts")
    return tuple(each if isinstance(each, str) else _tokens("prompt", each) for each in value)


def _tokens(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(_is_integer, value)):
        raise BadRequestError(name, "must be a list of whole numbers")
    return tuple(value)


def _stops(name: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise BadRequestError(name, "must be a text or a list of texts")
    return tuple(texts)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadRequestError(name, "must be a text")
    return value


def _integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequestError(name, "must be a whole number")
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadRequestError(name, "must be a number")
    try:
        return float(value)
    except OverflowError as exc:
        raise BadRequestError(name, "is too large") from exc


def _stream_options(name: str, value: object) -> bool:
    """Return whether usage is wanted: the one option there is."""
    if not isinstance(value, dict) or value.keys() - {"include_usage"}:
        raise BadRequestError(name, "may only say include_usage")
    return _flag("stream_options.include_usage", value.get("include_usage", False))


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BadRequestError(name, "must be true or false")
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
