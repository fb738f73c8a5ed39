"""One worker's shard as payload objects: captured bytes -> object, segments, manifest.

An arena has the layout of a full payload object: header, then every tensor at a multiple of
64. So the same bytes are the base of the next delta and, without a copy, a full version.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.refit.delta.choice import LOCAL, Link
from paceline.refit.delta.codec import EncodedTensor, Tools, encode_tensor
from paceline.refit.digest import content_digest, root_digest
from paceline.refit.kernels.registry import process_tools
from paceline.refit.manifest.payload import (
    ALIGNMENT,
    HEADER_BYTES,
    describe_object,
    render_header,
)
from paceline.refit.manifest.region import region_problem
from paceline.refit.manifest.render import render_manifest
from paceline.refit.manifest.v1 import (
    Lora,
    Manifest,
    PayloadObject,
    Scheme,
    Segment,
    shape_problem,
    text_problem,
)
from paceline.refit.model import (
    DTYPE_BITS,
    Region,
    TensorBuffer,
    TensorEntry,
    WeightPayloadFormat,
    WeightVersionShardManifest,
)
from paceline.refit.staging.host import Arena


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor's place in an arena."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    region: Region | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """What a shard consists of; the same for every version of a run."""

    source_slot_id: str
    tensors: tuple[PlacedTensor, ...]
    """Sorted by name."""
    aliases: tuple[tuple[str, str], ...]
    num_bytes: int
    lora: Lora | None = None
    """The tensors are those of a LoRA."""

    @property
    def full_bytes(self) -> int:
        """Bytes of the tensors themselves."""
        return sum(item.num_bytes for item in self.tensors)

    @property
    def total_elements(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(item.shape) for item in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """One state of the weights in an arena, described."""

    layout: ShardLayout
    arena: Arena
    entries: tuple[TensorEntry, ...]
    root_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedObject:
    """One payload object and the memory it lies in."""

    object_id: str
    num_bytes: int
    parts: tuple[memoryview, ...]
    file: str = ""
    """What it is called in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedBuffers:
    """What an object server has to serve for one staged shard: the ``buffer_owner`` of ours."""

    manifest: Manifest
    objects: tuple[StagedObject, ...]
    changed_elements: int
    total_elements: int
    full_bytes: int
    index: bytes = b""
    """Names the files of a checkpoint."""

    @property
    def payload_bytes(self) -> int:
        """Bytes that a reader of everything fetches."""
        return sum(item.num_bytes for item in self.objects)

    def to_shard_manifest(self, *, transport: str) -> WeightVersionShardManifest:
        """Render the manifest for the trainer contract."""
        return WeightVersionShardManifest(
            data=render_manifest(self.manifest),
            tensor_count=len(self.manifest.tensors),
            total_bytes=self.payload_bytes,
            transport=transport,
        )


def plan_layout(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    *,
    aliases: Mapping[str, str],
    source_slot_id: str,
    regions: Mapping[str, Region] | None = None,
    lora: Lora | None = None,
) -> ShardLayout:
    """Place tensors, given as (name, dtype, shape), one after another.

    ``regions`` says of some names which part of their tensor this is, and ``shape`` is the part's.

    Raises:
        ValueError: there are none, or a manifest cannot say what one is: every engine would refuse
            every version.
    """
    placed, end = [], HEADER_BYTES
    parts = regions or {}
    for name in aliases:
        _refuse(name, text_problem(name))
    for name, dtype, shape in sorted(tensors):
        region = parts.get(name)
        problem = "" if region is None else region_problem(region, shape)
        _refuse(name, text_problem(name) or shape_problem(shape) or problem)
        offset = end + -end % ALIGNMENT
        num_bytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
        placed.append(
            PlacedTensor(
                name=name,
                dtype=dtype,
                shape=shape,
                offset=offset,
                num_bytes=num_bytes,
                region=region,
            )
        )
        end = offset + num_bytes
    if not placed:
        raise ValueError("there are no tensors to publish")
    return ShardLayout(
        source_slot_id=source_slot_id,
        tensors=tuple(placed),
        aliases=tuple(sorted(aliases.items())),
        num_bytes=end,
        lora=lora,
    )


def _refuse(name: str, problem: str) -> None:
    if problem:
        raise ValueError(f"tensor {name[:80]!r} cannot stand in a manifest: {problem}")


def describe_capture(
    layout: ShardLayout, arena: Arena, *, known: Mapping[str, TensorEntry] | None = None
) -> Capture:
    """Digest every tensor of a filled arena, and write the header and the padding.

    ``known`` are tensors of which it is known what they are: they are not read.
    """
    known = known or {}
    end = HEADER_BYTES
    arena.data[:HEADER_BYTES] = render_header(WeightPayloadFormat.FULL_TENSOR)
    for item in layout.tensors:
        arena.data[end : item.offset] = bytes(item.offset - end)
        end = item.offset + item.num_bytes

    def entry(item: PlacedTensor) -> TensorEntry:
        data = arena.data[item.offset : item.offset + item.num_bytes]
        return known.get(item.name) or _entry(item, data)

    entries = tuple(process_tools().run(entry, layout.tensors))
    return Capture(layout=layout, arena=arena, entries=entries, root_digest=root_digest(entries))


