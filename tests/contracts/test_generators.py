"""The rollout engines that there are keep the contract, the fake one included."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from paceline.refit.generators.protocol import EngineConfig, RolloutEngine
from paceline.refit.generators.sglang.engine import SglangEngine
from paceline.refit.generators.transformers.engine import TransformersEngine
from paceline.refit.model import TensorBuffer
from paceline.system import system_clock
from paceline.testing.contracts.generator import RolloutEngineContract
from paceline.testing.fakes.generator import FakeGenerator
from paceline.testing.fakes.sglang import FakeSglang
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3
from refit.generators.test_sglang import SIZE, write_checkpoint


class TestTransformers(RolloutEngineContract):
    """A tiny Qwen3 with tied embeddings, in fp32 on the CPU."""

    weights_held = "once"

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.model_dir = write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))

    def make(self) -> RolloutEngine:
        config = EngineConfig(
            model_dir=Path(self.model_dir), dtype="float32", weights=self.weights_held
        )
        return TransformersEngine(config, clock=system_clock(), new_seed=lambda: 99)

    def weights(self) -> Mapping[str, bytes]:
        state = tiny_model(self.model_dir, seed=1, dtype=torch.float32).state_dict()
        return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


class TestTransformersTwice(TestTransformers):
    """The same with its weights held twice."""

    weights_held = "twice"


class TestSglang(RolloutEngineContract):
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
        config = EngineConfig(model_dir=self.model_dir, url=self.server.url)
        return SglangEngine(config, clock=system_clock(), new_seed=lambda: 99)

    def weights(self) -> Mapping[str, bytes]:
        state = tiny_model(self.model_dir, seed=1).state_dict()
        return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


class TestFake(RolloutEngineContract):
    """What tests of the receiver and of the routes stand on."""

    def make(self) -> RolloutEngine:
        data = memoryview(bytearray(8))
        return FakeGenerator([TensorBuffer(name="w", dtype="F32", shape=(2,), data=data)])

    def weights(self) -> Mapping[str, bytes]:
        return {"w": bytes(range(8))}
