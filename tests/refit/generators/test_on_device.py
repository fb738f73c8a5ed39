"""The transformers engine with its weights on a device; ``cpu:0`` is host memory treated as one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.refit.generators.protocol import EngineState, Sampling, device_tensors_of
from paceline.refit.kernels.torch import TorchLoops
from paceline.testing.tiny_model import write_tiny_moe, write_tiny_qwen3
from refit.generators.refitting import Follower, MemoryRun

PROMPTS = [[10, 20, 30], [5], [7, 8, 9, 10, 11, 12, 13]]
GREEDY = Sampling(max_tokens=12, temperature=0)
DEVICE = "cpu:0"
WRITERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "tied": (write_tiny_qwen3, "memory"),
    "mixture as in files": (write_tiny_moe, "checkpoint"),
}


@pytest.fixture(params=WRITERS)
def followed(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[MemoryRun, Follower]]:
    write, names = WRITERS[request.param]
    run = MemoryRun(write(tmp_path), names=names)
    made = Follower(run, "g-0", names=names, device=DEVICE)
    yield run, made
    made.close()


def assert_equal_on_both(follower: Follower) -> None:
    """Compare every byte, and see that no tensor is its own copy."""
    copies = follower.engine.live_tensors()
    there = device_tensors_of(follower.gate)
    assert there.keys() == copies.keys()
    for name, tensor in there.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        assert raw.tobytes() == bytes(copies[name].data), name
        assert not len(raw) or raw.ctypes.data != memory_of(copies[name].data)


def memory_of(data: memoryview) -> int:
    """Return an address."""
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def test_tokens_are_of_the_weights_on_the_device(
    followed: tuple[MemoryRun, Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full version and deltas arrive in both memories; passes read the device's."""
    moved = []
    move = TorchLoops.move

    def counted(self: TorchLoops, words: torch.Tensor, *rest: torch.Tensor, is_float: bool) -> None:
        moved.append(words.data_ptr())
        move(self, words, *rest, is_float=is_float)

    monkeypatch.setattr(TorchLoops, "move", counted)
    run, follower = followed
    for at in range(3):
        uid = run.publish()
        follower.settle()
        assert_equal_on_both(follower)
        assert bool(moved) == bool(at)  # a delta is written by the loops of the device
        for prompt in PROMPTS:
            choice = follower.generate(prompt, GREEDY).choices[0]
            assert list(choice.token_ids) == run.model.greedy(prompt, GREEDY.max_tokens)
            assert [span.installed.version_id for span in choice.spans] == [uid]
        run.model.step()


def test_what_a_device_loses_is_found(followed: tuple[MemoryRun, Follower]) -> None:
    """A bit that turned on the device alone ends serving at the next install, before a token."""
    run, follower = followed
    run.publish()
    follower.settle()
    name, tensor = next(iter(device_tensors_of(follower.gate).items()))
    tensor.view(torch.int16).reshape(-1)[0] ^= 1
    run.model.step()
    run.publish()
    follower.settle()
    assert follower.receiver.health().state is EngineState.FAILED, name
    assert follower.gate.installed() is None
