"""Device loops in plain torch: right on every device that torch knows."""

import torch

from paceline.refit.kernels.protocol import Compacted


class TorchLoops:
    """Whole-tensor expressions; a mask of one byte per element is all the memory they take."""

    name = "torch"

    def compact(self, old: torch.Tensor, new: torch.Tensor) -> Compacted:
        """Return what differs."""
        positions = torch.nonzero(old != new).reshape(-1)
        return Compacted(positions=positions, old=old[positions], new=new[positions])

    def move(
        self, words: torch.Tensor, positions: torch.Tensor, steps: torch.Tensor, *, is_float: bool
    ) -> None:
        """Write the words that are so many steps further."""
        before = words[positions]
        after = before + steps
        if is_float:
            lowest = torch.iinfo(words.dtype).min
            ranks = torch.where(before < 0, ~before, before ^ lowest) + steps
            after = torch.where(ranks < 0, ranks ^ lowest, ~ranks)
        words.index_copy_(0, positions, after)
