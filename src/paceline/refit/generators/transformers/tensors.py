"""A module's state as named views of its live bytes: each storage once, other names as aliases."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from paceline.core.errors import PreflightError, UsageError
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


NAMES = ("memory", "checkpoint")

EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
"""Of all experts of a layer in one tensor [experts, ...]."""


def view_live_tensors(module: HasState, *, names: str = "memory") -> LiveTensors:
    """Return writable byte views of every tensor in the state dict, persistent buffers included.

    Under ``checkpoint`` names the tensors of a mixture's experts are views of their own. Names of
    one tensor that is tied become one entry, under the name that comes first in the state dict.
    The views are valid while the module keeps its tensors.

    Raises:
        UsageError: unknown kind of names.
        PreflightError: a tensor is not dense in CPU memory, or shares part of another's bytes.
    """
    if names not in NAMES:
        raise UsageError(f"unknown kind of names {names!r}; known: {', '.join(NAMES)}")
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
    if names == "checkpoint":
        buffers = {part.name: part for each in buffers.values() for part in split_experts(each)}
    return LiveTensors(buffers=buffers, aliases=aliases)


def split_experts(buffer: TensorBuffer) -> Iterator[TensorBuffer]:
    """Yield the views that files have instead of one tensor of all experts, or the tensor itself.

    Each expert's part is one block, and of ``gate_up_proj`` each half is: nothing is copied.
    """
    found = EXPERTS.fullmatch(buffer.name)
    if found is None or len(buffer.shape) != 3:  # noqa: PLR2004 - [experts, rows, columns]
        yield buffer
        return
    experts, rows, columns = buffer.shape
    parts = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else (found[2],)
    size = len(buffer.data) // (experts * len(parts))
    for at in range(experts * len(parts)):
        expert, part = divmod(at, len(parts))
        yield replace(
            buffer,
            name=f"{found[1]}.{expert}.{parts[part]}.weight",
            shape=(rows // len(parts), columns),
            data=buffer.data[at * size : (at + 1) * size],
        )


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
