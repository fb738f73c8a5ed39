"""A choice's tokens as server-sent events, from the engine's thread to the asker's connection."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from paceline.core.errors import PacelineError
from paceline.refit.errors import EngineNotReadyError
from paceline.refit.generators.protocol import ChoicePiece, Generation, OnPiece
from paceline.refit.serving.response import render_piece, render_usage

DONE = b"data: [DONE]\n\n"


class AbandonedError(PacelineError):
    """Whoever asked has gone, or the time for one request is over."""


class PieceQueue:
    """Pieces of one request's choices, in the order in which the engine made them."""

    def __init__(self, *, num_choices: int) -> None:
        """Belong to the running event loop; ``num_choices`` is that of each prompt."""
        self._loop = asyncio.get_running_loop()
        self._num_choices = num_choices
        self._queue: asyncio.Queue[tuple[int, ChoicePiece] | None] = asyncio.Queue()

    def sink(self, prompt_index: int) -> OnPiece:
        """Return what takes the pieces of one prompt, from any thread.

        Raises RuntimeError there when the loop has ended.
        """
        first = prompt_index * self._num_choices

        def take(piece: ChoicePiece) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (first + piece.index, piece))

        return take

    async def events(
        self,
        futures: Sequence["Future[Generation]"],
        *,
        newest: Callable[[], int],
        wants_usage: bool,
        timeout_s: float,
        **rendering: Any,
    ) -> AsyncGenerator[bytes, None]:
        """Yield an event for every piece, then usage if wanted, then the end.

        Raises:
            AbandonedError: not done within ``timeout_s``.
            GenerationError, EngineNotReadyError: the engine stopped in the middle.
        """
        work = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        work.add_done_callback(lambda _: self._queue.put_nowait(None))
        deadline = self._loop.time() + timeout_s
        try:
            while (found := await self._next(deadline)) is not None:
                index, piece = found
                event = render_piece(piece, index=index, newest=newest(), **rendering)
                yield render_event(event)
            generations = [_result(each) for each in work.result()]
        finally:
            work.cancel()
        if wants_usage:
            yield render_event(_usage(generations, rendering["head"]))
        yield DONE

    async def _next(self, deadline: float) -> tuple[int, ChoicePiece] | None:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._queue.get()
        except TimeoutError as exc:
            raise AbandonedError("not done within the time for one request") from exc


def render_event(document: dict[str, object]) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def _result(outcome: Generation | BaseException) -> Generation:
    if isinstance(outcome, asyncio.CancelledError):
        raise EngineNotReadyError("the request was cancelled") from outcome
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _usage(generations: Sequence[Generation], head: dict[str, object]) -> dict[str, object]:
    num_prompt = sum(len(each.prompt_token_ids) for each in generations)
    num_generated = sum(len(one.token_ids) for each in generations for one in each.choices)
    usage = render_usage(num_prompt, num_generated)
    return {**head, "object": "text_completion", "choices": [], "usage": usage}
