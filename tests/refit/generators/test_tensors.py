"""Live views: every byte of the state dict once, writable, and nothing that cannot be proven."""

import pytest
import torch

from paceline.core.errors import PreflightError
from paceline.refit.generators.transformers.tensors import view_live_tensors


class Odd(torch.nn.Module):
    """Parameters and buffers of every awkward kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
        self.second = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(7, dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def test_every_tensor_once() -> None:
    """Ties are aliases of the first name, persistent buffers are there, others are not."""
    live = view_live_tensors(Odd())
    kinds = {name: (each.dtype, each.shape) for name, each in live.buffers.items()}
    assert kinds == {
        "first.weight": ("BF16", (2, 3)),
        "count": ("I64", ()),
        "nothing": ("BOOL", (0,)),
    }
    assert live.aliases == {"second.weight": "first.weight"}


def test_views_are_the_memory_itself() -> None:
    """What is written into a view is what the module computes with."""
    module = Odd()
    live = view_live_tensors(module)
    live.buffers["count"].data[:] = (9).to_bytes(8, "little")
    live.buffers["first.weight"].data[:2] = b"\x80\x3f"  # 1.0 in bfloat16
    assert module.get_buffer("count").item() == 9
    assert module.second.weight[0, 0].item() == 1.0


def holding(tensor: torch.Tensor, other: torch.Tensor | None = None) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("one", tensor)
    if other is not None:
        module.register_buffer("two", other)
    return module


BLOCK = torch.zeros(8)


@pytest.mark.parametrize(
    "module",
    [
        holding(torch.zeros(4, 3).t()),
        holding(BLOCK[:6], BLOCK[4:]),
        holding(BLOCK, BLOCK.view(2, 4)),
        holding(torch.zeros(2, dtype=torch.complex128)),
        holding(torch.zeros(2, device="meta")),
    ],
    ids=["strided", "overlapping", "two shapes", "unnamed dtype", "elsewhere"],
)
def test_refusals(module: torch.nn.Module) -> None:
    """A tensor whose bytes cannot be written and proven alone is refused by name."""
    with pytest.raises(PreflightError, match=r"one|two"):
        view_live_tensors(module)


def test_neighbours_are_fine() -> None:
    """Two tensors beside each other in one storage are two tensors."""
    assert len(view_live_tensors(holding(BLOCK[:4], BLOCK[4:])).buffers) == 2
