"""From generations to the JSON of the OpenAI protocol, with what RL needs beside it."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from paceline.refit.generators.protocol import (
    Choice,
    ChoicePiece,
    Generation,
    InstalledVersion,
    VersionSpan,
)


def render_completion(
    generations: Sequence[Generation],
    *,
    head: dict[str, object],
    token_text: Callable[[int], str] | None,
    newest: int = -1,
) -> dict[str, object]:
    """Return the answer's document.

    Args:
        generations: one per prompt; choices are numbered through in that order.
        head: id, creation time and model.
        token_text: the text of one token; None leaves ``logprobs`` null.
        newest: highest sequence published when the answer is made.
    """
    pairs = [(generation, choice) for generation in generations for choice in generation.choices]
    num_prompt = sum(len(generation.prompt_token_ids) for generation in generations)
    num_generated = sum(len(choice.token_ids) for _, choice in pairs)
    return {
        **head,
        "object": "text_completion",
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "logprobs": None if token_text is None else _logprobs(choice, token_text),
                "token_ids": choice.token_ids,
                "prompt_token_ids": generation.prompt_token_ids,
                "weight_versions": _spans(choice.spans),
                "staleness": staleness_of(choice.spans, newest=newest),
            }
            for index, (generation, choice) in enumerate(pairs)
        ],
        "usage": render_usage(num_prompt, num_generated),
    }


def render_piece(
    piece: ChoicePiece,
    *,
    index: int,
    head: dict[str, object],
    token_text: Callable[[int], str] | None,
    newest: int = -1,
) -> dict[str, object]:
    """Return one event of a stream."""
    return {
        **head,
        "object": "text_completion",
        "choices": [
            {
                "index": index,
                "text": piece.text,
                "finish_reason": piece.finish_reason,
                "logprobs": None if token_text is None else _logprobs(piece, token_text),
                "token_ids": piece.token_ids,
                "weight_versions": _spans(piece.spans),
                "staleness": staleness_of(piece.spans, newest=newest),
            }
        ],
    }


def render_usage(num_prompt: int, num_generated: int) -> dict[str, object]:
    """Return the counts of tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def staleness_of(spans: Sequence[VersionSpan], *, newest: int) -> int:
    """Return how many versions behind the newest the oldest weights behind some tokens were."""
    oldest = min((span.installed.sequence for span in spans), default=newest)
    return max(0, newest - oldest)


def render_installed(installed: InstalledVersion) -> dict[str, object]:
    """Return a version's names: three, and of a LoRA the root of the weights below it."""
    names: dict[str, object] = {
        "version_id": installed.version_id,
        "sequence": installed.sequence,
        "root_digest": installed.root_digest,
    }
    return {**names, "model_root": installed.model_root} if installed.model_root else names


def render_error(message: str, *, kind: str, field: str | None = None) -> dict[str, object]:
    """Return an error in the OpenAI protocol's shape."""
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def _spans(spans: Sequence[VersionSpan]) -> list[dict[str, object]]:
    return [
        {**render_installed(span.installed), "start": span.start, "end": span.end} for span in spans
    ]


def _logprobs(choice: Choice | ChoicePiece, token_text: Callable[[int], str]) -> dict[str, object]:
    tokens = [token_text(token_id) for token_id in choice.token_ids]
    offsets = accumulate((len(token) for token in tokens), initial=0)
    return {
        "tokens": tokens,
        "token_logprobs": choice.logprobs,
        "top_logprobs": None,
        "text_offset": list(offsets)[:-1],
    }
