"""Versions of two trainer processes in one engine: both halves of a version, or none of it."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.refit.errors import ApplyError, FetchError, VerifyError
from paceline.refit.generators.protocol import GeneratorEngineAdapter
from paceline.refit.model import Shard, TensorBuffer
from paceline.refit.publisher import Publisher
from paceline.refit.receiver.fetch import Fetcher, FetchParts
from paceline.refit.receiver.gathering import Turns, fetch_slots
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.transports.memory import MemoryObjectReader
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.generator import FakeGenerator
from paceline.testing.payloads import full_payload
from refit.publisher.test_together import ROWS, World

EMPTY = TensorBuffer(name="w", dtype="F32", shape=(ROWS, 5), data=memoryview(bytearray(ROWS * 20)))


class DeviceGenerator(FakeGenerator):
    """Weights in tensors of their own; what FakeGenerator has are the copies."""

    def __init__(self) -> None:
        super().__init__([EMPTY])
        self.tensors = {"w": torch.zeros(ROWS, 5)}

    def device_tensors(self) -> dict[str, torch.Tensor]:
        return self.tensors


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for publisher in made.started:
        publisher.close()


def follow(
    world: World, engine: GeneratorEngineAdapter, reader: MemoryObjectReader | None = None
) -> Receiver:
    """Return what keeps an engine up to date."""
    return Receiver(
        ReceiverConfig(worker_id="g", model_name="m", run_id="run", endpoint="x"),
        control=world.control,
        engine=engine,
        reader=reader or MemoryObjectReader(),
        clock=world.clock,
        chance=lambda: 0.0,
    )


def settle(receiver: Receiver, world: World) -> None:
    """Let the receiver do what there is to do."""
    for _ in range(20):
        if not receiver.step():
            world.clock.advance(1)


def weights(*ranks: Publisher) -> bytes:
    """What the processes hold together."""
    halves = [rank._trainer.weights for rank in ranks]  # type: ignore[attr-defined]
    return torch.cat(halves).numpy().tobytes()


@pytest.mark.parametrize("kind", ["host", "device"])
def test_an_engine_holds_both_halves(world: World, kind: str) -> None:
    """A full version, then deltas; the label is the root of both slots."""
    engine = DeviceGenerator() if kind == "device" else FakeGenerator([EMPTY])
    a, b = world.rank("a"), world.rank("b")
    receiver = follow(world, engine)
    for step in range(3):
        published = world.together(a, b, step=step)[0]
        settle(receiver, world)
        installed = engine.installed()
        assert installed is not None
        assert (installed.sequence, installed.root_digest) == (step, published.root_digest)
        assert engine.live_bytes()["w"] == weights(a, b)
        if isinstance(engine, DeviceGenerator):
            assert engine.tensors["w"].numpy().tobytes() == weights(a, b)


def test_a_failure_between_the_halves_leaves_the_version_before(world: World) -> None:
    engine = FakeGenerator([EMPTY])
    a, b = world.rank("a"), world.rank("b")
    receiver = follow(world, engine)
    world.together(a, b, step=0)
    settle(receiver, world)
    before = engine.live_bytes()

    def fail() -> None:
        raise ApplyError("the pass does not end")

    engine.before_write = fail
    world.together(a, b, step=1)
    settle(receiver, world)
    assert engine.live_bytes() == before
    engine.before_write = lambda: None
    settle(receiver, world)
    assert engine.live_bytes()["w"] == weights(a, b)


class HalfReader(MemoryObjectReader):
    """Does not reach one of the sources."""

    unreachable = ""

    def read_manifest(self, endpoint: str, *, size_max: int, timeout_s: float) -> bytes:
        if self.unreachable and endpoint.startswith(self.unreachable):
            raise FetchError(f"{endpoint} is away")
        return super().read_manifest(endpoint, size_max=size_max, timeout_s=timeout_s)


def test_half_a_version_is_none(world: World) -> None:
    """One process of two cannot be reached: the engine keeps what it has, and catches up later."""
    engine, reader = FakeGenerator([EMPTY]), HalfReader()
    a, b = world.rank("a"), world.rank("b")
    receiver = follow(world, engine, reader)
    world.together(a, b, step=0)
    settle(receiver, world)
    before = engine.live_bytes()
    world.together(a, b, step=1)
    uid = "run-000001"
    second = next(s for s in world.control.list_shards(uid) if s.source_slot_id == "b")
    reader.unreachable = second.manifest_endpoint
    settle(receiver, world)
    assert engine.live_bytes() == before
    reader.unreachable = ""
    settle(receiver, world)
    assert engine.live_bytes()["w"] == weights(a, b)


def test_one_slot_that_cannot_be_had_ends_the_others() -> None:
    """What is raised is the cause, whichever slot it was; a stop from outside passes too."""
    manifests = {slot: full_payload([EMPTY])[0] for slot in ("a", "b", "c")}
    begun = threading.Barrier(3)

    class Endless(Fetcher):
        def fetch_objects(self, *args: Any, **kwargs: Any) -> Any:
            begun.wait(20)
            while True:
                self._parts.between_reads()

    class Broken(Fetcher):
        def fetch_objects(self, *args: Any, **kwargs: Any) -> Any:
            begun.wait(20)
            raise FetchError("b is away")

    turns = Turns(lambda: None)
    parts = FetchParts(clock=FakeClock(), between_reads=turns)
    reader = MemoryObjectReader()
    fetchers = {
        "a": Endless(reader, parts),
        "b": Broken(reader, parts),
        "c": Endless(reader, parts),
    }
    sources: dict[str, list[Shard]] = {slot: [] for slot in manifests}
    with pytest.raises(FetchError, match="b is away"):
        fetch_slots(manifests, fetchers, sources, turns=turns, bytes_max=2**20)
    with pytest.raises(VerifyError, match="at most 100 can be right"):
        fetch_slots(manifests, fetchers, sources, turns=turns, bytes_max=100)
