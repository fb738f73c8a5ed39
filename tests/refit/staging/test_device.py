"""Deltas on the device: the host's bytes, exact results, and only changed elements cross.

Tensors here are in host memory, and the loops for devices are forced on them. The triton kernel
runs in triton's interpreter, on the same tensors.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.refit.delta.choice import LOCAL, Link
from paceline.refit.kernels.protocol import Compacted, DeviceLoops
from paceline.refit.kernels.registry import load_device_loops, loops_on
from paceline.refit.model import (
    DTYPE_BITS,
    StagedWeightVersionShardData,
    TrainerStagingMode,
    WeightPayloadFormat,
)
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.staging.torch_bytes import WORD_DTYPES
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.testing.clock import FakeClock

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
DTYPES = sorted(WORD_DTYPES.keys() & DTYPE_BITS.keys())
SLOW = Link(bits_per_s=1e6)
TORCH = load_device_loops("torch")


class Counting:
    """The loops of torch; counts the words that they compare."""

    name = "counting"

    def __init__(self) -> None:
        self.compared = 0

    def compact(self, old: torch.Tensor, new: torch.Tensor) -> Compacted:
        """Return what differs."""
        self.compared += len(old)
        return TORCH.compact(old, new)

    def move(self, *arguments: Any, **more: Any) -> None:
        """Write."""
        TORCH.move(*arguments, **more)


class Pair:
    """Two trainers of the same tensors: one compares as on a device, one in host memory."""

    def __init__(
        self, tensors: Any, *, loops: DeviceLoops = TORCH, link: Link = LOCAL, **more: Any
    ) -> None:
        picks: list[Callable[[str], DeviceLoops | None]] = [lambda kind: loops, lambda kind: None]
        self.trainers = [
            TorchModuleTrainer(clock=FakeClock(), link=link, device_loops=pick, **more)
            for pick in picks
        ]
        for trainer in self.trainers:
            trainer.bind_tensors(tensors)
        self.publish(FULL)

    def stage(self, payload_format: WeightPayloadFormat) -> list[StagedWeightVersionShardData]:
        """Stage with both and compare every byte."""
        staged = [
            trainer.stage_shard(
                tensors=None,
                staging_mode=TrainerStagingMode.COPY_TO_HOST,
                payload_format=payload_format,
            )
            for trainer in self.trainers
        ]
        here, there = staged
        assert here.manifest.data == there.manifest.data
        assert payload_of(here) == payload_of(there)
        return staged

    def publish(self, payload_format: WeightPayloadFormat = DELTA) -> int:
        """Stage, compare, commit and release; return how many elements changed."""
        staged = self.stage(payload_format)
        for trainer, one in zip(self.trainers, staged, strict=True):
            trainer.commit_staged(one)
            trainer.release_staged(one)
        return buffers_of(staged[0]).changed_elements

    def discard(self) -> None:
        """Stage a version that does not come out."""
        for trainer, one in zip(self.trainers, self.stage(DELTA), strict=True):
            trainer.discard_staged(one)


def buffers_of(staged: StagedWeightVersionShardData) -> StagedBuffers:
    assert isinstance(staged.buffer_owner, StagedBuffers)
    return staged.buffer_owner


def payload_of(staged: StagedWeightVersionShardData) -> list[bytes]:
    return [b"".join(item.parts) for item in buffers_of(staged).objects]


def random_tensor(dtype: str, count: int, random: np.random.Generator) -> torch.Tensor:
    """Any bits of that dtype."""
    if not count:
        return torch.empty(0, dtype=WORD_DTYPES[dtype])
    raw = random.integers(0, 256, count * DTYPE_BITS[dtype] // 8, dtype=np.uint8)
    if dtype == "BOOL":
        raw &= 1
    return torch.from_numpy(raw).view(WORD_DTYPES[dtype])


def change(tensor: torch.Tensor, density: float, random: np.random.Generator) -> None:
    """Let some elements have other bits."""
    width = tensor.element_size()
    raw = tensor.reshape(-1).view(torch.uint8).numpy().reshape(-1, width)
    mine = random.random(len(raw)) < density
    limit = 2 if tensor.dtype is torch.bool else 256
    raw[mine] = random.integers(0, limit, (int(mine.sum()), width), dtype=np.uint8)


def check_dtype(
    dtype: str, count: int, density: float, seed: int, *, loops: DeviceLoops, link: Link
) -> None:
    """Three versions of one tensor beside one that stays: both ways give the same bytes."""
    random = np.random.default_rng(seed)
    tensors = {name: random_tensor(dtype, count, random) for name in ("moves", "stays")}
    pair = Pair(tensors, loops=loops, link=link)
    for _ in range(2):
        change(tensors["moves"], density, random)
        pair.publish()
    assert pair.publish() == 0


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1, 2, 1023, 1025, 5000, 40_000]),
    st.sampled_from([0.0, 0.001, 0.1, 0.6, 1.0]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([LOCAL, SLOW]),
)
@settings(max_examples=40)
def test_the_device_sends_what_the_host_sends(
    dtype: str, count: int, density: float, seed: int, link: Link
) -> None:
    """Any bits of any dtype, any density, fast and slow links."""
    check_dtype(dtype, count, density, seed, loops=TORCH, link=link)


def test_shadows_follow_commits_alone() -> None:
    """Casts, strides, scalars; discarded versions, and full ones between deltas."""
    random = np.random.default_rng(5)
    tensors = {
        "master": torch.randn(300, 200),
        "strided": torch.randn(64, 96).to(torch.bfloat16).T,
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(0, 4),
    }
    pair = Pair(tensors, wire_dtypes={"master": "BF16"}, arenas=6)
    for round_ in range(6):
        with torch.no_grad():
            tensors["master"] += torch.randn(300, 200) * 0.001
            tensors["strided"][round_] += 1
            tensors["scalar"] += 1
        if round_ == 1:
            pair.discard()
            tensors["scalar"].zero_()
        pair.publish(FULL if round_ == 3 else DELTA)
    change(tensors["strided"].T, 1.0, random)
    pair.publish()
    change(tensors["strided"].T, 0.01, random)
    pair.publish()


def test_chunks_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places count from the start of the chunk, totals from the start of the tensor."""
    monkeypatch.setattr("paceline.refit.delta.order.CHUNK_BYTES", 2**12)
    for link in (LOCAL, SLOW):
        check_dtype("BF16", 40_000, 0.02, 1, loops=TORCH, link=link)


