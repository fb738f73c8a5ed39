"""Engines that contracts are held against: how each is made, and weights that make sense for it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from paceline.refit.generators.protocol import EngineConfig, RolloutEngine
from paceline.refit.generators.sglang.engine import SglangEngine
from paceline.refit.generators.transformers.engine import TransformersEngine
from paceline.system import system_clock
from paceline.testing.fakes.sglang import FakeSglang
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3
from refit.generators.test_sglang import SIZE, write_checkpoint


class TinyTransformers:
    """A tiny Qwen3 with tied embeddings, in fp32 on the CPU."""

    model_dir: Path
    weights_held = "once"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.model_dir = write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))

    def make(self) -> RolloutEngine:
        """Return a fresh engine."""
        config = EngineConfig(model_dir=self.model_dir, dtype="float32", weights=self.weights_held)
        return TransformersEngine(config, clock=system_clock(), new_seed=lambda: 99)

    def weights(self) -> Mapping[str, bytes]:
        """Return weights by name."""
        state = tiny_model(self.model_dir, seed=1, dtype=torch.float32).state_dict()
        return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


class TinySglang:
    """A stand-in for the server, real sockets, and a checkpoint on disk."""

    model_dir: Path
    server: FakeSglang

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.model_dir = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
        cls.server = FakeSglang(cls.model_dir, vocabulary_size=SIZE)
        yield
        cls.server.close()

    def make(self) -> RolloutEngine:
        """Return a fresh engine before the server."""
        config = EngineConfig(model_dir=self.model_dir, url=self.server.url)
        return SglangEngine(config, clock=system_clock(), new_seed=lambda: 99)

    def weights(self) -> Mapping[str, bytes]:
        """Return weights by name."""
        state = tiny_model(self.model_dir, seed=1).state_dict()
        return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}
