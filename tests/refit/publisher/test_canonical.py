"""Canonical versions are complete before anybody is told, and failures leave the one before."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from paceline.refit.delta import canonical
from paceline.refit.delta.canonical import FullTensor
from paceline.refit.errors import ControlUnavailableError, PublishError
from paceline.refit.model import VersionState
from paceline.refit.publisher import CanonicalPublisher, PublisherOptions
from paceline.refit.publisher.canonical import INDEX, delta_files, full_files
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.control_plane import FakeControlPlane


class Keys:
    """A bucket in memory that may fail at its n-th key."""

    url = "s3://bucket/run"

    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}
        self.fail_in = 0

    def put_new(self, key: str, parts: Sequence[memoryview]) -> None:
        """Write once."""
        self.fail_in -= 1
        if self.fail_in == 0:
            raise PublishError("the bucket is away")
        assert key not in self.written
        self.written[key] = b"".join(parts)


class World:
    """A trainer of one tensor, its publisher and its bucket."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.weights = {"w": torch.arange(100.0)}
        self.control = FakeControlPlane(clock=self.clock)
        self.keys = Keys()
        self.trainer = TorchModuleTrainer(clock=self.clock, arenas=2)
        self.trainer.bind_tensors(self.weights)
        self.publisher = self.start()

    def start(self) -> CanonicalPublisher:
        """Start a publisher of this run."""
        options = PublisherOptions(model_name="m", run_id="r", worker_id="t", anchor_every=100)
        publisher = CanonicalPublisher(
            control=self.control,
            trainer=self.trainer,
            bucket=self.keys,
            clock=self.clock,
            options=options,
        )
        publisher.start()
        return publisher

    def publish(self) -> str:
        """Change an element and publish."""
        self.weights["w"][3] += 1
        return self.publisher.publish(step=0).result().version_id

    def state(self, uid: str) -> VersionState:
        return self.control.get_version(uid).state


@pytest.mark.parametrize("fail_in", [1, 2])
def test_a_bucket_that_fails_costs_one_version(fail_in: int) -> None:
    """The version is retired, its name not used again, and what follows needs nothing of it."""
    world = World()
    world.publish()
    world.keys.fail_in = fail_in
    with pytest.raises(PublishError, match="away"):
        world.publish()
    assert world.state("r-000001") is VersionState.RELEASING
    assert world.publish() == "r-000002"
    assert world.state("r-000002") is VersionState.READY
    assert world.control.get_version("r-000002").base_version_id is None
    world.publish()
    assert world.control.get_version("r-000003").base_version_id == "r-000002"


def test_nobody_is_told_before_the_index_is_there() -> None:
    """The index comes last, READY after it; a control service that is silent is waited for."""
    world = World()
    world.publish()
    assert list(world.keys.written) == [
        "r-000000/model-00001-of-00001.safetensors",
        f"r-000000/{INDEX}",
    ]
    world.control.fail("update_version_state", ControlUnavailableError("silent"), times=10_000)
    with pytest.raises(ControlUnavailableError):
        world.publish()
    assert f"r-000001/{INDEX}" in world.keys.written
    assert world.state("r-000001") is VersionState.STAGING


def test_a_publisher_that_starts_again_goes_on_with_a_checkpoint() -> None:
    """Sequences of the run are not used again; arenas came back with the one before."""
    world = World()
    world.publish()
    world.publish()
    world.publisher.close()
    world.publisher.close()
    with pytest.raises(PublishError, match="closed"):
        world.publish()
    world.publisher = world.start()
    assert world.publish() == "r-000002"
    assert world.control.get_version("r-000002").base_version_id is None


def test_shards_of_a_checkpoint_are_bounded() -> None:
    """Tensors are kept whole, a large one has a shard of its own, the index knows all."""
    random = np.random.default_rng(0)
    tensors = {
        name: FullTensor(dtype="U8", shape=(size,), data=random.bytes(size))
        for name, size in (("a", 40), ("b", 60), ("c", 500), ("d", 10))
    }
    files = dict(full_files(tensors, shard_bytes_max=100))
    assert list(files)[-1] == INDEX
    names = canonical.parse_full_index(files[INDEX])
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 1, 2, 3)]
    assert names == dict(zip("abcd", shards, strict=True))
    for shard in set(shards):
        mine = [name for name, where in names.items() if where == shard]
        found = canonical.parse_full_shard(memoryview(files[shard]), mine)
        assert all(bytes(found[name].data) == tensors[name].data for name in mine)
    assert json.loads(files[INDEX])["metadata"]["total_size"] == 610


def test_equal_weights_are_an_index_alone() -> None:
    """As the format has it."""
    tensors = {"a": FullTensor(dtype="U8", shape=(2,), data=b"ab")}
    assert [name for name, _ in delta_files(tensors, tensors, version="b", base_version="a")] == [
        INDEX
    ]
