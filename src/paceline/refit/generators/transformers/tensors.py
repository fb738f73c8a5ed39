"""A module's state as named views of its live bytes: each storage once, other names as aliases."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.core.errors import PreflightError
from paceline.refit.model import TensorBuffer

DTYPE_WORDS: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""The words of safetensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensors:
    """What ``live_tensors`` and ``tensor_aliases`` return."""

    buffers: Mapping[str, TensorBuffer]
    aliases: Mapping[str, str]


def view_live_tensors(module: torch.nn.Module) -> LiveTensors:
    """Return writable byte views of every tensor in the state dict, persistent buffers included.

    Names of one tensor that is tied become one entry, under the name that comes first in the
    state dict. The views are valid while the module keeps its tensors.

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
            buffers[name] = _view(name, tensor)
        elif buffers[owner].shape == tuple(tensor.shape):
            aliases[name] = owner
        else:
            raise PreflightError(f"{name} and {owner} are one storage in two shapes")
    _check_disjoint(owners)
    return LiveTensors(buffers=buffers, aliases=aliases)


def _view(name: str, tensor: torch.Tensor) -> TensorBuffer:
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    return TensorBuffer(
        name=name,
        dtype=DTYPE_WORDS[tensor.dtype],
        shape=tuple(tensor.shape),
        data=raw.numpy().data,
    )


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
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
