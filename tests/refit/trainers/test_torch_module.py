"""A torch module's weights reach another module bit for bit."""

import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from paceline.core.registry import load_entry
from paceline.refit.apply import prove_live, stage_install, write_install
from paceline.refit.errors import PublishError, StagingError
from paceline.refit.kernels.registry import warm_loops
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import (
    ObjectRange,
    StagedWeightVersionShardData,
    TensorBuffer,
    TensorEntry,
    TrainerStagingMode,
    WeightPayloadFormat,
)
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.protocol import SupportsAnchors, SupportsChain
from paceline.refit.trainers.registry import TRAINER_ENGINES
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.refit.transports.protocol import read_object
from paceline.testing.clock import FakeClock

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
HOST, PLACE = TrainerStagingMode.COPY_TO_HOST, TrainerStagingMode.IN_PLACE
DEVICE = TrainerStagingMode.COPY_TO_DEVICE
WORDS = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}


class Tiny(torch.nn.Module):
    """An embedding tied to the head, a norm, buffers of several dtypes, a transposed weight."""

    table: torch.Tensor

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Embedding(50, 16, dtype=dtype)
        self.head = torch.nn.Linear(16, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.mix = torch.nn.Parameter(torch.empty(16, 8, dtype=dtype).T)
        self.scale = torch.nn.Parameter(torch.empty((), dtype=torch.float32))
        self.register_buffer("table", torch.tensor([383, 384, 2**24 + 1, 2**40]))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 4, dtype=dtype))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def step(self, *, every: int = 7) -> None:
        """Change some elements, as an optimizer does."""
        with torch.no_grad():
            flat = self.embed.weight.view(-1)
            flat[::every] = torch.nextafter(flat[::every], torch.tensor(9.0, dtype=flat.dtype))
            self.scale.add_(1)


def live_of(module: torch.nn.Module) -> tuple[dict[str, TensorBuffer], dict[str, str]]:
    """A receiver's view of a module: distinct contiguous tensors, and its ties."""
    buffers: dict[str, TensorBuffer] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    for name, tensor in module.state_dict().items():
        if tensor.numel() and tensor.data_ptr() in seen:
            aliases[name] = seen[tensor.data_ptr()]
            continue
        seen[tensor.data_ptr()] = name
        buffers[name] = TensorBuffer(
            name=name,
            dtype=WORDS[tensor.dtype],
            shape=tuple(tensor.shape),
            data=tensor.detach().view(-1).view(torch.uint8).numpy().data,
        )
    return buffers, aliases


class Target:
    """A rollout engine reduced to its weights."""

    def __init__(self, seed: int = 99) -> None:
        self.module = Tiny(seed)
        self.module.mix = torch.nn.Parameter(self.module.mix.detach().contiguous())
        self.base: dict[str, TensorEntry] | None = None

    def install(self, staged: StagedWeightVersionShardData) -> Manifest:
        """Go the receiver's way, from manifest bytes and objects alone."""
        manifest = parse_manifest(staged.manifest.data)
        objects = {
            item.object_id: memoryview(b"".join(item.parts)) for item in buffers_of(staged).objects
        }
        live, aliases = live_of(self.module)
        install = stage_install(manifest, objects, live=live, aliases=aliases, base=self.base)
        write_install(install)
        assert prove_live(live, install.entries) == manifest.root_digest
        self.base = {entry.name: entry for entry in install.entries}
        return manifest


def buffers_of(staged: StagedWeightVersionShardData) -> StagedBuffers:
    assert isinstance(staged.buffer_owner, StagedBuffers)
    return staged.buffer_owner


def bits(module: torch.nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in module.state_dict().items()
    }


def trainer_of(tensors: Any, **more: Any) -> TorchModuleTrainer:
    trainer = TorchModuleTrainer(clock=FakeClock(), **more)
    trainer.bind_tensors(tensors)
    return trainer


