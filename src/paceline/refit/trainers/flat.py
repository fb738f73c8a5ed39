"""FSDP1: parameters lie one behind another in flat ones, of which each process holds a stretch.

What a process holds of a parameter is a run of its elements, published as that. The flat parameter
is read as it lies between two steps: sharded, in the precision that the optimizer works in.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel

from paceline.refit.model import Region
from paceline.refit.trainers.meshes import clean_name
from paceline.refit.trainers.protocol import Collected
from paceline.refit.trainers.topology import MeshAxes, Ownership, TensorSpec, plan_ownership


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Where a parameter lies in the flat one, and what of that is here."""

    name: str
    shape: tuple[int, ...]
    first: int
    """Of the parameter's elements that are here."""
    count: int
    at: int
    """In this process's stretch."""


class FlatSource:
    """What one process publishes of a module of FSDP1; made once, when the tensors are bound."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Find out what lies where.

        Raises:
            ValueError: a flat parameter is not cut over all processes.
        """
        self._module = module
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        axes = MeshAxes(names=("fsdp",), sizes=(self._world,))
        self._axes = axes
        self._prefixes = [
            (clean_name(name + "." if name else ""), each._handle)  # noqa: SLF001 - nothing public tells
            for name, each in module.named_modules()
            if isinstance(each, FullyShardedDataParallel) and each._handle is not None  # noqa: SLF001
        ]
        for prefix, handle in self._prefixes:
            if handle.world_size != self._world or not handle.uses_sharded_strategy:
                raise ValueError(
                    f"the parameters of {prefix or 'the module'!r} are cut over "
                    f"{handle.world_size} of {self._world} processes; use FULL_SHARD or "
                    "SHARD_GRAD_OP over all of them, or FSDP2 with a mesh"
                )
        self._copies = self._plan_copies()

    @property
    def slot(self) -> str:
        """This process's contribution."""
        return self._axes.slot((self._rank,))

    @property
    def slots(self) -> tuple[str, ...]:
        """Everybody's, of those who have anything."""
        filled = {0} if self._copies.specs else set()
        for _, handle in self._prefixes:
            held, each = handle.flat_param._unpadded_unsharded_size.numel(), _stretch(handle)  # noqa: SLF001
            filled.update(range(-(-held // each)))
        filled |= {owner[0] for owner in self._copies.owners.values()}
        return tuple(sorted(self._axes.slot((rank,)) for rank in filled))

    def collect(self) -> Collected:
        """Return this process's runs as they are now, and the buffers that are its to publish."""
        found = Collected(tensors={})
        for prefix, handle in self._prefixes:
            stretch = handle.flat_param._local_shard if _is_local(handle) else handle.flat_param  # noqa: SLF001
            for run in _runs(prefix, handle):
                part = stretch.detach()[run.at : run.at + run.count]
                if run.count == math.prod(run.shape):
                    found.tensors[run.name] = part.view(run.shape)
                else:
                    found.tensors[run.name] = part
                    offsets = (run.first,)
                    found.regions[run.name] = Region(global_shape=run.shape, offsets=offsets)
            found.aliases.update(pair for pair in _ties(prefix, handle) if pair[1] in found.tensors)
        copies = self._buffers()
        for name, value in copies.items():
            if self._copies.part(name, (self._rank,)) is not None:
                found.tensors[name] = value.detach()
        return found

    def _plan_copies(self) -> Ownership:
        specs = {
            name: TensorSpec(
                shape=tuple(value.shape), num_bytes=value.numel() * value.element_size()
            )
            for name, value in self._buffers().items()
        }
        return plan_ownership(self._axes, specs)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent buffers; every process has all of them."""
        found = {}
        for prefix, module in self._module.named_modules():
            hidden = module._non_persistent_buffers_set  # noqa: SLF001 - nothing public tells
            for name, value in module.named_buffers(recurse=False):
                if name not in hidden:
                    found[clean_name(f"{prefix}.{name}" if prefix else name)] = value
        return found


def has_flat(module: Any) -> bool:
    """Say whether a module, or one inside it, is of FSDP1."""
    return isinstance(module, torch.nn.Module) and any(
        isinstance(each, FullyShardedDataParallel) for each in module.modules()
    )


def _runs(prefix: str, handle: Any) -> Iterator[_Run]:
    flat = handle.flat_param
    for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):  # noqa: SLF001
        if info.in_shard:
            yield _Run(
                name=prefix + clean_name(name),
                shape=tuple(shape),
                first=info.intra_param_start_idx,
                count=info.numel_in_shard,
                at=info.offset_in_shard,
            )


def _ties(prefix: str, handle: Any) -> Iterator[tuple[str, str]]:
    for info in handle.flat_param._shared_param_infos:  # noqa: SLF001
        alias = f"{info.module_name}.{info.param_name}".lstrip(".")
        canonical = f"{info.prim_module_name}.{info.prim_param_name}".lstrip(".")
        yield prefix + clean_name(alias), prefix + clean_name(canonical)


def _stretch(handle: Any) -> int:
    return int(handle.flat_param._sharded_size.numel())  # noqa: SLF001


def _is_local(handle: Any) -> bool:
    return hasattr(handle.flat_param, "_local_shard")
