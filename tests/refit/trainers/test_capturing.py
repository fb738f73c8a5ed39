"""What was captured stands still until it is staged, and then gives its memory back."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.refit.errors import NoFreeArenaError, PublishError, StagingError
from paceline.refit.kernels.registry import load_device_loops
from paceline.refit.model import (
    StagedWeightVersionShardData,
    TrainerStagingMode,
    WeightPayloadFormat,
)
from paceline.refit.staging.torch_bytes import copies_made, host_block
from paceline.refit.trainers.protocol import SupportsCapture, SupportsCopyOut
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.memory import MemoryObjectServer
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.trainer import Follower, buffers_of

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
CHECKPOINT = WeightPayloadFormat.FULL_HF_CHECKPOINT
HOST, ON_DEVICE = TrainerStagingMode.COPY_TO_HOST, TrainerStagingMode.COPY_TO_DEVICE
STORAGE, IN_PLACE = TrainerStagingMode.WRITE_TO_STORAGE, TrainerStagingMode.IN_PLACE
LOOPS = load_device_loops("torch")


class Loop:
    """A trainer whose tensors are compared as on a device, and a follower."""

    def __init__(self, **options: Any) -> None:
        self.weights = {
            "w": torch.zeros(4000, dtype=torch.bfloat16),
            "b": torch.randn(3, 5).T,
            "count": torch.tensor(0),
        }
        made: dict[str, Any] = {"device_loops": lambda kind: LOOPS, "arenas": 4, **options}
        self.trainer = TorchModuleTrainer(clock=FakeClock(), **made)
        self.trainer.bind_tensors(self.weights)
        self.follower = Follower()

    def step(self) -> None:
        self.weights["w"][::61] += 1
        self.weights["b"] *= 1.5
        self.weights["count"] += 1

    def bytes_now(self) -> dict[str, bytes]:
        return {
            name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in self.weights.items()
        }

    def capture(self, mode: TrainerStagingMode, payload: WeightPayloadFormat = DELTA) -> Any:
        return self.trainer.capture(staging_mode=mode, payload_format=payload)

    def stage(self, captured: Any, payload: WeightPayloadFormat) -> StagedWeightVersionShardData:
        staged = self.trainer.stage_captured(captured, payload_format=payload)
        staged.publish_ready.wait()
        return staged

    @property
    def free(self) -> tuple[int, int]:
        """Arenas that nobody holds, in host memory and on the device."""
        return self.trainer._ring.free, self.trainer._shadow._ring._slots.free


@pytest.mark.parametrize("mode", [HOST, ON_DEVICE, STORAGE])
@pytest.mark.parametrize("payload", [DELTA, FULL, CHECKPOINT])
def test_captures_stand_still(mode: TrainerStagingMode, payload: WeightPayloadFormat) -> None:
    """Training writes between capture and staging; two are captured before one is staged."""
    loop = Loop(arenas=6, storage=MemoryObjectServer())
    assert isinstance(loop.trainer, SupportsCapture)
    first = loop.capture(mode, payload)
    states = [loop.bytes_now()]
    loop.step()
    second = loop.capture(mode, payload)
    states.append(loop.bytes_now())
    loop.step()
    for number, captured in enumerate((first, second)):
        wanted = FULL if payload is DELTA and not number else payload
        staged = loop.stage(captured, wanted)
        loop.trainer.commit_staged(staged)
        loop.follower.install(staged)
        assert loop.follower.live_bytes() == states[number]
        loop.trainer.release_staged(staged)


def test_what_is_on_the_device_is_compared_there() -> None:
    """A capture for a delta stays on the device, where the next one is compared with it."""
    loop = Loop()
    one = loop.capture(HOST)
    assert one.device is not None
    assert loop.free == (3, 1)
    loop.trainer.commit_staged(loop.stage(one, FULL))
    loop.step()
    two = loop.capture(HOST)
    assert loop.free == (2, 0)
    lost = loop.stage(two, DELTA)
    loop.trainer.discard_staged(lost)
    assert loop.free == (3, 1)
    assert loop.capture(HOST, FULL).device is None  # nothing is ever compared with it


def test_a_version_that_finds_no_place_on_the_device_goes_by_the_host() -> None:
    """COPY_TO_HOST copies as before; COPY_TO_DEVICE has to wait."""
    loop = Loop()
    loop.trainer.commit_staged(loop.stage(loop.capture(HOST), FULL))
    loop.step()
    held = loop.capture(HOST)
    with pytest.raises(NoFreeArenaError):
        loop.capture(ON_DEVICE)
    assert loop.free == (2, 0)
    by_host = loop.capture(HOST)
    assert by_host.device is None
    loop.trainer.drop_captured(held)
    loop.trainer.drop_captured(held)
    staged = loop.stage(by_host, DELTA)
    loop.trainer.commit_staged(staged)
    assert loop.free == (2, 2)  # the base and the first full version; no shadow for now
    loop.step()
    after = loop.stage(loop.capture(HOST), DELTA)
    assert buffers_of(after).changed_elements == 66 + 15 + 1


def test_a_device_without_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """COPY_TO_HOST does without it from then on and says so once; COPY_TO_DEVICE refuses."""

    def refuse(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr("paceline.refit.staging.device_arena._allocated", refuse)
    loop = Loop()
    with pytest.raises(StagingError, match="stage with COPY_TO_HOST"):
        loop.capture(ON_DEVICE)
    assert not caplog.records
    for number in range(2):
        captured = loop.capture(HOST)
        assert captured.device is None
        staged = loop.stage(captured, DELTA if number else FULL)
        loop.trainer.commit_staged(staged)
        loop.follower.install(staged)
        assert loop.follower.live_bytes() == loop.bytes_now()
        loop.step()
    assert len(caplog.records) == 1
    assert loop.free[1] == 2


@pytest.mark.parametrize("mode", [HOST, ON_DEVICE, IN_PLACE])
def test_captures_that_fail_give_everything_back(mode: TrainerStagingMode) -> None:
    """A delta without a base, and weights that moved in place: no arena is lost."""
    loop = Loop()
    loop.weights["b"] = loop.weights["b"].contiguous()
    captured = loop.capture(mode, FULL)
    if mode is IN_PLACE:
        loop.step()
        with pytest.raises(StagingError, match="moved"):
            loop.stage(captured, FULL)
        loop.trainer.before_step()
    else:
        with pytest.raises(ValueError, match="must be FULL_TENSOR"):
            loop.stage(captured, DELTA)
    assert loop.free == (4, 2)
    loop.trainer.drop_captured(captured)


def in_place(loop: Loop) -> StagedWeightVersionShardData:
    loop.weights["b"] = loop.weights["b"].contiguous()
    return loop.stage(loop.capture(IN_PLACE, FULL), FULL)


def test_weights_in_place_are_copied_out_at_the_last_moment() -> None:
    """The same bytes are served from an arena; once every object is, the optimizer may step."""
    loop = Loop(arenas=1)
    assert isinstance(loop.trainer, SupportsCopyOut)
    staged = in_place(loop)
    wanted = b"".join(buffers_of(staged).objects[0].parts)
    served: dict[str, bytes] = {}
    is_stuck = True

    def replace(object_id: str, parts: Sequence[memoryview]) -> None:
        if is_stuck:
            raise PublishError("a reader stays")
        served[object_id] = b"".join(parts)

    with pytest.raises(PublishError, match="stays"):
        loop.trainer.copy_out(staged, replace)
    with pytest.raises(StagingError, match="must not step"):
        loop.trainer.before_step()
    is_stuck = False
    loop.trainer.copy_out(staged, replace)
    loop.trainer.before_step()
    assert served == {buffers_of(staged).objects[0].object_id: wanted}
    loop.trainer.copy_out(staged, replace)  # it has memory of its own now
    assert loop.free[0] == 0
    loop.trainer.release_staged(staged)
    loop.trainer.copy_out(staged, replace)
    assert loop.free[0] == 1


def test_what_cannot_be_copied_out() -> None:
    """Without an arena, or after the weights moved, live weights stay the version's."""
    loop = Loop(arenas=1)
    held = loop.capture(HOST, FULL)
    staged = in_place(loop)
    with pytest.raises(NoFreeArenaError):
        loop.trainer.copy_out(staged, lambda *_: None)
    loop.trainer.drop_captured(held)
    loop.step()
    with pytest.raises(StagingError, match="moved"):
        loop.trainer.copy_out(staged, lambda *_: None)