def stage(
    trainer: TorchModuleTrainer,
    payload_format: WeightPayloadFormat,
    mode: TrainerStagingMode = HOST,
) -> StagedWeightVersionShardData:
    staged = trainer.stage_shard(tensors=None, staging_mode=mode, payload_format=payload_format)
    staged.publish_ready.wait()
    return staged


def test_it_is_found_by_name_and_signs_its_protocols() -> None:
    """The registry leads to a class that signs every ability of a trainer."""
    found = load_entry(TRAINER_ENGINES, "torch", port="trainer engine")
    assert found is TorchModuleTrainer
    trainer = trainer_of(Tiny(0), rank=3)
    assert isinstance(trainer, SupportsChain)
    assert isinstance(trainer, SupportsAnchors)
    assert trainer.source_slot_id == "publisher:global-rank:3"
    assert trainer.supported_payload_formats == {
        FULL,
        DELTA,
        WeightPayloadFormat.FULL_HF_CHECKPOINT,
    }
    assert trainer.supported_staging_modes == {HOST, DEVICE, PLACE}


def test_full_then_deltas_reach_a_second_module() -> None:
    """A full version and a chain of deltas keep another module bit-equal, ties and buffers too."""
    module, target = Tiny(1), Target()
    trainer = trainer_of(module)
    for number in range(4):
        staged = stage(trainer, DELTA if number else FULL)
        trainer.commit_staged(staged)
        manifest = target.install(staged)
        assert bits(target.module) == bits(module)
        assert manifest.aliases == (("head.weight", "embed.weight"),)
        assert target.module.head.weight is target.module.embed.weight
        trainer.release_staged(staged)
        module.step()
    assert {segment.tensor for segment in manifest.segments} == {"embed.weight", "scale"}
    assert staged.manifest.tensor_count == 6
    assert staged.manifest.total_bytes < buffers_of(staged).full_bytes / 2


def test_what_a_delta_needs_is_ready_before_it() -> None:
    """Once there is a base: loops for every dtype, and memory for all arenas that take turns."""
    warm_loops.cache_clear()
    trainer = trainer_of(Tiny(1))
    trainer.prepare(payload_format=DELTA)
    assert warm_loops.cache_info().currsize == 0
    trainer.commit_staged(stage(trainer, FULL))
    trainer.prepare(payload_format=FULL)
    assert warm_loops.cache_info().currsize == 0
    trainer.prepare(payload_format=DELTA)
    misses = warm_loops.cache_info().misses
    assert misses == len({item.sent for item in trainer.sent})
    trainer.prepare(payload_format=DELTA)
    assert warm_loops.cache_info().misses == misses


def test_anchor_is_the_committed_state_without_a_copy() -> None:
    """The full version beside a delta has its root, and its bytes are the arena's own."""
    module, late = Tiny(2), Target()
    trainer = trainer_of(module, arenas=2)
    first = stage(trainer, FULL)
    trainer.commit_staged(first)
    trainer.release_staged(first)
    module.step()
    delta = stage(trainer, DELTA)
    trainer.commit_staged(delta)
    anchor = trainer.stage_committed()
    again = trainer.stage_committed()
    one, two = buffers_of(anchor).objects[0], buffers_of(again).objects[0]
    assert one.object_id == two.object_id
    assert one.parts[0].obj is two.parts[0].obj
    assert buffers_of(anchor).manifest.root_digest == buffers_of(delta).manifest.root_digest
    late.install(anchor)
    assert bits(late.module) == bits(module)
    module.step()
    following = stage(trainer, DELTA)
    late.install(following)
    assert bits(late.module) == bits(module)


def test_discarded_versions_leave_the_base() -> None:
    """A version that was staged and never committed is no base: the next delta spans both."""
    module, target = Tiny(3), Target()
    trainer = trainer_of(module)
    first = stage(trainer, FULL)
    trainer.commit_staged(first)
    target.install(first)
    module.step(every=5)
    lost = stage(trainer, DELTA)
    trainer.discard_staged(lost)
    module.step(every=9)
    staged = stage(trainer, DELTA)
    target.install(staged)
    assert bits(target.module) == bits(module)
    with pytest.raises(ValueError, match="given back"):
        trainer.commit_staged(lost)


