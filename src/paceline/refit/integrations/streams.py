"""Weights that a framework hands over as a stream of names and whole tensors.

Frameworks that gather a model tensor by tensor give nothing that a publisher could bind: each
tensor is gone when the next one comes. So the newest of each is kept in host memory, which costs
one copy of the weights there, and that is what is bound.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from paceline.refit.errors import PublishError


class Ends(Protocol):
    """The part of a publication that is waited for."""

    def result(self) -> Any:
        """Wait until the version is READY."""
        ...


class Publishes(Protocol):
    """The part of a publisher that is used here."""

    def start(self) -> None:
        """Join the run."""
        ...

    def publish(self, *, step: int) -> Ends:
        """Publish the weights as they are now."""
        ...

    def close(self) -> None:
        """Leave the run."""
        ...


class StreamPublisher:
    """Publishes what the last stream said, from the one process that keeps it."""

    def __init__(
        self, publisher_of: Callable[[Mapping[str, torch.Tensor]], Publishes], *, keeps: bool = True
    ) -> None:
        """Do nothing yet.

        Args:
            publisher_of: makes a publisher of named tensors, such as
                ``lambda tensors: run.publisher(tensors, alone=True)``; called once.
            keeps: whether this process publishes; the others only help to gather.
        """
        self._publisher_of = publisher_of
        self._keeps = keeps
        self._tensors: dict[str, torch.Tensor] = {}
        self._publisher: Publishes | None = None

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], *, step: int) -> Ends | None:
        """Take every tensor of a stream, and begin to publish; None from a process that only helps.

        The stream is used up in any case, since gathering takes every process.

        Raises:
            PublishError: the stream has other tensors than the first one had; nothing is published.
        """
        seen = dict.fromkeys(name for name, tensor in weights if self._keep(name, tensor))
        if not self._keeps:
            return None
        if missing := self._tensors.keys() - seen.keys():
            raise PublishError(f"{len(missing)} tensors did not come, such as {min(missing)!r}")
        if self._publisher is None:
            publisher = self._publisher_of(self._tensors)
            publisher.start()
            self._publisher = publisher
        return self._publisher.publish(step=step)

    def close(self) -> None:
        """Leave the run; idempotent."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None

    def _keep(self, name: str, tensor: torch.Tensor) -> bool:
        if not self._keeps:
            return False
        there = self._tensors.get(name)
        if there is None:
            if self._publisher is not None:
                raise PublishError(f"tensor {name!r} was not in the first stream")
            there = self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
            raise PublishError(
                f"tensor {name!r} came as {tensor.dtype}{list(tensor.shape)} and was "
                f"{there.dtype}{list(there.shape)}"
            )
        there.copy_(tensor.detach())
        return True
