"""The trainer's half of a `verl` checkpoint engine: actors send, engines of a run follow.

`verl` (seen with 0.7) asks a checkpoint engine to send a stream of whole tensors from the actors
and to receive one in the rollout workers. Rollout engines of a run read versions by themselves, so
the receiving half has nothing to hand over; it says so with an empty stream.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline.refit.integrations.streams import Publishes, StreamPublisher


class CheckpointEngine:
    """Has the methods of verl's CheckpointEngine; register a subclass that knows the run."""

    wire_format = "named_tensors"

    def __init__(
        self,
        publisher_of: Callable[[Mapping[str, torch.Tensor]], Publishes],
        *,
        is_master: bool = False,
    ) -> None:
        """Take what makes the publisher; verl says of one actor that it is the master."""
        self._stream = StreamPublisher(publisher_of, keeps=is_master)
        self._steps = 0

    def prepare(self) -> dict[str, Any]:
        """Return nothing that others would need to know."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return no topology: engines and trainer find each other through the control service."""
        return {}, {}

    def init_process_group(self, **_: object) -> None:
        """Do nothing: there is no group."""

    def finalize(self) -> None:
        """Do nothing: versions stay fetchable after the step."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Publish a stream of whole tensors; returns when the version is READY.

        Raises:
            PublishError: it could not be made fetchable; the version before is still served.
        """
        self._steps = self._steps + 1 if global_steps is None else global_steps
        publication = self._stream.send(weights, step=self._steps)
        if publication is not None:
            await asyncio.to_thread(publication.result)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield nothing: the engine beside this worker installs versions itself."""
        nothing: tuple[tuple[str, torch.Tensor], ...] = ()
        for each in nothing:
            yield each

    def close(self) -> None:
        """Leave the run; idempotent."""
        self._stream.close()
