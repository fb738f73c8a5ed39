"""A module's state as named views of its live bytes: each storage once, other names as aliases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.core.errors import PreflightError
from paceline.refit.model import TensorBuffer
from paceline.refit.staging.torch_bytes import DTYPE_WORDS, byte_view, is_host_block


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensors:
    """What ``live_tensors`` and ``tensor_aliases`` return."""

    buffers: Mapping[str, TensorBuffer]
    aliases: Mapping[str, str]


class HasState(Protocol):
    """A module, or what stands in host memory for one that is elsewhere."""

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return every tensor by name."""
        ...


def view_live_tensors(module: HasState) -> LiveTensors:
    """Return writable byte views of every tensor in the state dict, persistent buffers included.

    Names of one tensor that is tied become one entry, under the name that comes first in the state
    dict. The views are valid while the module keeps its tensors.

    Raises:
        PreflightError: a tensor is not dense in CPU memory, or shares part of another's bytes.
    """
    buffers: dict[str, TensorBuffer] = {}
    aliases: dict[str, str] = {}
    owners: dict[tuple[int, int], str] = {}
    for name, tensor in module.state_dict().items():
        _check_dense(name, tensor)
        place = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        owner = owners.get(place) if place[1] else None
        if owner is None:
            owners[place] = name
            buffers[name] = byte_view(name, tensor)
        elif buffers[owner].shape == tuple(tensor.shape):
            aliases[name] = owner
        else:
            raise PreflightError(f"{name} and {owner} are one storage in two shapes")
    _check_disjoint(owners)
    return LiveTensors(buffers=buffers, aliases=aliases)


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if not is_host_block(tensor):
        raise PreflightError(f"{name} is not one dense block of CPU memory ({tensor.device})")
    if tensor.dtype not in DTYPE_WORDS:
        raise PreflightError(f"{name} has dtype {tensor.dtype}, which manifests cannot name")


def _check_disjoint(owners: Mapping[tuple[int, int], str]) -> None:
    """Refuse two tensors that share some bytes: a write to one would change the other's digest."""
    end, last = 0, ""
    for (start, size), name in sorted(owners.items()):
        if size and start < end:
            raise PreflightError(f"{name} shares part of its bytes with {last}")
        if size:
            end, last = start + size, name
