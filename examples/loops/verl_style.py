"""How verl moves weights, with Paceline as its checkpoint engine.

With verl, name this module as ``checkpoint_engine.custom_backend_module`` and the backend
``paceline``. Without it, ``main`` is the part of verl's worker that matters here.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from tiny import loss_of, network, settle

from paceline.refit import join_run
from paceline.refit.integrations.verl import CheckpointEngine

try:
    from verl.checkpoint_engine import CheckpointEngineRegistry
except ImportError:
    CheckpointEngineRegistry = None


class PacelineEngine(CheckpointEngine):
    """Joins the run that the environment names when there is something to send."""

    def __init__(self, *, bucket_size: int = 0, is_master: bool = False, **options: Any) -> None:
        """Take verl's arguments; ``options`` are ``engine_kwargs``, such as wire_dtypes."""
        self._joined = ExitStack()
        super().__init__(lambda tensors: self._publisher(tensors, options), is_master=is_master)

    def _publisher(self, tensors: Any, options: dict[str, Any]) -> Any:
        run = self._joined.enter_context(join_run())
        self.publisher = run.publisher(tensors, alone=True, **options)
        return self.publisher

    def close(self) -> None:
        """Leave the run."""
        super().close()
        self._joined.close()


if CheckpointEngineRegistry is not None:
    CheckpointEngineRegistry.register("paceline")(PacelineEngine)


def per_tensor_params(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors, as verl's engines do after gathering each."""
    for name, tensor in model.state_dict().items():
        yield name, tensor.clone()


async def update_weights(engine: PacelineEngine, model: torch.nn.Module, step: int) -> None:
    """Do what verl's manager does around a step."""
    engine.prepare()
    engine.init_process_group()
    await engine.send_weights(per_tensor_params(model), global_steps=step)
    engine.finalize()


def main(steps: int = 3) -> None:
    """Train as the only actor."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = PacelineEngine(is_master=True)
    try:
        asyncio.run(update_weights(engine, model, 0))
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            asyncio.run(update_weights(engine, model, step))
        settle(engine.publisher)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
