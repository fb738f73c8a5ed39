"""From prompts to the JSON that our serving routes read, and back: no I/O."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import UsageError
from paceline.refit.errors import AccessRefusedError, EngineBusyError, EngineNotReadyError
from paceline.refit.generators.protocol import Choice, InstalledVersion, Sampling, VersionSpan
from paceline.refit.rollouts.model import EngineFailedError, Piece

DONE = "[DONE]"
EVENT_CHARS_MAX = 2**20
"""Of one event of a stream: a few tokens."""


def render_request(
    prompt: Sequence[int], sampling: Sampling, *, model_name: str, is_stream: bool = False
) -> dict[str, object]:
    """Return the JSON of one prompt's request."""
    return {
        "model": model_name,
        "prompt": list(prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "n": sampling.n,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        **({"stream": True} if is_stream else {}),
    }


def check_status(status: int, answer: bytes, *, who: str) -> None:
    """Raise what a status other than 200 means for the next try."""
    if status == 200:  # noqa: PLR2004 - HTTP's own number
        return
    text = answer[:300].decode("utf-8", "replace")
    if status in (401, 403):
        raise AccessRefusedError(f"{who} refused the data token of this run")
    if status == 429:  # noqa: PLR2004
        raise EngineBusyError(f"{who} is busy")
    if status == 503:  # noqa: PLR2004
        raise EngineNotReadyError(f"{who} is not ready: {text}")
    if 400 <= status < 500:  # noqa: PLR2004
        raise UsageError(f"{who} refused the request ({status}): {text}")
    raise EngineFailedError(f"{who} failed ({status}): {text}")


def parse_choices(answer: bytes, *, worker_id: str) -> list[Choice]:
    """Read the choices of an answer.

    Raises:
        EngineFailedError: it is not what our serving routes send.
    """
    try:
        return [_parse_choice(each) for each in json.loads(answer)["choices"]]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise EngineFailedError(
            f"engine {worker_id} sent no completion: {type(exc).__name__} {exc}"
        ) from exc


def parse_event(line: str, *, worker_id: str) -> Piece | None:
    """Read one line of a stream; None for one that carries no tokens.

    Raises:
        EngineFailedError: the engine says that it failed, or sends what our routes do not.
        EngineNotReadyError: it stopped serving in the middle.
    """
    if not line.startswith("data:") or line[5:].strip() == DONE:
        return None
    try:
        document = json.loads(line[5:])
        error = document.get("error")
        if error is None:
            return _parse_piece(document["choices"], worker_id) if document["choices"] else None
        is_not_ready, message = error["type"] == "unavailable_error", str(error["message"])[:300]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise EngineFailedError(
            f"engine {worker_id} sent no event: {type(exc).__name__} {exc}"
        ) from exc
    if is_not_ready:
        raise EngineNotReadyError(f"engine {worker_id} stopped: {message}")
    raise EngineFailedError(f"engine {worker_id} failed: {message}")


def _parse_piece(choices: Sequence[Mapping[str, Any]], worker_id: str) -> Piece:
    (each,) = choices
    spans = tuple(_parse_span(span) for span in each["weight_versions"])
    token_ids = tuple(map(int, each["token_ids"]))
    if sum(span.end - span.start for span in spans) != len(token_ids):
        raise ValueError("the version spans do not cover the tokens")
    logprobs = tuple(map(float, each["logprobs"]["token_logprobs"]))
    if len(logprobs) != len(token_ids):
        raise ValueError("not one log-probability per token")
    return Piece(
        token_ids=token_ids,
        logprobs=logprobs,
        text=str(each["text"]),
        spans=spans,
        finish_reason=each["finish_reason"],
        engine_id=worker_id,
    )


def _parse_choice(each: Mapping[str, Any]) -> Choice:
    choice = Choice(
        token_ids=tuple(map(int, each["token_ids"])),
        logprobs=tuple(map(float, each["logprobs"]["token_logprobs"])),
        text=str(each["text"]),
        finish_reason=str(each["finish_reason"]),
        spans=tuple(_parse_span(span) for span in each["weight_versions"]),
    )
    bounds = [0, *(span.end for span in choice.spans)]
    if [span.start for span in choice.spans] != bounds[:-1] or bounds[-1] != len(choice.token_ids):
        raise ValueError("the version spans do not cover the tokens")
    if len(choice.logprobs) != len(choice.token_ids):
        raise ValueError("not one log-probability per token")
    return choice


def _parse_span(span: Mapping[str, Any]) -> VersionSpan:
    installed = InstalledVersion(
        version_id=str(span["version_id"]),
        sequence=int(span["sequence"]),
        root_digest=str(span["root_digest"]),
        model_root=str(span.get("model_root", "")),
    )
    return VersionSpan(installed=installed, start=int(span["start"]), end=int(span["end"]))
