"""DeepSpeed's ZeRO stage 3: each process holds a run of every parameter, and publishes that.

What is where is read from the attributes that DeepSpeed puts on parameters (``ds_tensor``,
``ds_shape``, ``ds_numel``). Nothing is gathered. The runs are of the dtype that the model computes
in; the optimizer's masters stay where they are.
"""

from typing import Any

import torch
from torch import distributed

from paceline.refit.model import Region
from paceline.refit.trainers.exporting import buffer_names
from paceline.refit.trainers.protocol import Collected
from paceline.refit.trainers.sharded import ShardedTrainer
from paceline.refit.trainers.topology import MeshAxes, Ownership, TensorSpec, plan_ownership


class ZeroSource:
    """What one process publishes of a model; made once, when the tensors are bound."""

    def __init__(self, module: torch.nn.Module, *, rank: int, world: int) -> None:
        """Find out who publishes what.

        Raises:
            ValueError: no parameter is cut, or one is cut over fewer than all processes.
        """
        self._module, self._rank = module, rank
        self._axes = MeshAxes(names=("zero",), sizes=(world,))
        cut = {name: each for name, each in self._state().items() if _is_cut(each)}
        if not cut:
            raise ValueError("no parameter is cut by ZeRO stage 3: use the sharded trainer")
        for name, each in cut.items():
            if each.ds_tensor.numel() * (world - 1) >= max(each.ds_numel, world):
                raise ValueError(
                    f"parameter {name!r} is not cut over all {world} processes; hierarchical "
                    "partitions are not known"
                )
        self._filled = max(-(-each.ds_numel // each.ds_tensor.numel()) for each in cut.values())
        self._copies = self._plan_copies()

    @property
    def slot(self) -> str:
        """This process's contribution."""
        return self._axes.slot((self._rank,))

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of all who have anything."""
        filled = {self._axes.slot((rank,)) for rank in range(self._filled)}
        return tuple(sorted(filled | set(self._copies.slots())))

    def collect(self) -> Collected:
        """Return this process's parts as they are now; nothing is copied."""
        found = Collected(tensors={}, buffers=buffer_names(self._module))
        seen: dict[int, str] = {}
        for name, each in self._state().items():
            if id(each) in seen:
                if seen[id(each)] in found.tensors:
                    found.aliases[name] = seen[id(each)]
                continue
            seen[id(each)] = name
            if _is_cut(each):
                self._take_run(name, each, found)
            elif self._copies.part(name, (self._rank,)) is not None:
                found.tensors[name] = each.detach()
        return found

    def _take_run(self, name: str, parameter: Any, found: Collected) -> None:
        size = parameter.ds_tensor.numel()
        first = self._rank * size
        count = min(size, parameter.ds_numel - first)
        if count <= 0:
            return
        run = parameter.ds_tensor.detach().view(-1)[:count]
        shape = tuple(parameter.ds_shape)
        if count == parameter.ds_numel:
            found.tensors[name] = run.view(shape)
            return
        found.tensors[name] = run
        found.regions[name] = Region(global_shape=shape, offsets=(first,))

    def _state(self) -> dict[str, Any]:
        return dict(self._module.state_dict(keep_vars=True))

    def _plan_copies(self) -> Ownership:
        specs: dict[str, TensorSpec] = {}
        seen = set[int]()
        for name, each in self._state().items():
            if not _is_cut(each) and id(each) not in seen:
                seen.add(id(each))
                size = each.numel() * each.element_size()
                specs[name] = TensorSpec(shape=tuple(each.shape), num_bytes=size)
        return plan_ownership(self._axes, specs)


class ZeroTrainer(ShardedTrainer):
    """Signs what ShardedTrainer signs; takes what ``deepspeed.initialize`` returns."""

    def _source_of(self, tensors: Any) -> ZeroSource:
        module = getattr(tensors, "module", tensors)
        rank, world = distributed.get_rank(), distributed.get_world_size()
        return ZeroSource(module, rank=rank, world=world)


def _is_cut(tensor: Any) -> bool:
    return hasattr(tensor, "ds_tensor")
