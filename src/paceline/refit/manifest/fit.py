"""Whether a version's tensors are those that somebody holds, and where its parts are. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.refit.errors import VerifyError
from paceline.refit.manifest.region import block_of, check_cover, whole_of
from paceline.refit.manifest.v1 import Lora, Manifest
from paceline.refit.model import DTYPE_BITS, TensorBuffer, TensorEntry

_NAMES_SHOWN = 5


def check_layout(
    manifest: Manifest,
    live: Mapping[str, TensorBuffer],
    aliases: Mapping[str, str],
    *,
    lora: Lora | None = None,
) -> None:
    """Refuse a version whose tensors are not the live ones: names, dtypes, shapes, ties.

    ``lora`` is what the live tensors are a LoRA of; None: they are the model's own.

    Raises:
        VerifyError: naming what differs.
    """
    _check_kind(manifest.lora, lora)
    entries = {entry.name: entry for entry in manifest.tensors}
    refuse_names(sorted(entries.keys() - live.keys()), "in the version, not in the engine")
    refuse_names(sorted(live.keys() - entries.keys()), "in the engine, not in the version")
    for name, entry in entries.items():
        here = live[name]
        if (here.dtype, here.shape) != (entry.dtype, entry.shape):
            raise VerifyError(
                f"tensor {name!r} is {entry.dtype}{list(entry.shape)} in the version and "
                f"{here.dtype}{list(here.shape)} in the engine; nothing is cast or reshaped"
            )
        if len(here.data) != entry.num_bytes:
            raise VerifyError(f"tensor {name!r}: {len(here.data)} live, {entry.num_bytes} bytes")
    tied = {pair for pair in manifest.aliases if aliases.get(pair[0]) != pair[1]}
    tied |= set(aliases.items()) - set(manifest.aliases)
    refuse_names(
        sorted(f"{name} = {canonical}" for name, canonical in tied), "tied on one side only"
    )


def _check_kind(there: Lora | None, here: Lora | None) -> None:
    if there == here:
        return
    if here is None:
        raise VerifyError(
            "the version is a LoRA alone and the engine holds a whole model: publish merged "
            "weights for it, or let it serve LoRAs"
        )
    if there is None:
        raise VerifyError("the version is a whole model, and the engine takes LoRAs for its own")
    what = "weights" if there.model_root != here.model_root else "modules, rank or alpha"
    raise VerifyError(f"the version's LoRA is for other {what} than the engine's")


def check_shards(
    manifests: Sequence[Manifest],
    live: Mapping[str, TensorBuffer],
    aliases: Mapping[str, str],
    *,
    lora: Lora | None = None,
) -> None:
    """Refuse shards that together are not exactly the live tensors, each element once.

    Raises:
        VerifyError: naming what differs.
    """
    for manifest in manifests:
        _check_kind(manifest.lora, lora)
    slots = [manifest.source_slot_id for manifest in manifests]
    refuse_names(sorted({slot for slot in slots if slots.count(slot) > 1}), "a slot comes twice")
    by_name: dict[str, list[TensorEntry]] = {}
    for manifest in manifests:
        for entry in manifest.tensors:
            by_name.setdefault(entry.name, []).append(entry)
    refuse_names(sorted(by_name.keys() - live.keys()), "in the version, not in the engine")
    refuse_names(sorted(live.keys() - by_name.keys()), "in the engine, not in the version")
    for name, entries in by_name.items():
        check_cover(name, entries)
        here, dtype, shape = live[name], entries[0].dtype, whole_of(entries[0])
        if (here.dtype, here.shape) != (dtype, shape):
            raise VerifyError(
                f"tensor {name!r} is {dtype}{list(shape)} in the version and "
                f"{here.dtype}{list(here.shape)} in the engine; nothing is cast or reshaped"
            )
    said = {pair for manifest in manifests for pair in manifest.aliases}
    refuse_names(
        sorted(f"{name} = {canonical}" for name, canonical in said ^ set(aliases.items())),
        "tied on one side only",
    )


def part_of(live: TensorBuffer, entry: TensorEntry) -> TensorBuffer | None:
    """Return the live memory of an entry; None if that is not one stretch of it."""
    region = entry.region
    if region is None:
        return live
    block = block_of(region, entry.shape)
    if block is None:
        return None
    width = DTYPE_BITS[live.dtype] // 8
    first, count = block[0] * width, block[1] * width
    return replace(live, shape=entry.shape, data=live.data[first : first + count])


def strided_part(live: TensorBuffer, entry: TensorEntry) -> npt.NDArray[Any]:
    """Return the live words of a box, as a view with strides."""
    assert entry.region is not None  # noqa: S101 - a whole tensor is one stretch
    words = np.frombuffer(live.data, dtype=f"<u{DTYPE_BITS[live.dtype] // 8}")
    box = zip(entry.region.offsets, entry.shape, strict=True)
    return words.reshape(live.shape)[tuple(slice(at, at + length) for at, length in box)]


def dense_part(live: TensorBuffer, entry: TensorEntry) -> TensorBuffer:
    """Return the bytes of an entry: the live ones, or a copy where they are not one stretch."""
    found = part_of(live, entry)
    if found is not None:
        return found
    data = np.empty(math.prod(entry.shape) * (DTYPE_BITS[live.dtype] // 8), dtype=np.uint8)
    there = strided_part(live, entry)
    np.copyto(data.view(there.dtype).reshape(entry.shape), there)
    return replace(live, shape=entry.shape, data=data.data)


def refuse_names(names: Sequence[str], why: str) -> None:
    """Raise VerifyError if there are any."""
    if not names:
        return
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    raise VerifyError(f"{shown}{f' and {more} more' if more > 0 else ''}: {why}")