def test_no_change_is_an_empty_delta() -> None:
    """A step that changes nothing is a version with no segments and the same root."""
    module, target = Tiny(4), Target()
    trainer = trainer_of(module)
    first = stage(trainer, FULL)
    trainer.commit_staged(first)
    target.install(first)
    manifest = target.install(stage(trainer, DELTA))
    assert manifest.segments == ()
    assert manifest.root_digest == manifest.base_root


def test_leased_arenas_are_never_overwritten() -> None:
    """Staged bytes keep their content through later steps; a full ring refuses, then goes on."""
    module = Tiny(5)
    trainer = trainer_of(module, arenas=2)
    first = stage(trainer, FULL)
    trainer.commit_staged(first)
    content = bytes(buffers_of(first).objects[0].parts[0])
    module.step()
    second = stage(trainer, FULL)
    trainer.commit_staged(second)
    module.step()
    with pytest.raises(StagingError, match="arenas"):
        stage(trainer, FULL)
    assert bytes(buffers_of(first).objects[0].parts[0]) == content
    trainer.release_staged(first)
    trainer.release_staged(first)
    stage(trainer, DELTA)


def test_deltas_hold_no_arena_after_commit() -> None:
    """Many deltas may stay fetchable without taking host copies of the weights."""
    module = Tiny(6)
    trainer = trainer_of(module, arenas=2)
    staged = [stage(trainer, FULL)]
    trainer.commit_staged(staged[0])
    trainer.release_staged(staged[0])
    for _ in range(5):
        module.step()
        staged.append(stage(trainer, DELTA))
        trainer.commit_staged(staged[-1])
    assert len({buffers_of(item).objects[0].object_id for item in staged}) == 6


def test_casting_is_only_what_was_asked_for() -> None:
    """Masters in fp32 are rounded to nearest even where a glob says so; integers stay."""
    module = Tiny(7, torch.float32)
    trainer = trainer_of(module, wire_dtypes={"scale": "F32", "*": "BF16"})
    assert trainer.supported_staging_modes == {HOST, DEVICE}
    staged = stage(trainer, FULL)
    entries = {entry.name: entry.dtype for entry in buffers_of(staged).manifest.tensors}
    assert entries == {
        "embed.weight": "BF16",
        "mask": "BOOL",
        "mix": "BF16",
        "nothing": "BF16",
        "scale": "F32",
        "table": "I64",
    }
    target = Target()
    target.install(staged)
    assert torch.equal(
        target.module.embed.weight.view(torch.int16),
        module.embed.weight.to(torch.bfloat16).view(torch.int16),
    )
    assert torch.equal(target.module.table, module.table)
    plain = stage(trainer_of(Tiny(7, torch.float32)), FULL)
    dtypes = {entry.dtype for entry in buffers_of(plain).manifest.tensors}
    assert dtypes == {"F32", "I64", "BOOL"}


@pytest.mark.parametrize("word", ["I32", "BOOL", "F4", "bf16"])
def test_odd_casts_are_refused(word: str) -> None:
    """Only floating-point dtype words can be asked for."""
    with pytest.raises(ValueError, match="one of"):
        TorchModuleTrainer(clock=FakeClock(), wire_dtypes={"*": word})


