"""The rollout engines that there are keep the contract, the fake one included."""

from collections.abc import Mapping

from contracts.engines import TinySglang, TinyTransformers
from paceline.refit.generators.protocol import RolloutEngine
from paceline.refit.model import TensorBuffer
from paceline.testing.contracts.generator import RolloutEngineContract
from paceline.testing.fakes.generator import FakeGenerator


class TestTransformers(TinyTransformers, RolloutEngineContract):
    """The embedded engine, with its weights held once."""


class TestTransformersTwice(TinyTransformers, RolloutEngineContract):
    """The same with its weights held twice."""

    weights_held = "twice"


class TestSglang(TinySglang, RolloutEngineContract):
    """The stand-in for an SGLang server."""


class TestFake(RolloutEngineContract):
    """What tests of the receiver and of the routes stand on."""

    def make(self) -> RolloutEngine:
        data = memoryview(bytearray(8))
        return FakeGenerator([TensorBuffer(name="w", dtype="F32", shape=(2,), data=data)])

    def weights(self) -> Mapping[str, bytes]:
        return {"w": bytes(range(8))}
