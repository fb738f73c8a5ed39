"""The client for code without an event loop: the same, on a loop in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, Self, TypeVar

from paceline.core.clock import AsyncClock
from paceline.core.errors import DeadlineExceededError
from paceline.refit.generators.protocol import Sampling
from paceline.refit.rollouts.client import AsyncRolloutClient
from paceline.refit.rollouts.model import Completion, Fleet, Piece, RolloutConfig

T = TypeVar("T")

CLOSE_S = 30.0
"""Longer than one call of the control service may take."""


class RolloutClient:
    """Sends prompts to the engines of one run. Safe to use from several threads."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        fleet: Callable[[], Fleet],
        clock: AsyncClock,
        chance: Callable[[], float],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the parts of AsyncRolloutClient; ``on_close`` runs when this is closed."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()
        self._on_close = on_close
        self._client = self._do(_made(config, fleet=fleet, clock=clock, chance=chance))
        self._closing = threading.Lock()
        self._is_closed = False

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        version_id: str | None = None,
    ) -> list[list[Completion]]:
        """Return ``sampling.n`` completions for each prompt, see AsyncRolloutClient.complete."""
        return self._do(self._client.complete(prompts, sampling, version_id=version_id))

    def complete_each(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: Sampling,
        *,
        version_id: str | None = None,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (index, completions) as prompts finish, see AsyncRolloutClient.complete_each.

        ``prompts`` is read in the client's thread.
        """
        return self._each(self._client.complete_each(prompts, sampling, version_id=version_id))

    def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, version_id: str | None = None
    ) -> Iterator[Piece]:
        """Yield the tokens of one choice as they come, see AsyncRolloutClient.stream."""
        return self._each(self._client.stream(prompt, sampling, version_id=version_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End waits and give connections back; what waits fails. Idempotent."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._on_close()
            self._do(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)

    async def _close(self) -> None:
        await self._client.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end; whoever stops waiting stops the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError as exc:
            raise DeadlineExceededError("the rollout client was closed") from exc
        except BaseException:
            future.cancel()
            raise

    def _each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        async def advance() -> tuple[T, ...]:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return ()

        async def leave() -> None:
            await items.aclose()

        try:
            while found := self._do(advance()):
                yield found[0]
        finally:
            if not self._is_closed:
                self._do(leave())


async def _made(config: RolloutConfig, **parts: Any) -> AsyncRolloutClient:
    """Build the client inside the loop that it belongs to."""
    return AsyncRolloutClient(config, **parts)
