"""A run without machines: a real control service, real sources, and a trainer that is a dice."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from paceline.core.registry import load_entry
from paceline.refit import compose
from paceline.refit.control.auth import write_private_json
from paceline.refit.generators.protocol import EngineConfig
from paceline.refit.model import TensorBuffer, WeightVersion
from paceline.refit.staging.torch_bytes import byte_view
from paceline.refit.transports.registry import OBJECT_SERVERS
from paceline.testing.fakes.trainer import FakeTrainer, State, root_of
from paceline.testing.payloads import halves_payload

DATA_TOKEN = "data-token-of-a-test"  # noqa: S105


def state_of(model: torch.nn.Module) -> dict[str, TensorBuffer]:
    """Copy a model's bytes; a tied tensor appears once."""
    ties = _ties_of(model)
    views = [
        byte_view(name, tensor) for name, tensor in model.state_dict().items() if name not in ties
    ]
    return {view.name: replace(view, data=memoryview(bytes(view.data))) for view in views}


def _ties_of(model: torch.nn.Module) -> dict[str, str]:
    """Return further names of a tensor -> its first name in the state dict."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        first.setdefault(tensor.data_ptr(), name)
    return {
        name: first[tensor.data_ptr()]
        for name, tensor in model.state_dict().items()
        if first[tensor.data_ptr()] != name
    }


class SmallRun:
    """Publishes states of one transformers model, one after another."""

    def __init__(
        self,
        folder: Path,
        model: Any,
        *,
        model_dir: Path,
        draft: Any = None,
        read: Callable[[Any], State] = state_of,
    ) -> None:
        """Start the services.

        Args:
            folder: for tokens and credentials.
            model: whose parameters are published; belongs to the caller.
            model_dir: its configuration and tokenizer.
            draft: a model that is published with it, as its draft.
            read: copies a model's tensors, under the names of versions.
        """
        self._read = read
        self.model = model
        self._models = {"": model} if draft is None else {"": model, "draft.": draft}
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
        aliases = sorted(
            (prefix + further, prefix + name)
            for prefix, each in self._models.items()
            for further, name in _ties_of(each).items()
        )
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

    def publish_state(self, state: State) -> WeightVersion:
        """Publish some state whole, whatever the model is now."""
        self._advance()
        self.state = state
        return self.trainer.publish_full(self.uid, self.sequence, state)

    def publish_halves(self, *, axis: int, is_full: bool) -> WeightVersion:
        """Publish the model as two processes do that each have half of every matrix."""
        base, base_uid = self.state, self.uid
        self._advance()
        made = halves_payload(
            self.state, axis=axis, base=None if is_full else base, aliases=self.trainer.aliases
        )
        return self.trainer.publish_slots(
            self.uid, self.sequence, made, base_uid=None if is_full else base_uid
        )

    def encode_delta(self) -> Callable[[], WeightVersion]:
        """Encode the model as ``publish_delta`` does, and return what publishes it, in this order.

        For whoever measures an engine: a trainer's work is another machine's.
        """
        base, base_uid = self.state, self.uid
        self._advance()
        manifest, data = self.trainer.encode_delta(base, self.state)
        return partial(
            self.trainer.publish,
            self.uid,
            self.sequence,
            manifest,
            data,
            parent_root=manifest.base_root,
            base_uid=base_uid,
        )

    def publish_wrong(self, spoil: Callable[[dict[str, TensorBuffer]], None]) -> WeightVersion:
        """Publish a full version of a spoilt copy of the state; the run goes on from before it."""
        wrong = dict(self.state)
        spoil(wrong)
        self.sequence += 1
        return self.trainer.publish_full(f"wrong{self.sequence}", self.sequence, wrong)

    def train(self, *, share: float, seed: int) -> None:
        """Change a share of every parameter's elements, in the draft as in the model."""
        for model in self._models.values():
            self._train(model, share=share, seed=seed)

    def _train(self, model: Any, *, share: float, seed: int) -> None:
        stream = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
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
        self.state = {
            prefix + name: replace(buffer, name=prefix + name)
            for prefix, model in self._models.items()
            for name, buffer in self._read(model).items()
        }