def test_in_place_serves_live_memory_and_guards_it() -> None:
    """In place nothing is copied, no step is let through, and a step anyway is found."""
    module, target = Tiny(8), Target()
    module.mix = torch.nn.Parameter(module.mix.detach().contiguous())
    trainer = trainer_of(module)
    staged = stage(trainer, FULL, PLACE)
    with pytest.raises(StagingError, match="must not step"):
        trainer.before_step()
    with pytest.raises(StagingError, match="cannot be staged"):
        stage(trainer, FULL, PLACE)
    target.install(staged)
    assert bits(target.module) == bits(module)
    trainer.commit_staged(staged)
    trainer.release_staged(staged)
    trainer.before_step()
    late = trainer.stage_shard(tensors=None, staging_mode=PLACE, payload_format=FULL)
    module.step()
    with pytest.raises(StagingError, match="moved"):
        late.publish_ready.wait()
    with pytest.raises(ValueError, match="no version was committed"):
        trainer.stage_committed()


def test_in_place_needs_plain_memory() -> None:
    """Transposed weights cannot be served where they lie; the error names one and the way out."""
    trainer = trainer_of(Tiny(9))
    with pytest.raises(StagingError, match=r"'mix'.*COPY_TO_HOST"):
        stage(trainer, FULL, PLACE)


def test_what_is_refused() -> None:
    """Wrong order, wrong tensors, unsupported combinations: our mistakes, said plainly."""
    module = Tiny(10)
    unbound = TorchModuleTrainer(clock=FakeClock())
    with pytest.raises(ValueError, match="bind_tensors"):
        stage(unbound, FULL)
    trainer = trainer_of(module)
    with pytest.raises(ValueError, match="bound already"):
        trainer.bind_tensors(module)
    with pytest.raises(ValueError, match="must be FULL_TENSOR"):
        stage(trainer, DELTA)
    with pytest.raises(ValueError, match="copy of its base"):
        stage(trainer, DELTA, PLACE)
    for mode in (TrainerStagingMode.UNSPECIFIED, TrainerStagingMode.WRITE_TO_STORAGE):
        with pytest.raises(ValueError, match="staging mode"):
            stage(trainer, FULL, mode)
    with pytest.raises(ValueError, match="payload format"):
        stage(trainer, WeightPayloadFormat.UNSPECIFIED)
    with pytest.raises(ValueError, match="not the tensors"):
        trainer.stage_shard(tensors=Tiny(10), staging_mode=HOST, payload_format=FULL)
    stranger = StagedWeightVersionShardData(
        manifest=stage(trainer, FULL).manifest,
        publish_ready=stage(trainer, FULL).publish_ready,
    )
    with pytest.raises(TypeError, match="another adapter"):
        trainer.commit_staged(stranger)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"a": 1},
        {"a": torch.eye(2).to_sparse()},
        {"a": torch.zeros(2, dtype=torch.complex128)},
        {"a": torch.zeros(2, device="meta")},
        {"": torch.zeros(2)},
        {"\ud800": torch.zeros(2)},
        {"x" * 1025: torch.zeros(2)},
        {"a": torch.zeros([1] * 33)},
    ],
)
def test_what_cannot_be_bound(tensors: Mapping[str, Any]) -> None:
    """Nothing, something that is no tensor, and dtypes without a wire form are refused."""
    with pytest.raises(
        ValueError, match=r"no tensors|not a plain tensor|no wire dtype|in a manifest"
    ):
        trainer_of(tensors)


def test_layout_is_for_life() -> None:
    """A tensor that changes its shape or its ties ends the run with a clear error."""
    module = Tiny(11)
    trainer = trainer_of(module)
    module.head.weight = torch.nn.Parameter(module.embed.weight.detach().clone())
    with pytest.raises(StagingError, match="layout"):
        stage(trainer, FULL)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.zeros(3, 2), "layout"),
        (torch.zeros(2, 2, device="meta"), "on the meta device"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(2, 2, dtype=torch.complex128), "no wire dtype"),
        (None, "a NoneType"),
    ],
)
def test_what_became_something_else_is_not_staged(value: Any, why: str) -> None:
    """Whatever is in the place of a tensor later is our error, and costs no arena."""
    tensors: dict[str, Any] = {"a": torch.zeros(2, 2)}
    trainer = trainer_of(tensors)
    free = trainer._ring.free
    tensors["a"] = value
    for mode in (HOST, PLACE):
        with pytest.raises(StagingError, match=why):
            stage(trainer, FULL, mode)
    assert trainer._ring.free == free
    tensors["a"] = torch.ones(2, 2)
    stage(trainer, FULL, PLACE)


