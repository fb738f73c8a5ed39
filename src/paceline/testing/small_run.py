"""A run without machines: a real control service, real sources, and a trainer that is a dice."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from paceline.core.registry import load_entry
from paceline.refit import compose
from paceline.refit.control.auth import write_private_json
from paceline.refit.generators.protocol import EngineConfig
from paceline.refit.generators.transformers.sets import view_named
from paceline.refit.model import TensorBuffer, WeightVersion
from paceline.refit.transports.registry import OBJECT_SERVERS
from paceline.testing.fakes.trainer import FakeTrainer, State, root_of

DATA_TOKEN = "data-token-of-a-test"  # noqa: S105


def state_of(model: torch.nn.Module) -> dict[str, TensorBuffer]:
    """Copy a model's bytes, named as in files; a tied tensor appears once."""
    views = view_named(model, "checkpoint").buffers
    return {name: replace(view, data=memoryview(bytes(view.data))) for name, view in views.items()}


class SmallRun:
    """Publishes states of one transformers model, one after another."""

    def __init__(self, folder: Path, model: Any, *, model_dir: Path) -> None:
        """Start the services.

        Args:
            folder: for tokens and credentials.
            model: whose parameters are published; belongs to the caller.
            model_dir: its configuration and tokenizer.
        """
        self.model = model
        self._folder = folder
        self._parts = ExitStack()
        tokens = compose.create_token_file(folder / "tokens.json")
        service = compose.start_control_server(token_file=folder / "tokens.json")
        self._parts.callback(service.stop)
        self.control = compose.connect_control(service.address, token=tokens["operator"])
        self._parts.callback(self.control.close)
        credentials = folder / "credentials.json"
        fields = {
            "role": "generator",
            "control_token": tokens["generator"],
            "data_token": DATA_TOKEN,
        }
        write_private_json(credentials, fields)
        server_class: Any = load_entry(OBJECT_SERVERS, "http", port="transport")
        server = server_class(token=lambda: DATA_TOKEN)
        self._parts.callback(server.close)
        aliases = tuple(sorted(view_named(model, "checkpoint").aliases.items()))
        self.trainer = FakeTrainer(self.control, server, aliases=aliases, chunk_bytes=None)
        self.config = compose.EngineServiceConfig(
            engine=EngineConfig(model_dir=model_dir),
            engine_name="vllm",
            control=service.address,
            model_name="m",
            run_id="r",
            credentials=credentials,
        )
        self.sequence = -1
        self.uid = ""
        self.state: State = {}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the services."""
        self._parts.close()

    @property
    def root(self) -> str:
        """The root digest of the newest state."""
        return root_of(self.state)

    def publish_full(self) -> WeightVersion:
        """Publish the model as it is, whole."""
        self._advance()
        return self.trainer.publish_full(self.uid, self.sequence, self.state)

    def publish_delta(self) -> WeightVersion:
        """Publish the model as it is, as the change since what was published before."""
        base, base_uid = self.state, self.uid
        self._advance()
        return self.trainer.publish_delta(
            self.uid, self.sequence, base, self.state, base_uid=base_uid
        )

    def publish_wrong(self, spoil: Callable[[dict[str, TensorBuffer]], None]) -> WeightVersion:
        """Publish a full version of a spoilt copy of the state; the run goes on from before it."""
        wrong = dict(self.state)
        spoil(wrong)
        self.sequence += 1
        return self.trainer.publish_full(f"wrong{self.sequence}", self.sequence, wrong)

    def train(self, *, share: float, seed: int) -> None:
        """Change a share of every parameter's elements."""
        stream = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                flat = parameter.view(-1)
                count = max(1, int(len(flat) * share))
                chosen = torch.randperm(len(flat), generator=stream)[:count]
                noise = torch.randn(count, generator=stream).to(flat.dtype)
                flat[chosen] += 0.3 * noise

    def save(self, folder: Path) -> Path:
        """Write the model as a checkpoint that any engine loads; returns the place."""
        self.model.save_pretrained(folder)
        return folder

    def _advance(self) -> None:
        self.sequence += 1
        self.uid = f"v{self.sequence}"
        self.state = state_of(self.model)
