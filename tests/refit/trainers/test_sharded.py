"""Real torchrun jobs: every rank publishes what is its own, and engines hold the whole weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.core.waiting import wait_until
from paceline.refit.digest import root_digest
from paceline.refit.generators.protocol import EngineConfig
from paceline.refit.generators.transformers.engine import TransformersEngine
from paceline.refit.manifest.region import Box
from paceline.refit.model import (
    Region,
    TensorBuffer,
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
)
from paceline.refit.plan.resharding import want_fused, want_part
from paceline.refit.publisher.resuming import BROKEN, CONTINUED
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.fakes.control import LoopbackControl
from paceline.testing.fakes.generator import FakeGenerator
from paceline.testing.payloads import tensor_entry
from paceline.testing.ranks import run_environment, start_ranks
from paceline.testing.tiny_model import write_tiny_qwen3
from refit.trainers.torchrun import Job, torchrun

LAST = 2
TP = 2


def bare_engine(job: Job, layout: str) -> FakeGenerator:
    """An engine of zeros in the shapes of the job's model, with its tie."""
    aliases = {"head.weight": "embed.weight"}
    shapes = job.shapes(layout)
    widths = {"F32": 4, "I64": 8}
    buffers = []
    for name, (dtype, shape) in shapes.items():
        if name in aliases:
            continue
        size = widths[dtype]
        for length in shape:
            size *= length
        data = memoryview(bytearray(size))
        buffers.append(TensorBuffer(name=name, dtype=dtype, shape=shape, data=data))
    return FakeGenerator(buffers, aliases=aliases)


def check_layout_of(job: Job, layout: str, *, slots: int) -> None:
    """An engine that follows has at each version the very bits of the trainer's weights."""
    found = job.follow(bare_engine(job, layout), layout, until=LAST)
    newest, anchor = job.ready(f"{layout}-000002"), job.ready(f"{layout}-000002-full")
    job.go_on(layout)
    assert sorted(found) == list(range(LAST + 1))
    for sequence, live in found.items():
        expected = job.expected(layout, sequence)
        expected.pop("head.weight")
        assert live == expected
    assert len(newest.expected_source_slots) == slots
    assert newest.payload_format is WeightPayloadFormat.XOR_DELTA
    said = newest.description
    assert said is not None
    assert anchor.description is not None
    assert anchor.description.root_digest == said.root_digest
    assert said.full_bytes == sum(map(len, found[LAST].values()))


def test_two_ranks(tmp_path: Path) -> None:
    """FSDP2 and tensor parallelism, in one job."""
    layouts = ["fsdp2", "tp"]
    with torchrun(tmp_path, layouts, ranks=2) as job:
        for layout in layouts:
            check_layout_of(job, layout, slots=2)
        job.end()


@pytest.mark.slow
def test_two_ranks_into_a_real_engine(tmp_path: Path) -> None:
    """FSDP2 into transformers: what it serves is the trainer's full state dict at every version."""
    model_dir = write_tiny_qwen3(tmp_path / "model")
    with torchrun(tmp_path, ["qwen3_fsdp2", "fsdp1", "ddp"], ranks=2) as job:
        config = EngineConfig(model_dir=model_dir, dtype="float32")
        engine = TransformersEngine(config, clock=system_clock(), new_seed=lambda: 7)
        found = job.follow(engine, "qwen3_fsdp2", until=LAST)
        aliases = engine.tensor_aliases()
        for sequence, live in found.items():
            expected = job.expected("qwen3_fsdp2", sequence)
            assert expected.keys() - live.keys() == aliases.keys()
            whole = {name: expected[name] for name in live}
            assert live == whole
            assert root_of(engine, live) == root_of(engine, whole)
        engine.close(timeout_s=30)
        for rank in range(TP):
            check_worker(job, engine, rank)
        job.go_on("qwen3_fsdp2")
        for layout in ("fsdp1", "ddp"):
            check_layout_of(job, layout, slots=2)
        job.end()