def write_data(parameter: torch.nn.Parameter) -> None:
    parameter.data.add_(1)


def step_fused(parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()


@pytest.mark.parametrize("write", [write_data, step_fused])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_what_torch_does_not_count_is_found_too(
    write: Callable[[torch.nn.Parameter], None], size: int
) -> None:
    """Fused optimizers and ``data`` move no version counter; served in place it is found."""
    parameter = torch.nn.Parameter(torch.ones(size))
    trainer = trainer_of({"a": parameter, "none": torch.zeros(0), "number": torch.tensor(3.0)})
    staged = trainer.stage_shard(tensors=None, staging_mode=PLACE, payload_format=FULL)
    trainer.require_still(staged)
    counted = parameter._version
    write(parameter)
    assert parameter._version == counted  # or this test has nothing to find
    with pytest.raises(StagingError, match="moved"):
        trainer.require_still(staged)


def test_every_dtype_is_carried() -> None:
    """A mapping of tensors of all dtypes, any strides, becomes exactly their bytes."""
    ones = torch.arange(12).reshape(3, 4)
    tensors = {
        str(dtype): ones.to(dtype).T
        for dtype in (
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
            torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
            torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
        )
    }  # fmt: skip
    tensors["expanded"] = torch.ones(1).expand(5)
    tensors["nan"] = torch.tensor([0x7F81, 0xFFFF, 0x8000]).to(torch.uint16).view(torch.bfloat16)
    staged = buffers_of(stage(trainer_of(tensors), FULL))
    whole = b"".join(staged.objects[0].parts)
    for segment in staged.manifest.segments:
        data = whole[segment.offset : segment.offset + segment.num_bytes]
        wanted = tensors[segment.tensor].contiguous().view(-1).view(torch.uint8).numpy()
        assert data == wanted.tobytes(), segment.tensor
        assert segment.offset % 64 == 0
    gc.collect()


class Gate(MemoryObjectServer):
    """Takes an object when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = threading.Event()
        self.error: Exception | None = None

    def serve_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        self.is_open.wait(20)
        if self.error is not None:
            raise self.error
        super().serve_object(object_id, parts)


def test_write_to_storage_uploads_until_the_fence() -> None:
    """Staging returns before the upload; the fence waits for it, and tells of its failure."""
    storage = Gate()
    trainer = TorchModuleTrainer(clock=FakeClock(), storage=storage)
    weights = {"w": torch.arange(100, dtype=torch.float32)}
    trainer.bind_tensors(weights)
    assert TrainerStagingMode.WRITE_TO_STORAGE in trainer.supported_staging_modes

    def stage() -> StagedWeightVersionShardData:
        return trainer.stage_shard(
            tensors=None,
            staging_mode=TrainerStagingMode.WRITE_TO_STORAGE,
            payload_format=WeightPayloadFormat.FULL_TENSOR,
        )

    staged = stage()
    weights["w"] += 1  # the optimizer goes on
    storage.is_open.set()
    staged.publish_ready.wait()
    buffers: Any = staged.buffer_owner
    (item,) = buffers.objects
    found = bytearray(item.num_bytes)
    wanted = ObjectRange(object_id=item.object_id, offset=0, size=item.num_bytes)
    read_object(MemoryObjectReader(), storage.endpoint, wanted, memoryview(found), timeout_s=1)
    assert bytes(found) == b"".join(item.parts)
    storage.error = PublishError("no room")
    failed = stage()
    with pytest.raises(PublishError, match="no room"):
        failed.publish_ready.wait()
    trainer.discard_staged(failed)
