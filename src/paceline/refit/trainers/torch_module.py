"""A plain torch module, or any mapping of tensors, as the source of weight versions.

Canonical names are those of ``state_dict``, in which a tied tensor appears under its first name
and further names are aliases; buffers are part of the weights. Nothing is cast unless
``wire_dtypes`` asks for it, and integers never are.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.clock import Clock
from paceline.refit.delta.choice import LOCAL, Link
from paceline.refit.errors import StagingError
from paceline.refit.kernels.registry import PickLoops, loops_on
from paceline.refit.model import (
    FULL_FORMATS,
    CompletionFence,
    StagedWeightVersionShardData,
    TensorBuffer,
    TrainerStagingMode,
    WeightPayloadFormat,
)
from paceline.refit.staging.checkpoint import checkpoint_shard
from paceline.refit.staging.host import Arena, ArenaRing
from paceline.refit.staging.in_place import InPlaceGuard
from paceline.refit.staging.shadow import Change, DeviceShadow
from paceline.refit.staging.shard import (
    Capture,
    PlacedTensor,
    ShardLayout,
    StagedBuffers,
    delta_shard,
    describe_capture,
    full_shard,
    full_shard_in_place,
)
from paceline.refit.staging.torch_bytes import (
    WORD_DTYPES,
    byte_view,
    is_host_block,
)
from paceline.refit.trainers.exporting import Exported, Exporter, collect_plain
from paceline.refit.trainers.protocol import Collected, Quantise, TrainerEngineAdapter
from paceline.refit.transports.protocol import ObjectServer


@dataclass(slots=True, eq=False)
class _Staged:
    """What one staged shard holds until it is committed, discarded or released."""

    capture: Capture | None
    """None in place."""
    arena: Arena | None
    """Held by this shard: for a delta until its commit, for a full one until its release."""
    is_delta: bool
    change: Change | None = None
    """What was found on a device, for a delta."""


class TorchModuleTrainer(TrainerEngineAdapter):
    """Signs TrainerEngineAdapter, SupportsChain and SupportsAnchors.

    ``stage_shard`` runs in the training thread, after the optimizer step; the other methods may
    be called from any thread.
    """

    def __init__(  # noqa: PLR0913 - options of their own, all but one with defaults
        self,
        *,
        clock: Clock,
        rank: int = 0,
        transport: str = "http",
        wire_dtypes: Mapping[str, str] | None = None,
        arenas: int = 4,
        arena_wait_s: float = 0.0,
        quantise: Quantise | None = None,
        link: Link = LOCAL,
        storage: ObjectServer | None = None,
        device_loops: PickLoops = loops_on,
    ) -> None:
        """Set up; tensors come with ``bind_tensors``.

        Args:
            clock: for waiting for an arena.
            rank: global rank of this process, part of the slot's name.
            transport: name of the transport that will serve the bytes.
            wire_dtypes: glob over tensor names -> dtype word that floating-point tensors are
                rounded to (nearest, ties to even); the first match counts.
            arenas: copies of the weights in host memory: the base, the one being captured, the
                newest anchor, and one for readers that are slow.
            arena_wait_s: how long staging waits for a free arena before it refuses.
            quantise: what engines serve instead of a tensor, by name: its codes and scales. They
                are sent as they come, whatever ``wire_dtypes`` says.
            link: the way to the slowest engine; on a slow one deltas are made smaller.
            storage: where WRITE_TO_STORAGE uploads to; stays the caller's.
            device_loops: what finds deltas where the tensors live, by type of device. That takes
                room for a second copy of the weights there; ``lambda kind: None`` does without,
                and all weights cross to the host for every version.
        """
        self._storage = storage
        self._slot = f"publisher:global-rank:{rank}"
        self._transport = transport
        self._exporter = Exporter(
            source_slot_id=self._slot, wire_dtypes=wire_dtypes or {}, quantise=quantise
        )
        self._link = link
        self._ring = ArenaRing(capacity=arenas, clock=clock, wait_s=arena_wait_s)
        self._shadow = DeviceShadow(pick=device_loops)
        self._guard = InPlaceGuard(fingerprint=self._versions, live=self._live_buffers)
        self._bound: Any = None
        self._layout: ShardLayout | None = None
        self._base: Capture | None = None
        self._staged: dict[StagedBuffers, _Staged] = {}
        self._lock = threading.Lock()

    @property
    def source_slot_id(self) -> str:
        """``publisher:global-rank:<rank>``."""
        return self._slot

    @property
    def supported_staging_modes(self) -> frozenset[TrainerStagingMode]:
        """COPY_TO_HOST; IN_PLACE, unless something is to be cast; WRITE_TO_STORAGE with one."""
        modes = {TrainerStagingMode.COPY_TO_HOST}
        if self._storage is not None:
            modes.add(TrainerStagingMode.WRITE_TO_STORAGE)
        if self._exporter.keeps_bits:
            modes.add(TrainerStagingMode.IN_PLACE)
        return frozenset(modes)

    @property
    def supported_payload_formats(self) -> frozenset[WeightPayloadFormat]:
        """All three."""
        return FULL_FORMATS | {WeightPayloadFormat.XOR_DELTA}

    def bind_tensors(self, tensors: Any) -> str:
        """Take a module or a mapping name -> tensor, once.

        Raises:
            ValueError: bound already, nothing in it, or something that is no plain tensor.
        """
        if self._layout is not None:
            raise ValueError("tensors are bound already; make one trainer adapter per module")
        self._layout = self._exporter.plan(self._exporter.export(self._collect(tensors)))
        self._bound = tensors
        return self._slot

    def stage_shard(
        self,
        *,
        tensors: Any,
        staging_mode: TrainerStagingMode,
        payload_format: WeightPayloadFormat,
    ) -> StagedWeightVersionShardData:
        """Capture the weights as they are now.

        Args:
            tensors: what was bound, or None.
            staging_mode: COPY_TO_HOST; IN_PLACE (full payloads only); or WRITE_TO_STORAGE, which
                uploads in the background until the fence: training goes on meanwhile.
            payload_format: FULL_TENSOR or FULL_HF_CHECKPOINT, or XOR_DELTA once a version was
                committed.

        Raises:
            ValueError: not supported, or a delta before the first commit.
            StagingError: no free arena, weights served in place, or their layout moved.
        """
        self._check(tensors, staging_mode, payload_format)
        exported = self._exporter.export(self._collect(self._bound))
        layout = self._check_layout(exported)
        if staging_mode is TrainerStagingMode.IN_PLACE:
            return self._stage_in_place(layout)
        is_delta = payload_format is WeightPayloadFormat.XOR_DELTA
        arena = self._ring.take(layout.num_bytes)
        try:
            base = self._base if is_delta else None
            change = None
            if base is not None:
                change = self._shadow.find(base, arena, exported.tensors, link=self._link)
            capture = _capture(arena, layout, exported, change)
            if base is not None and change is not None:
                buffers = delta_shard(base, capture, link=self._link, encoded_before=change.encoded)
            elif payload_format is WeightPayloadFormat.FULL_HF_CHECKPOINT:
                buffers = checkpoint_shard(capture)
            else:
                buffers = full_shard(capture)
        except BaseException:
            self._ring.drop(arena)
            raise
        record = _Staged(capture=capture, arena=arena, is_delta=is_delta, change=change)
        fence = CompletionFence(lambda: None)
        if staging_mode is TrainerStagingMode.WRITE_TO_STORAGE and self._storage is not None:
            fence = _upload(self._storage, buffers)
        return self._remember(buffers, record, fence)

    def stage_committed(self) -> StagedWeightVersionShardData:
        """Stage the last committed weights as a full version, without copying them again.

        Raises:
            ValueError: nothing was committed, or it was staged in place.
        """
        with self._lock:
            base = self._base
            if base is None:
                raise ValueError("no version was committed from host memory yet")
            self._ring.hold(base.arena)
        record = _Staged(capture=base, arena=base.arena, is_delta=False)
        return self._remember(full_shard(base), record, CompletionFence(lambda: None))

    def commit_staged(self, staged: StagedWeightVersionShardData) -> None:
        """Make the staged weights the base of the next delta."""
        with self._lock:
            record = self._record(staged)
            if record is None:
                raise ValueError("this shard was not staged here, or was given back already")
            if record.capture is None or record.capture is self._base:
                return
            self._ring.hold(record.capture.arena)
            if self._base is not None:
                self._ring.drop(self._base.arena)
            self._base = record.capture
            if record.change is not None:
                self._shadow.commit(record.change, record.capture)
                record.change = None
            if record.is_delta:
                self._drop(record)

    def discard_staged(self, staged: StagedWeightVersionShardData) -> None:
        """Forget a shard that was not committed; the base stays. Idempotent."""
        self.release_staged(staged)

    def release_staged(self, staged: StagedWeightVersionShardData) -> None:
        """Give the buffers of a shard back; idempotent. Only when nobody reads them."""
        with self._lock:
            record = self._record(staged)
            if record is None:
                return
            del self._staged[_buffers_of(staged)]
            if record.capture is None:
                self._guard.release()
            self._drop(record)

    def before_step(self) -> None:
        """Call before every optimizer step when staging in place.

        Raises:
            StagingError: a version is still served from the live weights.
        """
        self._guard.before_step()

    def _check(
        self, tensors: Any, mode: TrainerStagingMode, payload_format: WeightPayloadFormat
    ) -> None:
        if self._layout is None:
            raise ValueError("bind_tensors was not called")
        if tensors is not None and tensors is not self._bound:
            raise ValueError("these are not the tensors that were bound")
        if mode not in self.supported_staging_modes:
            raise ValueError(f"staging mode {mode.value} is not supported with these options")
        if payload_format not in self.supported_payload_formats:
            raise ValueError(f"payload format {payload_format.value} is not supported")
        is_delta = payload_format is WeightPayloadFormat.XOR_DELTA
        if mode is TrainerStagingMode.IN_PLACE and is_delta:
            raise ValueError("a delta needs a copy of its base: stage with COPY_TO_HOST")
        if (
            mode is TrainerStagingMode.IN_PLACE
            and payload_format is WeightPayloadFormat.FULL_HF_CHECKPOINT
        ):
            raise ValueError("a checkpoint is written to a bucket: stage with WRITE_TO_STORAGE")
        if is_delta and self._base is None:
            raise ValueError("no version was committed yet: the first one must be FULL_TENSOR")

    def _check_layout(self, exported: Exported) -> ShardLayout:
        assert self._layout is not None  # noqa: S101 - bound, or the check before has refused
        if self._exporter.plan(exported) != self._layout:
            raise StagingError(
                "names, shapes, dtypes or ties of the tensors changed since they were bound; "
                "a run keeps its layout, start a new one"
            )
        return self._layout

    def _collect(self, source: Any) -> Collected:
        """Return what of the source this process publishes."""
        return collect_plain(source)

    def _stage_in_place(self, layout: ShardLayout) -> StagedWeightVersionShardData:
        buffers = self._guard.stage()
        staged = full_shard_in_place(layout, buffers, self._guard.entries)
        fence = CompletionFence(lambda: self._guard.verify(by_digest=True))
        return self._remember(staged, _Staged(capture=None, arena=None, is_delta=False), fence)

    def _live_buffers(self) -> Mapping[str, TensorBuffer]:
        return {
            name: _view(name, tensor) for name, tensor in self._collect(self._bound).tensors.items()
        }

    def _versions(self) -> tuple[tuple[str, int, int], ...]:
        tensors = self._collect(self._bound).tensors
        return tuple((name, item.data_ptr(), item._version) for name, item in tensors.items())  # noqa: SLF001 - torch's own advice

    def _remember(
        self, buffers: StagedBuffers, record: _Staged, fence: CompletionFence
    ) -> StagedWeightVersionShardData:
        with self._lock:
            self._staged[buffers] = record
        return StagedWeightVersionShardData(
            manifest=buffers.to_shard_manifest(transport=self._transport),
            publish_ready=fence,
            buffer_owner=buffers,
        )

    def _record(self, staged: StagedWeightVersionShardData) -> _Staged | None:
        return self._staged.get(_buffers_of(staged))

    def _drop(self, record: _Staged) -> None:
        if record.arena is not None:
            self._ring.drop(record.arena)
            record.arena = None


def _capture(
    arena: Arena, layout: ShardLayout, exported: Exported, change: Change | None
) -> Capture:
    """Copy what is not in the arena yet, and describe all of it."""
    there = {} if change is None else change.encoded
    _copy_into(arena, [item for item in layout.tensors if item.name not in there], exported)
    base = () if change is None else change.base.entries
    known = {entry.name: entry for entry in base if there.get(entry.name, entry) is None}
    return describe_capture(layout, arena, known=known)


def _copy_into(arena: Arena, placed: Sequence[PlacedTensor], exported: Exported) -> None:
    whole = torch.frombuffer(arena.data, dtype=torch.uint8)
    with torch.no_grad():
        for item in placed:
            raw = whole[item.offset : item.offset + item.num_bytes]
            there = raw.view(WORD_DTYPES[item.dtype]).view(item.shape)
            there.copy_(exported.tensors[item.name])


def _upload(storage: ObjectServer, buffers: StagedBuffers) -> CompletionFence:
    """Begin to upload, and return what waits for the end of it."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            for item in buffers.objects:
                storage.serve_object(item.object_id, item.parts)
        except BaseException as exc:  # noqa: BLE001 - raised by the fence
            done.set_exception(exc)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="paceline-upload", daemon=True).start()
    return CompletionFence(done.result)


def _view(name: str, tensor: torch.Tensor) -> TensorBuffer:
    if not is_host_block(tensor):
        raise StagingError(
            f"tensor {name!r} is not contiguous in host memory and cannot be served in place; "
            "stage with COPY_TO_HOST"
        )
    return byte_view(name, tensor)


def _buffers_of(staged: StagedWeightVersionShardData) -> StagedBuffers:
    if not isinstance(staged.buffer_owner, StagedBuffers):
        raise TypeError("this shard was staged by another adapter")
    return staged.buffer_owner