def check_worker(job: Job, engine: TransformersEngine, rank: int) -> None:
    """A worker of tensor parallelism reads its rows of q, k and v fused, and its columns of o."""
    layer = "model.layers.1.self_attn"
    shapes = {name: buffer.shape for name, buffer in engine.live_tensors().items()}
    fused = []
    for part in ("q", "k", "v"):
        rows, columns = shapes[f"{layer}.{part}_proj.weight"]
        own = rows // TP
        box = Box((own * rank, 0), (own * (rank + 1), columns))
        fused.append((f"{layer}.{part}_proj.weight", box))
    rows, columns = shapes[f"{layer}.o_proj.weight"]
    mine = slice(columns // TP * rank, columns // TP * (rank + 1))
    region = Region(global_shape=(rows, columns), offsets=(0, mine.start))
    wants = {
        "qkv": want_fused(fused),
        "o": want_part(f"{layer}.o_proj.weight", (rows, columns // TP), region),
    }

    found = job.read("qwen3_fsdp2", "qwen3_fsdp2-000000", wants)

    state = job.expected("qwen3_fsdp2", 0)

    def whole(name: str) -> np.ndarray:
        return np.frombuffer(state[name], dtype=np.float32).reshape(shapes[name])

    expected = np.concatenate([whole(name)[b.start[0] : b.stop[0]] for name, b in fused])
    assert bytes(found.data["qkv"]) == expected.tobytes()
    columns_of_o = np.ascontiguousarray(whole(f"{layer}.o_proj.weight")[:, mine])
    assert bytes(found.data["o"]) == columns_of_o.tobytes()


def root_of(engine: TransformersEngine, state: Mapping[str, bytes]) -> str:
    """The root digest that these bytes have as one slot's whole tensors."""
    shapes = engine.live_tensors()
    return root_digest(
        tensor_entry(replace(shapes[name], data=memoryview(data))) for name, data in state.items()
    )


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """Meshes of two axes too."""
    layouts = ["fsdp2_tp", "hsdp", "fsdp2", "tp", "fsdp1", "ddp"]
    with torchrun(tmp_path, layouts, ranks=4) as job:
        for layout in layouts:
            check_layout_of(job, layout, slots=4)
        job.end()


@pytest.mark.slow
def test_one_of_four_ranks_is_killed(tmp_path: Path) -> None:
    """While the others wait for it: they are told, and the next version follows a restart.

    It is a delta, with its anchor, if all begin with what was READY last; full if only three do.
    """
    control = LoopbackControl(MemoryStore(clock=system_clock()))
    environment = run_environment(tmp_path, control)
    everybody = range(4)
    with start_ranks(tmp_path, environment, ranks=4, incarnation="1") as ranks:
        ranks.go(0, *everybody)
        first = ranks.ended(0, *everybody)
        assert {each["version"] for each in first.values()} == {"run-000000"}
        ranks.go(1, 0, 1, 3)
        wait_until(
            lambda: covered_slots(control, "run-000001") == 3,
            what="three slots of four",
            clock=system_clock(),
            timeout_s=60,
            interval_s=0.02,
        )
        ranks.kill(2)
        for ended in ranks.ended(1, 0, 1, 3).values():
            assert "rank2-of-4" in str(ended["error"]) or "given up" in str(ended["error"])
    assert control.ledger.get_version("run-000001").state is VersionState.RELEASING
    with start_ranks(tmp_path, environment, ranks=4, incarnation="2") as ranks:
        ranks.go(0, *everybody)
        for ended in ranks.ended(0, *everybody).values():
            assert (ended["version"], ended["format"]) == ("run-000002", "XOR_DELTA")
    assert chain_events(control) == ["chain.continued"] * 4
    assert parent_of(control, "run-000002") == said_of(control, "run-000000").root_digest
    assert control.ledger.get_version("run-000002-full").state is VersionState.READY
    (tmp_path / "other-1").touch()
    with start_ranks(tmp_path, environment, ranks=4, incarnation="3") as ranks:
        ranks.go(0, *everybody)
        for ended in ranks.ended(0, *everybody).values():
            assert (ended["version"], ended["format"]) == ("run-000003", "FULL_TENSOR")
    assert chain_events(control)[4:] == ["chain.broken"] * 4
    assert parent_of(control, "run-000003") is None
    control.stop()


def said_of(control: LoopbackControl, uid: str) -> VersionDescription:
    found = control.ledger.get_version(uid).description
    assert found is not None
    return found


def parent_of(control: LoopbackControl, uid: str) -> str | None:
    return said_of(control, uid).parent_root


def chain_events(control: LoopbackControl) -> list[str]:
    """What the ranks found out about their weights, in order."""
    names = [event.name for event in control.ledger.list_events()]
    return [name for name in names if name in (CONTINUED, BROKEN)]


def covered_slots(control: LoopbackControl, uid: str) -> int:
    """How many slots of a version are in; 0 before there is one."""
    if uid not in {version.uid for version in control.ledger.list_versions("m")}:
        return 0
    return len(control.ledger.list_shards(uid))


@pytest.mark.slow
def test_one_rank(tmp_path: Path) -> None:
    """A mesh of one process is a plain trainer."""
    with torchrun(tmp_path, ["fsdp2", "ddp"], ranks=1) as job:
        for layout in ("fsdp2", "ddp"):
            check_layout_of(job, layout, slots=1)
        job.end()
