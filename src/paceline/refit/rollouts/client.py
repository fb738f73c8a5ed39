"""The client: prompts go out as engines have room, and every prompt ends in its choices.

An engine that fails costs a prompt some time and nothing else: the prompt goes to another one. A
stream that breaks goes on elsewhere behind the tokens that have arrived.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from paceline.core.clock import AsyncClock
from paceline.core.errors import DeadlineExceededError
from paceline.refit.errors import (
    EngineBusyError,
    EngineNotReadyError,
    RefitError,
    StaleVersionError,
)
from paceline.refit.generators.protocol import Choice, Sampling
from paceline.refit.rollouts.asking import EngineCalls
from paceline.refit.rollouts.model import (
    Completion,
    EngineFailedError,
    Fleet,
    Piece,
    RolloutConfig,
    Want,
    oldest_sequence,
)
from paceline.refit.rollouts.resuming import Progress
from paceline.refit.rollouts.roster import Picked, Roster
from paceline.refit.rollouts.routing import may_hedge

log = logging.getLogger(__name__)


class AsyncRolloutClient:
    """Sends prompts to the engines of one run; used from one event loop."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        fleet: Callable[[], Fleet],
        clock: AsyncClock,
        chance: Callable[[], float],
    ) -> None:
        """Take the parts; opens nothing.

        Args:
            config: see there.
            fleet: who lives and what is newest; asked at most every ``poll_interval_s``, in a
                thread.
            clock: for waits.
            chance: places delays inside their jitter.
        """
        self._config = config
        self._clock = clock
        self._chance = chance
        self._roster = Roster(config, fleet=fleet, clock=clock)
        self._calls = EngineCalls(config)
        self._room = asyncio.Semaphore(config.parallel)
        self._prompts = 0
        self._hedges = 0
        self._is_closing = False

    async def complete(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        version_id: str | None = None,
    ) -> list[list[Completion]]:
        """Return ``sampling.n`` completions for each prompt, in the order of the prompts.

        With a seed, each prompt gets one of its own, so that equal prompts differ. Cancelling
        frees the places at the engines.

        Raises:
            DeadlineExceededError: no engine qualified for too long.
            StaleVersionError: engines kept answering with other weights than allowed.
            EngineFailedError, EngineBusyError, EngineNotReadyError: one prompt failed that way on
                engine after engine.
            UsageError: an engine refused the request itself.
            AccessRefusedError: the token is wrong.
        """
        async with aclosing(self.complete_each(prompts, sampling, version_id=version_id)) as each:
            answers = {at: completions async for at, completions in each}
        return [answers[at] for at in range(len(prompts))]

    async def complete_each(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: Sampling,
        *,
        version_id: str | None = None,
    ) -> AsyncGenerator[tuple[int, list[Completion]], None]:
        """Yield (index, completions) as prompts finish; takes prompts only as there is room.

        Raises as ``complete``; what is in flight is then cancelled.
        """
        coming = enumerate(prompts)
        tasks: dict[asyncio.Task[list[Completion]], int] = {}
        try:
            while True:
                while len(tasks) < self._config.parallel:
                    at, prompt = next(coming, (-1, ()))
                    if at < 0:
                        break
                    want = Want(
                        prompt=tuple(prompt),
                        sampling=sampling.for_prompt(at),
                        version_id=version_id,
                    )
                    tasks[asyncio.create_task(self._complete_one(want))] = at
                if not tasks:
                    return
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield tasks.pop(task), task.result()
        finally:
            await _cancel(tasks)

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, version_id: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the tokens of one choice as they come, across the death of engines.

        Each piece says which versions its tokens come from. After a break the next engine goes
        on from the tokens that are there, with random numbers of its own. Raises as ``complete``.
        """
        want = Want(prompt=tuple(prompt), sampling=replace(sampling, n=1), version_id=version_id)
        progress = Progress(want)
        tries, tried = 0, set[str]()
        async with self._room:
            while not progress.is_done:
                rest = progress.next_want()
                picked = await self._wait_for_engine(rest)
                try:
                    await self._pause(tries if picked.worker_id in tried else 0)
                    async with aclosing(self._calls.stream(picked, rest)) as pieces:
                        async for piece in pieces:
                            self._check_piece(picked, piece, want)
                            yield progress.take(piece)
                except _ELSEWHERE as exc:
                    tries += 1
                    self._note_failure(picked, exc, tries=tries)
                    tried.add(picked.worker_id)
                finally:
                    self._roster.give_back(picked)

    async def close(self) -> None:
        """End waits and give connections back. Idempotent."""
        self._is_closing = True
        await self._roster.close()
        await self._calls.close()

    async def _complete_one(self, want: Want) -> list[Completion]:
        tries, tried = 0, set[str]()
        async with self._room:
            self._prompts += 1
            while True:
                picked = await self._wait_for_engine(want)
                try:
                    await self._pause(tries if picked.worker_id in tried else 0)
                    return await self._ask_hedged(picked, want)
                except _ELSEWHERE as exc:
                    tries += 1
                    self._note_failure(picked, exc, tries=tries)
                    tried.add(picked.worker_id)
                finally:
                    self._roster.give_back(picked)

    async def _wait_for_engine(self, want: Want) -> Picked:
        deadline = self._clock.monotonic() + self._config.engine_wait_s
        while True:
            picked = await self._roster.take(want)
            if isinstance(picked, Picked):
                return picked
            if self._is_closing or self._clock.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"no rollout engine qualified within {self._config.engine_wait_s:g} s: {picked}"
                )
            await self._clock.sleep(self._config.poll_interval_s)

    async def _pause(self, tries: int) -> None:
        """Wait before an engine that has failed this prompt is asked again."""
        if tries:
            delay_s = self._config.retry.delay_s(tries, chance=self._chance())
            await self._clock.sleep(delay_s or 0)

    def _note_failure(self, picked: Picked, error: RefitError, *, tries: int) -> None:
        """Leave the engine alone for a while; raise ``error`` if that was the last try."""
        is_broken = isinstance(error, EngineFailedError)
        self._roster.avoid(
            picked, seconds=self._config.avoid_s if is_broken else self._config.busy_s
        )
        if tries >= self._config.retry.attempts:
            raise error
        log.info("a prompt goes to another engine: %s", error)

    async def _ask_hedged(self, picked: Picked, want: Want) -> list[Completion]:
        """Ask one engine, and a second one too if the first takes long; the first answer counts."""
        if self._config.hedge_after_s is None:
            return await self._ask(picked, want)
        first = asyncio.create_task(self._ask(picked, want))
        timer = asyncio.ensure_future(self._clock.sleep(self._config.hedge_after_s))
        try:
            await asyncio.wait({first, timer}, return_when=asyncio.FIRST_COMPLETED)
            is_late = not first.done()
            may = may_hedge(hedges=self._hedges, prompts=self._prompts, config=self._config)
            if is_late and may:
                return await self._ask_both(first, picked, want)
            return await first
        finally:
            await _cancel([first, timer])

    async def _ask_both(
        self, first: "asyncio.Task[list[Completion]]", picked: Picked, want: Want
    ) -> list[Completion]:
        other = await self._roster.take(want, except_for={picked.worker_id})
        if not isinstance(other, Picked):
            return await first
        self._hedges += 1
        second = asyncio.create_task(self._ask(other, want))
        try:
            done, rest = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    return task.result()
            if rest:
                return await rest.pop()
            return await first
        finally:
            await _cancel([second])
            self._roster.give_back(other)

    async def _ask(self, picked: Picked, want: Want) -> list[Completion]:
        choices = await self._calls.complete(picked, want)
        newest = await self._roster.newest()
        return [self._completion(choice, picked, want, newest=newest) for choice in choices]

    def _completion(self, choice: Choice, picked: Picked, want: Want, *, newest: int) -> Completion:
        oldest = oldest_sequence(choice)
        self._check_version(picked, want, oldest, {s.installed.version_id for s in choice.spans})
        return Completion(
            prompt_token_ids=want.prompt,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            text=choice.text,
            finish_reason=choice.finish_reason,
            spans=choice.spans,
            staleness=max(0, newest - oldest),
            engine_id=picked.worker_id,
        )

    def _check_piece(self, picked: Picked, piece: Piece, want: Want) -> None:
        if piece.spans:
            oldest = min(span.installed.sequence for span in piece.spans)
            found = {span.installed.version_id for span in piece.spans}
            self._check_version(picked, want, oldest, found)

    def _check_version(
        self, picked: Picked, want: Want, oldest: int, version_ids: set[str]
    ) -> None:
        """Refuse an answer by other weights than were asked for."""
        if want.version_id is not None:
            if version_ids != {want.version_id}:
                raise StaleVersionError(
                    f"engine {picked.worker_id} answered with version "
                    f"{', '.join(sorted(version_ids))}; only {want.version_id} is wanted"
                )
            return
        floor = picked.newest - self._config.max_staleness
        if oldest < floor:
            raise StaleVersionError(
                f"engine {picked.worker_id} answered with sequence {oldest}; {floor} was the "
                "oldest allowed; it is asked again when it has caught up"
            )


_ELSEWHERE = (EngineBusyError, EngineNotReadyError, StaleVersionError, EngineFailedError)
"""What another engine may do better, or the same one later."""


async def _cancel(tasks: "Iterable[asyncio.Future[Any]]") -> None:
    """Cancel and wait, so that places and connections are free when this returns."""
    found = list(tasks)
    for task in found:
        task.cancel()
    if found:
        await asyncio.gather(*found, return_exceptions=True)