def test_everything_is_compared_where_it_is() -> None:
    """The device compares every word once per version, also after a full version."""
    loops = Counting()
    weights = torch.zeros(1000)
    pair = Pair({"w": weights}, loops=loops)
    for round_ in range(3):
        weights[round_] += 1
        assert pair.publish() == 1
    assert loops.compared == 3000


class Full(Counting):
    """A device without room."""

    def compact(self, old: torch.Tensor, new: torch.Tensor) -> Compacted:
        """Refuse."""
        super().compact(old, new)
        raise torch.cuda.OutOfMemoryError("no room")


def test_without_room_the_host_compares(caplog: pytest.LogCaptureFixture) -> None:
    """The version comes out all the same, is said once, and the device is left alone."""
    loops = Full()
    weights = torch.zeros(1000)
    pair = Pair({"v": weights.clone(), "w": weights}, loops=loops)
    for round_ in range(3):
        weights[round_] += 1
        assert pair.publish() == 1
    assert loops.compared == len(weights)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_one_place_knows_devices() -> None:
    """Host memory has loops of its own, everything else has those of torch at least."""
    assert loops_on("cpu") is None
    for kind in ("cuda", "mps", "xpu"):
        loops = loops_on(kind)
        assert loops is not None
        assert loops.name == ("torch" if kind == "mps" else loops.name)


TRITON = """
from refit.staging import test_device as t
loops = t.load_device_loops("triton")
for dtype in ("BF16", "F8_E4M3", "F32", "I64"):
    for count in (1, 1024, 3000):
        t.check_dtype(dtype, count, 0.15, 0, loops=loops, link=t.LOCAL)
print("done")
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="no triton on this platform"
)
def test_triton_finds_the_same(tmp_path: Path) -> None:
    """The triton kernel finds and compacts exactly what torch does, in every width."""
    done = subprocess.run(
        [sys.executable, "-c", TRITON],
        env={
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TRITON_INTERPRET": "1",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout == "done\n", done.stderr[-2000:]
