"""ZeRO stage 3 from the attributes of its parameters: every element once, from who holds it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.registry import load_entry
from paceline.refit.trainers.deepspeed import ZeroSource, ZeroTrainer
from paceline.refit.trainers.registry import TRAINER_ENGINES

SHAPES = ((7, 5), (3,), (), (2, 3, 4), (1,))


class Net(torch.nn.Module):
    """Parameters of some shapes, one of them under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for index, shape in enumerate(SHAPES):
            self.register_parameter(
                f"w{index}", torch.nn.Parameter(torch.randn(shape, generator=generator))
            )
        self.tied = self.w0
        self.register_buffer("count", torch.arange(4))


def cut(world: int, rank: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a module as one process holds it, and what it was: runs of equal size, padded."""
    net = Net()
    full = {name: each.detach().clone() for name, each in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        held: Any = parameter
        size = -(-parameter.numel() // world)
        padded = torch.full((size * world,), 9.0)
        padded[: parameter.numel()] = full[name].view(-1)
        held.ds_tensor = padded[rank * size : (rank + 1) * size].clone()
        held.ds_shape, held.ds_numel = parameter.shape, parameter.numel()
        held.data = torch.empty(0)
    return net, full


@given(world=st.integers(1, 6))
@settings(max_examples=6)
def test_all_processes_publish_all_elements_once(world: int) -> None:
    """Runs without their padding, buffers from one process, ties as ties."""
    found: dict[str, torch.Tensor] = {}
    slots, filled, aliases = set[str](), set[str](), set[tuple[str, str]]()
    for rank in range(world):
        net, full = cut(world, rank)
        source = ZeroSource(net, rank=rank, world=world)
        part = source.collect()
        slots |= set(source.slots)
        if part.tensors:
            filled.add(source.slot)
        aliases |= set(part.aliases.items())
        for name, tensor in part.tensors.items():
            whole = found.setdefault(name, torch.full((full[name].numel(),), float("nan")))
            region = part.regions.get(name)
            first = 0 if region is None else region.offsets[0]
            assert region is None or region.global_shape == tuple(full[name].shape)
            place = whole[first : first + tensor.numel()]
            assert bool(place.isnan().all()), f"{name} comes twice"
            place.copy_(tensor.reshape(-1))
    assert slots == filled
    assert aliases == {("tied", "w0")}
    assert found.keys() == full.keys() - {"tied"}
    for name, whole in found.items():
        assert torch.equal(whole, full[name].reshape(-1).float()), name


def test_what_is_not_known_is_refused() -> None:
    """No parameter that is cut, or one that fewer than all processes share."""
    assert load_entry(TRAINER_ENGINES, "deepspeed", port="trainer engine") is ZeroTrainer
    with pytest.raises(ValueError, match="use the sharded trainer"):
        ZeroSource(Net(), rank=0, world=2)
    net, _ = cut(2, 0)
    with pytest.raises(ValueError, match="not cut over all 4"):
        ZeroSource(net, rank=0, world=4)
