"""A capture as a checkpoint in Hugging Face's layout: safetensors files, and an index of them.

The files are payload objects like any other, so that a manifest, its signature and every transport
hold for them too; a bucket also shows them under their own names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from paceline.refit.delta.canonical import (
    FullTensor,
    full_shard_name,
    full_shard_parts,
    render_full_index,
)
from paceline.refit.delta.order import kind_of
from paceline.refit.digest import root_digest
from paceline.refit.kernels.registry import process_tools
from paceline.refit.manifest.payload import describe_object
from paceline.refit.manifest.v1 import Manifest, PayloadObject, Scheme, Segment
from paceline.refit.model import TensorEntry, WeightPayloadFormat
from paceline.refit.staging.shard import (
    Capture,
    PlacedTensor,
    ShardLayout,
    StagedBuffers,
    StagedObject,
)

FILE_BYTES = 2**30
"""Tensors per file, unless one alone is larger: stores copy up to 5 GiB in one request."""


def checkpoint_shard(capture: Capture, *, file_bytes: int = FILE_BYTES) -> StagedBuffers:
    """Stage a capture as a full version in files, served from its arena."""
    data = capture.arena.data.toreadonly()
    views = {
        item.name: data[item.offset : item.offset + item.num_bytes]
        for item in capture.layout.tensors
    }
    return checkpoint_of(capture.layout, capture.entries, views, file_bytes=file_bytes)


def checkpoint_of(
    layout: ShardLayout,
    entries: tuple[TensorEntry, ...],
    views: Mapping[str, memoryview],
    *,
    file_bytes: int = FILE_BYTES,
) -> StagedBuffers:
    """Stage tensors that stand still, wherever they lie, as a full version in files."""
    files = list(_files(layout, file_bytes))
    staged, described = list[StagedObject](), list[PayloadObject]()
    segments, weight_map = list[Segment](), dict[str, str]()
    for index, tensors in enumerate(files):
        name = full_shard_name(index, len(files))
        parts = _parts(views, tensors)
        item = describe_object(parts, run=process_tools().run)
        described.append(item)
        staged.append(
            StagedObject(object_id=item.object_id, num_bytes=item.num_bytes, parts=parts, file=name)
        )
        segments += _segments(item, tensors)
        weight_map |= dict.fromkeys((each.name for each in tensors), name)
    return StagedBuffers(
        manifest=Manifest(
            payload_format=WeightPayloadFormat.FULL_HF_CHECKPOINT,
            source_slot_id=layout.source_slot_id,
            base_root=None,
            root_digest=root_digest(entries),
            tensors=entries,
            aliases=layout.aliases,
            objects=tuple(sorted(described, key=lambda item: item.object_id)),
            segments=tuple(sorted(segments, key=lambda segment: segment.tensor)),
            lora=layout.lora,
        ),
        objects=tuple(staged),
        changed_elements=layout.total_elements,
        total_elements=layout.total_elements,
        full_bytes=layout.full_bytes,
        index=render_full_index(weight_map, total_size=layout.full_bytes),
    )


def _files(layout: ShardLayout, limit: int) -> Iterator[Sequence[PlacedTensor]]:
    """Share the tensors out by name; in a file the widest elements come first: all are aligned."""
    file: list[PlacedTensor] = []
    for item in layout.tensors:
        if file and sum(each.num_bytes for each in file) + item.num_bytes > limit:
            yield sorted(file, key=_alignment)
            file = []
        file.append(item)
    yield sorted(file, key=_alignment)


def _alignment(item: PlacedTensor) -> tuple[int, str]:
    return -kind_of(item.dtype).width, item.name


def _parts(
    views: Mapping[str, memoryview], tensors: Sequence[PlacedTensor]
) -> tuple[memoryview, ...]:
    """Return header and tensors of one file; their bytes are not copied."""
    rows = {
        item.name: FullTensor(dtype=item.dtype, shape=item.shape, data=views[item.name])
        for item in tensors
    }
    return tuple(memoryview(part).cast("B") for part in full_shard_parts(rows))


def _segments(item: PayloadObject, tensors: Sequence[PlacedTensor]) -> Iterator[Segment]:
    """Yield where the tensors of a file are: one after another up to its end."""
    end = item.num_bytes - sum(each.num_bytes for each in tensors)
    for each in tensors:
        yield Segment(
            tensor=each.name,
            scheme=Scheme.RAW,
            object_id=item.object_id,
            offset=end,
            num_bytes=each.num_bytes,
            changed_elements=math.prod(each.shape),
        )
        end += each.num_bytes
