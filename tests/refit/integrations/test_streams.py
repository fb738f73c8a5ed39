"""Streams of tensors and broadcasts of models become publications, or nothing at all."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from paceline.refit.errors import PublishError
from paceline.refit.integrations.prime_rl import WeightBroadcast
from paceline.refit.integrations.streams import StreamPublisher
from paceline.refit.integrations.verl import CheckpointEngine


class Recording:
    """A publisher that remembers what the bound tensors were at each publish."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.seen: list[tuple[int, dict[str, list[float]]]] = []
        self.calls: list[str] = []
        self.fails = False

    def start(self) -> None:
        self.calls.append("start")

    def publish(self, *, step: int) -> "Recording":
        self.seen.append((step, {name: each.tolist() for name, each in self.tensors.items()}))
        return self

    def result(self) -> None:
        self.calls.append("ready")
        if self.fails:
            raise PublishError("no room")

    def close(self) -> None:
        self.calls.append("close")


class Made:
    """Makes publishers, and counts them."""

    def __init__(self) -> None:
        self.all: list[Recording] = []

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Recording:
        self.all.append(Recording(tensors))
        return self.all[-1]


def stream(**tensors: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that are gone once they were looked at, as a framework's gather buffer is."""
    for name, tensor in tensors.items():
        buffer = tensor.clone()
        yield name, buffer
        buffer.fill_(-1)


def test_the_newest_of_each_tensor_is_bound() -> None:
    """One publisher for all streams; what was in the buffer when it was yielded is published."""
    made = Made()
    sender = StreamPublisher(made)
    sender.send(stream(a=torch.ones(2), b=torch.zeros(1)), step=3)
    sender.send(stream(b=torch.ones(1), a=torch.zeros(2)), step=4)
    sender.close()
    sender.close()
    (publisher,) = made.all
    assert publisher.seen == [(3, {"a": [1, 1], "b": [0]}), (4, {"a": [0, 0], "b": [1]})]
    assert publisher.calls == ["start", "close"]


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ({"a": torch.ones(2)}, "1 tensors did not come, such as 'b'"),
        ({"a": torch.ones(2), "b": torch.ones(1), "c": torch.ones(1)}, "'c' was not in the first"),
        ({"a": torch.ones(3), "b": torch.ones(1)}, "'a' came as"),
        ({"a": torch.ones(2), "b": torch.ones(1).half()}, "'b' came as torch.float16"),
    ],
)
def test_another_set_of_tensors_publishes_nothing(
    second: dict[str, torch.Tensor], what: str
) -> None:
    """A stream that breaks off or brings other tensors is refused as a whole."""
    made = Made()
    sender = StreamPublisher(made)
    sender.send(stream(a=torch.ones(2), b=torch.zeros(1)), step=0)
    with pytest.raises(PublishError, match=what):
        sender.send(stream(**second), step=1)
    assert len(made.all[0].seen) == 1
    sender.send(stream(a=torch.zeros(2), b=torch.ones(1)), step=2)
    assert made.all[0].seen[-1] == (2, {"a": [0, 0], "b": [1]})


def test_who_only_helps_uses_the_stream_up() -> None:
    """Gathering takes every process, so one that publishes nothing still looks at every tensor."""
    made = Made()
    looked: list[str] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            looked.append(name)
            yield name, torch.ones(1)

    assert StreamPublisher(made, keeps=False).send(watched(), step=0) is None
    assert looked == ["a", "b", "c"]
    assert made.all == []


def test_a_verl_engine_sends_and_hands_nothing_over() -> None:
    """Its methods in verl's order: a version per send, counted where verl does not say the step."""
    made = Made()
    engine = CheckpointEngine(made, is_master=True)

    async def drive() -> list[tuple[str, torch.Tensor]]:
        assert engine.prepare() == {}
        assert engine.build_topology(2, 4, [{}] * 6) == ({}, {})
        engine.init_process_group()
        await engine.send_weights(stream(a=torch.ones(1)), global_steps=7)
        await engine.send_weights(stream(a=torch.ones(1)))
        engine.finalize()
        return [each async for each in engine.receive_weights(global_steps=8)]

    assert asyncio.run(drive()) == []
    engine.close()
    assert [step for step, _ in made.all[0].seen] == [7, 8]
    assert made.all[0].calls == ["start", "ready", "ready", "close"]


def test_a_broadcast_is_marked_when_it_is_ready(tmp_path: Path) -> None:
    """No mark for a version that failed, none from a rank that is not the master."""
    made = Made()
    model = {"a": torch.ones(1)}
    broadcast = WeightBroadcast(tmp_path, made)
    broadcast.broadcast_weights(model, 0)
    assert (tmp_path / "broadcasts" / "step_0" / "STABLE").exists()
    made.all[0].fails = True
    with pytest.raises(PublishError):
        broadcast.broadcast_weights(model, 1)
    assert not (tmp_path / "broadcasts" / "step_1").exists()
    with pytest.raises(ValueError, match="not the model"):
        broadcast.broadcast_weights({"a": torch.ones(1)}, 2)
    broadcast.maybe_clean(1)
    broadcast.shutdown()
    broadcast.shutdown()
    assert made.all[0].calls == ["start", "ready", "ready", "close"]
    WeightBroadcast(tmp_path / "other", Made(), is_master=False).broadcast_weights(model, 0)
    assert not (tmp_path / "other").exists()
