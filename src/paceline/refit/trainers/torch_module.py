"""A plain torch module, or any mapping of tensors, as the source of weight versions.

Canonical names are those of ``state_dict``, in which a tied tensor appears under its first name
and further names are aliases; buffers are part of the weights. Nothing is cast unless
``wire_dtypes`` asks for it, and integers never are.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.clock import Clock
from paceline.refit.delta.choice import LOCAL, Link
from paceline.refit.errors import StagingError
from paceline.refit.kernels.registry import PickLoops, loops_on, warm_loops
from paceline.refit.model import (
    FULL_FORMATS,
    CompletionFence,
    StagedWeightVersionShardData,
    TensorBuffer,
    TrainerStagingMode,
    WeightPayloadFormat,
)
from paceline.refit.staging.capturing import (
    buffers_of,
    check_narrowed,
    copied_objects,
    copy_into,
    described,
)
from paceline.refit.staging.checkpoint import checkpoint_of, checkpoint_shard
from paceline.refit.staging.device_arena import DeviceArena
from paceline.refit.staging.host import Arena, ArenaRing
from paceline.refit.staging.in_place import InPlaceGuard
from paceline.refit.staging.shadow import DeviceShadow
from paceline.refit.staging.shard import (
    Capture,
    ShardLayout,
    StagedBuffers,
    delta_shard,
    full_shard,
    full_shard_in_place,
)
from paceline.refit.staging.torch_bytes import copies_made, fingerprint, host_block, live_view
from paceline.refit.staging.uploading import upload
from paceline.refit.trainers.dtypes import Sent, WireDtypes, summarise
from paceline.refit.trainers.exporting import Exported, Exporter, collect_plain
from paceline.refit.trainers.protocol import Collected, Quantise, TrainerEngineAdapter
from paceline.refit.transports.protocol import ObjectServer

log = logging.getLogger(__name__)

DELTA, CHECKPOINT = WeightPayloadFormat.XOR_DELTA, WeightPayloadFormat.FULL_HF_CHECKPOINT
_DELTA_ARENAS = 3
"""In use while deltas follow each other: the newest full version, the base, what is captured."""
IN_PLACE, ON_DEVICE = TrainerStagingMode.IN_PLACE, TrainerStagingMode.COPY_TO_DEVICE


@dataclass(slots=True, eq=False)
class TorchCapture:
    """Weights that stand still, and are not hashed yet."""

    mode: TrainerStagingMode
    layout: ShardLayout
    arena: Arena | None
    """Where they are in host memory, or are going to be; None in place."""
    device: DeviceArena | None = None
    """Those that were copied where they live, and are not in the arena yet."""
    is_base: bool = False
    """The copies on the device are for the next delta to be compared with."""
    made: CompletionFence = field(default_factory=lambda: CompletionFence(lambda: None))


@dataclass(slots=True, eq=False)
class _Staged:
    """What one staged shard holds until it is committed, discarded or released."""

    capture: Capture | None
    """None in place."""
    arena: Arena | None
    """Held by this shard: for a delta until its commit, for a full one until its release."""
    is_delta: bool
    device: DeviceArena | None = None
    """Its weights on the device, until the commit."""
    is_live: bool = False
    """Live weights are served."""


class TorchModuleTrainer(TrainerEngineAdapter):
    """Signs TrainerEngineAdapter and every ability of trainers in ``protocol.py``.

    ``stage_shard`` and ``capture`` run in the training thread, after the optimizer step; the other
    methods may be called from any thread.
    """

    def __init__(  # noqa: PLR0913 - options of their own, all but one with defaults
        self,
        *,
        clock: Clock,
        rank: int = 0,
        transport: str = "http",
        wire_dtypes: WireDtypes = None,
        arenas: int = 4,
        arena_wait_s: float = 0.0,
        quantise: Quantise | None = None,
        link: Link = LOCAL,
        storage: ObjectServer | None = None,
        device_loops: PickLoops = loops_on,
        device_copies: int = 2,
    ) -> None:
        """Set up; tensors come with ``bind_tensors``.

        Args:
            clock: for waiting for an arena.
            rank: global rank of this process, part of the slot's name.
            transport: name of the transport that will serve the bytes.
            wire_dtypes: glob over tensor names -> dtype word that floating-point tensors are
                rounded to (nearest, ties to even), the first match counts; or a whole policy.
            arenas: copies of the weights in host memory: the base, the one being captured, the
                newest anchor, and one for readers that are slow.
            arena_wait_s: how long staging waits for a free arena before it refuses.
            quantise: what engines serve instead of a tensor, by name: its codes and scales. They
                are sent as they come, whatever ``wire_dtypes`` says.
            link: the way to the slowest engine; on a slow one deltas are made smaller.
            storage: where WRITE_TO_STORAGE uploads to; stays the caller's.
            device_loops: what finds deltas where the tensors live, by type of device. That takes
                room for ``device_copies`` of the weights there; ``lambda kind: None`` does without,
                and all weights cross to the host for every version.
            device_copies: copies of the weights on a device: the base, and one that is compared.
        """
        self._storage = storage
        self._slot = f"publisher:global-rank:{rank}"
        self._transport = transport
        self._exporter = Exporter(wire_dtypes=wire_dtypes, quantise=quantise)
        self._link = link
        self._ring = ArenaRing(
            capacity=arenas, clock=clock, wait_s=arena_wait_s, allocate=host_block
        )
        self._shadow = DeviceShadow(clock=clock, pick=device_loops, copies=device_copies)
        self._guard = InPlaceGuard(fingerprint=self._fingerprint, live=self._live_buffers)
        self._bound: Any = None
        self._sent: tuple[Sent, ...] = ()
        self._layout: ShardLayout | None = None
        self._base: Capture | None = None
        self._base_on_device: DeviceArena | None = None
        self._staged: dict[StagedBuffers, _Staged] = {}
        self._lock = threading.Lock()

    @property
    def source_slot_id(self) -> str:
        """``publisher:global-rank:<rank>``."""
        return self._slot

    @property
    def sent(self) -> tuple[Sent, ...]:
        """How every bound tensor travels: what is rounded to what, and which rule says so."""
        return self._sent

    @property
    def supported_staging_modes(self) -> frozenset[TrainerStagingMode]:
        """Both copies; IN_PLACE, unless something is to be cast; WRITE_TO_STORAGE with one."""
        modes = {TrainerStagingMode.COPY_TO_HOST, ON_DEVICE}
        if self._storage is not None:
            modes.add(TrainerStagingMode.WRITE_TO_STORAGE)
        if self._exporter.keeps_bits:
            modes.add(IN_PLACE)
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
        exported = self._exporter.export(self._collect(tensors))
        self._layout = self._exporter.plan(exported, source_slot_id=self._slot)
        self._sent = self._exporter.report(exported)
        self._narrowed = frozenset(row.name for row in self._sent if row.is_narrowed)
        log.info("on the wire: %s", summarise(self._sent))
        self._bound = tensors
        return self._slot

    def stage_shard(
        self,
        *,
        tensors: Any,
        staging_mode: TrainerStagingMode,
        payload_format: WeightPayloadFormat,
    ) -> StagedWeightVersionShardData:
        """Capture the weights as they are now, and make a shard of them.

        Args:
            tensors: what was bound, or None.
            staging_mode: COPY_TO_HOST; COPY_TO_DEVICE, where the copy is made on the device first;
                WRITE_TO_STORAGE, which uploads in the background until the fence; or IN_PLACE.
            payload_format: FULL_TENSOR or FULL_HF_CHECKPOINT, or XOR_DELTA once a version was
                committed, and not in place.

        Raises:
            ValueError: not supported, or a delta before the first commit.
            StagingError: no free arena, weights served in place, or their layout moved.
        """
        if tensors is not None and tensors is not self._bound:
            raise ValueError("these are not the tensors that were bound")
        if payload_format is DELTA and self._layout is not None and staging_mode is not IN_PLACE:
            self._require_base()
        captured = self.capture(staging_mode=staging_mode, payload_format=payload_format)
        return self.stage_captured(captured, payload_format=payload_format)

    def prepare(self, *, payload_format: WeightPayloadFormat) -> None:
        """Have memory ready for the next captures and, once there is a base, the loops for a delta.

        Loading those takes longer than finding the changes of a small model.
        """
        if self._layout is None:
            return
        is_delta = payload_format is DELTA and self._base is not None
        for dtype in sorted({item.dtype for item in self._layout.tensors} if is_delta else ()):
            warm_loops(dtype)
        self._ring.prepare(self._layout.num_bytes, in_use=_DELTA_ARENAS if is_delta else 1)

    def capture(
        self, *, staging_mode: TrainerStagingMode, payload_format: WeightPayloadFormat
    ) -> TorchCapture:
        """Keep the weights as they are now; costs a copy of them at most.

        Raises:
            ValueError: not supported.
            NoFreeArenaError: no arena is free, or weights are served in place.
            StagingError: their layout moved, or a device has no room.
        """
        self._check(staging_mode, payload_format)
        exported, layout = self._export_again()
        if staging_mode is IN_PLACE:
            self._guard.hold()
            return TorchCapture(mode=staging_mode, layout=layout, arena=None)
        arena = self._ring.take(layout.num_bytes)
        device = None
        try:
            if staging_mode is ON_DEVICE:
                device = self._shadow.capture(layout, exported.at_hand)
            elif payload_format is DELTA:
                device = self._shadow.capture_comparable(layout, exported.at_hand)
            kept = {} if device is None else device.tensors
            copy_into(arena, layout, exported, without=kept.keys())
            devices = {item.device for item in exported.tensors.values()}
            made = copies_made(devices)
        except BaseException:
            self._shadow.drop(device)
            self._ring.drop(arena)
            raise
        is_base = payload_format is DELTA
        return TorchCapture(staging_mode, layout, arena, device, is_base, made)

    def stage_captured(
        self, captured: TorchCapture, *, payload_format: WeightPayloadFormat
    ) -> StagedWeightVersionShardData:
        """Hash a capture, encode it if it is to be a delta, and describe it.

        Raises:
            ValueError: a delta before the first commit.
            StagingError: weights that are served in place moved.
        """
        try:
            if captured.arena is None:
                return self._stage_in_place(captured.layout, payload_format)
            captured.made.wait()
            buffers, capture = self._buffers(captured, captured.arena, payload_format)
        except BaseException:
            self.drop_captured(captured)
            raise
        if not captured.is_base:
            self._shadow.drop(captured.device)
            captured.device = None
        record = _Staged(
            capture=capture,
            arena=captured.arena,
            is_delta=payload_format is DELTA,
            device=captured.device,
        )
        fence = CompletionFence(lambda: None)
        if captured.mode is TrainerStagingMode.WRITE_TO_STORAGE and self._storage is not None:
            fence = upload(self._storage, buffers)
        return self._remember(buffers, record, fence)

    def drop_captured(self, captured: TorchCapture) -> None:
        """Give a capture back that is not to be staged; idempotent."""
        if captured.mode is IN_PLACE:
            self._guard.release()
        captured.made.wait()
        if captured.arena is not None:
            self._ring.drop(captured.arena)
        self._shadow.drop(captured.device)
        captured.arena = captured.device = None

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
            self._shadow.drop(self._base_on_device)
            self._base_on_device, record.device = record.device, None
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
            del self._staged[buffers_of(staged)]
            if record.is_live:
                self._guard.release()
            self._drop(record)

    def require_still(self, staged: StagedWeightVersionShardData) -> None:
        """Refuse a shard that is served in place and was written to. Raises StagingError."""
        with self._lock:
            record = self._record(staged)
            if record is not None and record.is_live:
                self._guard.verify(by_digest=False)

    def copy_out(
        self,
        staged: StagedWeightVersionShardData,
        replace: Callable[[str, Sequence[memoryview]], None],
    ) -> None:
        """Copy what is served in place into an arena, have that served, and let weights move.

        Raises:
            NoFreeArenaError: there is no free arena.
            StagingError: the weights moved before they were copied.
            PublishError: it cannot be served from there; the weights must not move.
        """
        with self._lock:
            record = self._record(staged)
        if record is None or not record.is_live:
            return
        buffers = buffers_of(staged)
        if record.arena is None:
            record.arena = self._ring.take(buffers.payload_bytes)
        copies = copied_objects(record.arena, buffers)
        self._guard.verify(by_digest=False)
        for object_id, parts in copies.items():
            replace(object_id, parts)
        with self._lock:
            record.is_live = False
            self._guard.release()

    def before_step(self) -> None:
        """Call before every optimizer step when staging in place.

        Raises:
            StagingError: a version is still served from the live weights.
        """
        self._guard.before_step()

    def _check(self, mode: TrainerStagingMode, payload_format: WeightPayloadFormat) -> None:
        if self._layout is None:
            raise ValueError("bind_tensors was not called")
        if mode not in self.supported_staging_modes:
            raise ValueError(f"staging mode {mode.value} is not supported with these options")
        if payload_format not in self.supported_payload_formats:
            raise ValueError(f"payload format {payload_format.value} is not supported")
        if mode is IN_PLACE and payload_format is DELTA:
            raise ValueError("a delta needs a copy of its base: stage with COPY_TO_HOST")

    def _require_base(self) -> Capture:
        if self._base is None:
            raise ValueError("no version was committed yet: the first one must be FULL_TENSOR")
        return self._base

    def _buffers(
        self, captured: TorchCapture, arena: Arena, payload_format: WeightPayloadFormat
    ) -> tuple[StagedBuffers, Capture]:
        """Bring what is on a device to the host, describe all of it, and make objects of it."""
        base = self._require_base() if payload_format is DELTA else None
        device, change = captured.device, None
        if device is not None:
            if base is not None:
                before = self._base_on_device
                change = self._shadow.find(base, before, device, arena, link=self._link)
            there = () if change is None else change.encoded.keys()
            copy_into(arena, captured.layout, device, without=there)
            copies_made({item.device for item in device.tensors.values()}).wait()
        check_narrowed(arena, captured.layout, self._narrowed)
        capture = described(arena, captured.layout, change)
        if base is not None:
            found = {} if change is None else change.encoded
            buffers = delta_shard(base, capture, link=self._link, encoded_before=found)
        elif payload_format is CHECKPOINT:
            buffers = checkpoint_shard(capture)
        else:
            buffers = full_shard(capture)
        return buffers, capture

    def _export_again(self) -> tuple[Exported, ShardLayout]:
        """Return the tensors as they are now. Raises StagingError if they are laid out anew."""
        assert self._layout is not None  # noqa: S101 - bound, or the check before has refused
        try:
            exported = self._exporter.export(self._collect(self._bound))
            layout = self._exporter.plan(exported, source_slot_id=self._slot)
        except ValueError as exc:
            raise StagingError(f"the tensors are not as they were bound: {exc}") from exc
        if layout != self._layout:
            raise StagingError(
                "names, shapes, dtypes or ties of the tensors changed since they were bound; "
                "a run keeps its layout, start a new one"
            )
        return exported, self._layout

    def _collect(self, source: Any) -> Collected:
        """Return what of the source this process publishes."""
        return collect_plain(source)

    def _stage_in_place(
        self, layout: ShardLayout, payload_format: WeightPayloadFormat
    ) -> StagedWeightVersionShardData:
        buffers, entries = self._guard.describe(), self._guard.entries
        if payload_format is CHECKPOINT:
            ordered = tuple(entries[item.name] for item in layout.tensors)
            views = {name: item.data.toreadonly() for name, item in buffers.items()}
            staged = checkpoint_of(layout, ordered, views)
        else:
            staged = full_shard_in_place(layout, buffers, entries)
        fence = CompletionFence(lambda: self._guard.verify(by_digest=True))
        record = _Staged(capture=None, arena=None, is_delta=False, is_live=True)
        return self._remember(staged, record, fence)

    def _live_buffers(self) -> Mapping[str, TensorBuffer]:
        tensors = self._collect(self._bound).tensors
        return {name: live_view(name, tensor) for name, tensor in tensors.items()}

    def _fingerprint(self) -> object:
        return fingerprint(self._collect(self._bound).tensors)

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
        return self._staged.get(buffers_of(staged))

    def _drop(self, record: _Staged) -> None:
        self._shadow.drop(record.device)
        if record.arena is not None:
            self._ring.drop(record.arena)
        record.arena = record.device = None