def test_checkpoints_are_staged_in_place_too() -> None:
    """The files are headers of ours and live tensors: the digest is that of a copy."""
    loop = Loop()
    loop.weights["b"] = loop.weights["b"].contiguous()
    staged = loop.stage(loop.capture(IN_PLACE, CHECKPOINT), CHECKPOINT)
    buffers = buffers_of(staged)
    assert buffers.index
    loop.follower.install(staged)
    assert loop.follower.live_bytes() == loop.bytes_now()
    loop.trainer.release_staged(staged)
    copied = buffers_of(loop.stage(loop.capture(HOST, CHECKPOINT), CHECKPOINT))
    assert copied.manifest == buffers.manifest


def test_copies_in_host_memory_are_made_at_once() -> None:
    """Without a GPU there is nothing to wait for, and memory is plain."""
    copies_made([torch.device("cpu")]).wait()
    block = host_block(1000)
    assert (len(block), block.readonly) == (1000, False)


@pytest.mark.gpu
def test_a_gpu_copies_while_nobody_waits() -> None:
    """The fence waits for copies into pinned memory; training writes after them."""
    weights = {"w": torch.randn(64 * 2**20, device="cuda")}
    trainer = TorchModuleTrainer(clock=FakeClock(), device_loops=lambda kind: None)
    trainer.bind_tensors(weights)
    for mode in (HOST, ON_DEVICE):
        wanted = weights["w"].cpu()
        captured = trainer.capture(staging_mode=mode, payload_format=FULL)
        weights["w"].mul_(2)
        staged = trainer.stage_captured(captured, payload_format=FULL)
        follower = Follower()
        follower.install(staged)
        assert follower.live_bytes()["w"] == wanted.numpy().tobytes()
        trainer.release_staged(staged)
