"""An engine with weights on a device follows like any other; here host memory is the device."""

from collections.abc import Mapping

import torch

from paceline.refit.generators.protocol import EngineState
from paceline.refit.staging.torch_bytes import WORD_DTYPES
from paceline.testing.fakes.generator import FakeGenerator
from refit.receiver.test_receiver import ALIASES, World, make_states


class DeviceGenerator(FakeGenerator):
    """Weights in tensors of their own; what FakeGenerator has are the copies."""

    def __init__(self) -> None:
        super().__init__(list(make_states(5)[4].values()), aliases=dict(ALIASES))
        self.tensors = {
            name: torch.zeros(item.shape, dtype=WORD_DTYPES[item.dtype])
            for name, item in self.live_tensors().items()
        }

    def device_tensors(self) -> Mapping[str, torch.Tensor]:
        """Sign SupportsDeviceTensors."""
        return self.tensors

    def device_bytes(self) -> dict[str, bytes]:
        """Return what is on the device."""
        return {
            name: item.reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, item in self.tensors.items()
        }


def test_the_device_follows_and_is_proven() -> None:
    """Every version arrives on the device too; what it loses is found and replaced whole."""
    world = World()
    engine = DeviceGenerator()
    receiver = world.follow(engine, "gen-1")
    for at in range(3):
        world.publish(at, first=at)
        world.settle(receiver, rounds=2)
        world.assert_serves(at, engine)
        assert engine.device_bytes() == engine.live_bytes()
    engine.tensors["table"][3] ^= 1  # no delta touches it: the check of all live bytes finds it
    world.publish(3, first=3)
    receiver.step()
    assert engine.installed() is None
    assert receiver.health().state is EngineState.FAILED
    world.trainer.publish_full("v3-full", 3, make_states(5)[3])
    world.settle(receiver, rounds=100)
    world.assert_serves(3, engine)
    assert engine.device_bytes() == engine.live_bytes()
