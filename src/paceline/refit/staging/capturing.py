"""Tensors into arenas: copied, described, or taken out of live memory at the last moment."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from paceline.refit.errors import StagingError
from paceline.refit.model import StagedWeightVersionShardData
from paceline.refit.staging.host import Arena
from paceline.refit.staging.shadow import Change
from paceline.refit.staging.shard import Capture, ShardLayout, StagedBuffers, describe_capture
from paceline.refit.staging.torch_bytes import WORD_DTYPES, is_host_block


class Readable(Protocol):
    """Tensors by name, some of which are made when they are read."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All there are, of the right dtype and shape."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return what one holds now."""
        ...


def copy_into(
    arena: Arena,
    layout: ShardLayout,
    source: Readable,
    *,
    without: Collection[str] = (),
) -> None:
    """Copy tensors to their places, rounded to the dtypes that are sent.

    From a GPU this only begins: see ``torch_bytes.copies_made``. What lies in host memory as it is
    sent is copied by this thread alone: torch's threads would wait for each other at every tensor,
    for as long as others want the processor.
    """
    whole = torch.frombuffer(arena.data, dtype=torch.uint8)
    with torch.no_grad():
        for item in layout.tensors:
            if item.name not in source.tensors or item.name in without:
                continue
            tensor = source.read(item.name)
            raw = whole[item.offset : item.offset + item.num_bytes]
            dtype = WORD_DTYPES[item.dtype]
            if tensor.dtype == dtype and is_host_block(tensor):
                flat = tensor.detach().reshape(-1).view(torch.uint8)
                np.copyto(raw.numpy(), flat.numpy())
            else:
                raw.view(dtype).view(item.shape).copy_(tensor, non_blocking=True)


def check_narrowed(arena: Arena, layout: ShardLayout, names: Collection[str]) -> None:
    """Refuse weights that did not fit into the smaller range of the dtype they are sent in.

    Raises:
        StagingError: one is not finite any more, or never was.
    """
    whole = torch.frombuffer(arena.data, dtype=torch.uint8)
    for item in layout.tensors:
        if item.name in names:
            raw = whole[item.offset : item.offset + item.num_bytes]
            if not bool(raw.view(WORD_DTYPES[item.dtype]).float().isfinite().all()):
                raise StagingError(
                    f"tensor {item.name!r} has weights that {item.dtype} cannot hold: keep it, or "
                    "round it to BF16"
                )


def described(arena: Arena, layout: ShardLayout, change: Change | None) -> Capture:
    """Describe a filled arena; what is known not to have changed is not read."""
    if change is None:
        return describe_capture(layout, arena)
    there = change.encoded
    base = change.base.entries
    known = {entry.name: entry for entry in base if there.get(entry.name, entry) is None}
    return describe_capture(layout, arena, known=known)


def copied_objects(arena: Arena, buffers: StagedBuffers) -> Mapping[str, Sequence[memoryview]]:
    """Copy every object of a shard into an arena, one after another."""
    copies: dict[str, Sequence[memoryview]] = {}
    end = 0
    for item in buffers.objects:
        start = end
        for part in item.parts:
            flat = part.cast("B")
            arena.data[end : end + len(flat)] = flat
            end += len(flat)
        copies[item.object_id] = (arena.data[start:end].toreadonly(),)
    return copies


def buffers_of(staged: StagedWeightVersionShardData) -> StagedBuffers:
    """Return what one of our adapters staged. Raises TypeError for another's."""
    if not isinstance(staged.buffer_owner, StagedBuffers):
        raise TypeError("this shard was staged by another adapter")
    return staged.buffer_owner
