"""Compaction in triton: two passes over the tensors, no mask, no intermediate of their size.

The first pass counts what differs per block, a sum over the counts says where each block's
elements go, the second pass writes them there.
"""

import torch
import triton
import triton.language as tl

from paceline.refit.kernels.protocol import Compacted
from paceline.refit.kernels.torch import TorchLoops

_BLOCK = 1024


class TritonLoops(TorchLoops):
    """Compaction by kernels of ours; writing a few elements is torch's."""

    name = "triton"

    def compact(self, old: torch.Tensor, new: torch.Tensor) -> Compacted:
        """Return what differs."""
        blocks = triton.cdiv(len(old), _BLOCK)
        counts = torch.zeros(blocks, dtype=torch.int32, device=old.device)
        if blocks:
            _count[(blocks,)](old, new, counts, len(old), BLOCK=_BLOCK)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int64)
        found = int(ends[-1]) if blocks else 0
        positions = torch.empty(found, dtype=torch.int64, device=old.device)
        before, after = (torch.empty(found, dtype=old.dtype, device=old.device) for _ in range(2))
        if found:
            starts = ends - counts
            _fill[(blocks,)](old, new, starts, positions, before, after, len(old), BLOCK=_BLOCK)
        return Compacted(positions=positions, old=before, new=after)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _count(old, new, counts, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    before = tl.load(old + at, mask=inside, other=0)
    after = tl.load(new + at, mask=inside, other=0)
    tl.store(counts + block, tl.sum((before != after).to(tl.int32)))


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _fill(old, new, starts, positions, olds, news, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    before = tl.load(old + at, mask=inside, other=0)
    after = tl.load(new + at, mask=inside, other=0)
    differs = before != after
    slot = tl.load(starts + block) + tl.cumsum(differs.to(tl.int32)) - 1
    tl.store(positions + slot, at, mask=differs)
    tl.store(olds + slot, before, mask=differs)
    tl.store(news + slot, after, mask=differs)