def full_shard(capture: Capture) -> StagedBuffers:
    """Stage a capture as a full version, served from its arena."""
    data = capture.arena.data.toreadonly()
    return _full(
        capture.layout, capture.entries, [data], [item.offset for item in capture.layout.tensors]
    )


def full_shard_in_place(
    layout: ShardLayout, buffers: Mapping[str, TensorBuffer], entries: Mapping[str, TensorEntry]
) -> StagedBuffers:
    """Stage live memory as a full version; only header and padding are ours."""
    parts, end = [memoryview(render_header(WeightPayloadFormat.FULL_TENSOR))], HEADER_BYTES
    for item in layout.tensors:
        parts += [memoryview(bytes(item.offset - end)), buffers[item.name].data.toreadonly()]
        end = item.offset + item.num_bytes
    ordered = tuple(entries[item.name] for item in layout.tensors)
    return _full(layout, ordered, parts, [item.offset for item in layout.tensors])


def delta_shard(
    base: Capture,
    new: Capture,
    *,
    tools: Tools | None = None,
    link: Link = LOCAL,
    encoded_before: Mapping[str, EncodedTensor | None] | None = None,
) -> StagedBuffers:
    """Stage what changed between two captures; the result has memory of its own.

    ``link`` is the way to the slowest reader: on a slow one smaller schemes are worth their time.
    ``encoded_before`` are tensors that need no comparing here any more; None is one that stays.
    """
    there = encoded_before or {}
    tools = tools or process_tools()
    parts, end = [memoryview(render_header(WeightPayloadFormat.XOR_DELTA))], HEADER_BYTES
    found: list[tuple[PlacedTensor, int, EncodedTensor]] = []
    for item in new.layout.tensors:
        stop = item.offset + item.num_bytes
        before, after = (c.arena.data[item.offset : stop] for c in (base, new))
        if item.name in there:
            encoded = there[item.name]
        else:
            encoded = encode_tensor(before, after, dtype=item.dtype, tools=tools, link=link)
        if encoded is not None:
            found.append((item, end, encoded))
            parts.append(memoryview(bytes(encoded.data)))
            end += len(encoded.data)
    described = describe_object(parts, run=tools.run)
    segments = tuple(
        Segment(
            tensor=item.name,
            scheme=encoded.scheme,
            object_id=described.object_id,
            offset=offset,
            num_bytes=len(encoded.data),
            changed_elements=encoded.changed_elements,
        )
        for item, offset, encoded in found
    )
    return _staged(new.layout, new.entries, base.root_digest, (described, parts), segments)


def _full(
    layout: ShardLayout,
    entries: tuple[TensorEntry, ...],
    parts: Sequence[memoryview],
    offsets: Sequence[int],
) -> StagedBuffers:
    described = describe_object(parts, run=process_tools().run)
    segments = tuple(
        Segment(
            tensor=item.name,
            scheme=Scheme.RAW,
            object_id=described.object_id,
            offset=offset,
            num_bytes=item.num_bytes,
            changed_elements=math.prod(item.shape),
        )
        for item, offset in zip(layout.tensors, offsets, strict=True)
    )
    return _staged(layout, entries, None, (described, parts), segments)


def _staged(
    layout: ShardLayout,
    entries: tuple[TensorEntry, ...],
    base_root: str | None,
    payload: tuple[PayloadObject, Sequence[memoryview]],
    segments: tuple[Segment, ...],
) -> StagedBuffers:
    described, parts = payload
    is_full = base_root is None
    return StagedBuffers(
        manifest=Manifest(
            payload_format=(
                WeightPayloadFormat.FULL_TENSOR if is_full else WeightPayloadFormat.XOR_DELTA
            ),
            source_slot_id=layout.source_slot_id,
            base_root=base_root,
            root_digest=root_digest(entries),
            tensors=entries,
            aliases=layout.aliases,
            objects=(described,),
            segments=segments,
            lora=layout.lora,
        ),
        objects=(
            StagedObject(
                object_id=described.object_id, num_bytes=described.num_bytes, parts=tuple(parts)
            ),
        ),
        changed_elements=sum(segment.changed_elements for segment in segments),
        total_elements=layout.total_elements,
        full_bytes=layout.full_bytes,
    )


def _entry(item: PlacedTensor, data: memoryview) -> TensorEntry:
    return TensorEntry(
        name=item.name,
        dtype=item.dtype,
        shape=item.shape,
        digest=content_digest(data),
        num_bytes=item.num_bytes,
        region=item.region,
    )
