"""Versions built by hand, for tests of whoever fetches and installs them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.refit.delta.codec import encode_as, encode_tensor
from paceline.refit.digest import content_digest, root_digest
from paceline.refit.manifest.payload import describe_object, render_header
from paceline.refit.manifest.v1 import Lora, Manifest, Scheme, Segment
from paceline.refit.model import (
    DTYPE_BITS,
    Region,
    TensorBuffer,
    TensorEntry,
    WeightPayloadFormat,
)

CHUNK_BYTES = 1000
"""So small that the smallest tensors of a test are several chunks."""

Half = tuple[dict[str, TensorBuffer], dict[str, Region]]
"""What one of two processes has of the tensors, and where it lies in them."""


def tensor_entry(buffer: TensorBuffer) -> TensorEntry:
    """Describe one tensor as the manifest does."""
    return TensorEntry(
        name=buffer.name,
        dtype=buffer.dtype,
        shape=buffer.shape,
        digest=content_digest(buffer.data),
        num_bytes=len(buffer.data),
    )


def full_payload(
    tensors: Iterable[TensorBuffer],
    *,
    aliases: Sequence[tuple[str, str]] = (),
    chunk_bytes: int | None = CHUNK_BYTES,
) -> tuple[Manifest, bytes]:
    """Return a full version of ``tensors`` and its one object; chunks of None are a trainer's."""
    ordered = sorted(tensors, key=lambda item: item.name)
    data, segments = bytearray(render_header(WeightPayloadFormat.FULL_TENSOR)), []
    for item in ordered:
        data.extend(bytes(-len(data) % 64))
        segments.append((item.name, Scheme.RAW, len(data), len(item.data), math.prod(item.shape)))
        data.extend(item.data)
    manifest = _manifest(ordered, None, aliases, bytes(data), segments, chunk_bytes)
    return manifest, bytes(data)


def delta_payload(
    base: Mapping[str, TensorBuffer],
    new: Mapping[str, TensorBuffer],
    *,
    aliases: Sequence[tuple[str, str]] = (),
    chunk_bytes: int | None = CHUNK_BYTES,
    scheme_of: Mapping[str, Scheme] | None = None,
) -> tuple[Manifest, bytes]:
    """Return the delta between two states of the same tensors and its one object.

    ``scheme_of`` overrides the encoder's choice, by name.
    """
    data, segments = bytearray(render_header(WeightPayloadFormat.XOR_DELTA)), []
    for name, item in sorted(new.items()):
        found = encode_tensor(base[name].data, item.data, dtype=item.dtype)
        if found is not None:
            changed = found.changed_elements
            scheme, payload = found.scheme, found.data
            if scheme_of is not None and name in scheme_of:
                scheme = scheme_of[name]
                payload = encode_as(scheme, base[name].data, item.data, dtype=item.dtype)
            segments.append((name, scheme, len(data), len(payload), changed))
            data.extend(payload)
    ordered = [new[name] for name in sorted(new)]
    root = root_digest(tensor_entry(item) for item in base.values())
    return _manifest(ordered, root, aliases, bytes(data), segments, chunk_bytes), bytes(data)


def slot_of(
    manifest: Manifest,
    *,
    slot: str,
    regions: Mapping[str, Region],
    base: Iterable[TensorBuffer] = (),
) -> Manifest:
    """Return a manifest as one slot's, whose tensors are parts of larger ones.

    ``base`` is what the slot's tensors were, if the manifest is a delta's.
    """

    def placed(entries: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
        return tuple(replace(entry, region=regions.get(entry.name)) for entry in entries)

    entries = placed(manifest.tensors)
    before = placed(map(tensor_entry, base))
    return replace(
        manifest,
        source_slot_id=slot,
        tensors=entries,
        root_digest=root_digest(entries),
        base_root=None if manifest.base_root is None else root_digest(before),
    )


def halves(state: Mapping[str, TensorBuffer], *, axis: int) -> Sequence[Half]:
    """Cut every matrix in two along an axis; what is none is all in the first half."""
    found: tuple[Half, Half] = (({}, {}), ({}, {}))
    for name, buffer in state.items():
        if len(buffer.shape) < 2 or buffer.shape[axis] < 2:
            found[0][0][name] = buffer
            continue
        words = np.frombuffer(buffer.data, dtype=f"<u{DTYPE_BITS[buffer.dtype] // 8}")
        for (parts, regions), words_here, first in zip(
            found,
            np.split(words.reshape(buffer.shape), [buffer.shape[axis] // 2], axis=axis),
            (0, buffer.shape[axis] // 2),
            strict=True,
        ):
            offsets = tuple(first if at == axis else 0 for at in range(len(buffer.shape)))
            data = memoryview(bytearray(words_here.tobytes()))
            parts[name] = replace(buffer, shape=words_here.shape, data=data)
            regions[name] = Region(global_shape=buffer.shape, offsets=offsets)
    return found


def halves_payload(
    state: Mapping[str, TensorBuffer],
    *,
    axis: int,
    base: Mapping[str, TensorBuffer] | None = None,
    lora: Lora | None = None,
    aliases: Sequence[tuple[str, str]] = (),
) -> list[tuple[Manifest, bytes]]:
    """Return a version as two processes publish it, each half of every matrix."""
    found = []
    before = ({}, {}) if base is None else [parts for parts, _ in halves(base, axis=axis)]
    for slot, (parts, regions), old in zip("ab", halves(state, axis=axis), before, strict=True):
        ties = tuple(pair for pair in aliases if pair[1] in parts) if slot == "a" else ()
        if base is None:
            manifest, data = full_payload(parts.values(), aliases=ties)
        else:
            manifest, data = delta_payload(old, parts, aliases=ties)
        made = slot_of(manifest, slot=slot, regions=regions, base=old.values())
        found.append((replace(made, lora=lora), data))
    return found


def _manifest(
    ordered: Sequence[TensorBuffer],
    base_root: str | None,
    aliases: Sequence[tuple[str, str]],
    data: bytes,
    segments: Sequence[tuple[str, Scheme, int, int, int]],
    chunk_bytes: int | None,
) -> Manifest:
    entries = tuple(tensor_entry(item) for item in ordered)
    item = describe_object([memoryview(data)], chunk_bytes=chunk_bytes)
    is_full = base_root is None
    return Manifest(
        payload_format=WeightPayloadFormat.FULL_TENSOR
        if is_full
        else WeightPayloadFormat.XOR_DELTA,
        source_slot_id="publisher:global-rank:0",
        base_root=base_root,
        root_digest=root_digest(entries),
        tensors=entries,
        aliases=tuple(sorted(aliases)),
        objects=(item,),
        segments=tuple(
            Segment(
                tensor=name,
                scheme=scheme,
                object_id=item.object_id,
                offset=offset,
                num_bytes=size,
                changed_elements=changed,
            )
            for name, scheme, offset, size, changed in segments
        ),
    )
