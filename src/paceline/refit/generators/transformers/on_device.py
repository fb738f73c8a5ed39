"""A model on a device, and the copy of its weights in host memory that versions are proven against.

``cpu:0`` is host memory treated like a device: what runs on one is tested there.
"""

from bisect import bisect_right
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from paceline.core.errors import PreflightError, UsageError
from paceline.refit.generators.transformers.checkpoint_names import name_as_files
from paceline.refit.generators.transformers.tensors import LiveTensors, view_live_tensors
from paceline.refit.model import TensorBuffer

HOST = "cpu"
"""Here weights are written and proven where they are; on every other device, in a copy first."""


class OnDevice:
    """Runs the passes of a model that is elsewhere; tensors go there and logits come back."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        """Move the model.

        Raises:
            UsageError: no kind of device has this name.
            PreflightError: there is none here, it has no room, or it is not dense there.
        """
        try:
            self._device = torch.device(device)
        except RuntimeError as exc:
            raise UsageError(f"unknown device {device!r}; known: cpu, cuda, cuda:1 ...") from exc
        try:
            self._model = model.to(self._device)
            self._here = _copied(self._model.state_dict())
        except (RuntimeError, AssertionError, NotImplementedError) as exc:
            raise PreflightError(
                f"the model cannot be put on {device!r} ({exc}); --device cpu always works"
            ) from exc

    def __call__(self, **arguments: Any) -> Any:
        """Run a pass."""
        there = {
            name: each.to(self._device) if isinstance(each, torch.Tensor) else each
            for name, each in arguments.items()
        }
        return SimpleNamespace(logits=self._model(**there).logits.to(HOST))

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the copy in host memory; what is tied on the device is tied in it."""
        return self._here

    def tensors_of(self, copies: Mapping[str, TensorBuffer]) -> Mapping[str, torch.Tensor]:
        """Return what these views of the copy are views of, on the device."""
        there = self._model.state_dict()
        owners = sorted((each.data_ptr(), name) for name, each in self._here.items())
        return {name: self._same(each, owners, there) for name, each in copies.items()}

    def _same(
        self,
        copy: TensorBuffer,
        owners: list[tuple[int, str]],
        there: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        if not len(copy.data):
            return torch.empty(copy.shape, dtype=torch.uint8, device=self._device)
        address = np.frombuffer(copy.data, dtype=np.uint8).ctypes.data
        start, owner = owners[bisect_right(owners, (address, chr(0x10FFFF))) - 1]
        tensor = there[owner].detach()
        first = (address - start) // tensor.element_size()
        stop = first + len(copy.data) // tensor.element_size()
        return tensor.reshape(-1)[first:stop].reshape(copy.shape)


def _copied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    found = {}
    for name, tensor in state.items():
        if not tensor.is_contiguous():
            raise PreflightError(f"{name} is not one dense block on {tensor.device}")
        place = (tensor.data_ptr(), tensor.shape)
        if place not in copies or not tensor.numel():
            copies[place] = torch.empty_like(tensor, device=HOST).copy_(tensor)
        found[name] = copies[place]
    return found


class DeviceWeights:
    """The weights of a model on a device, held there once, and their copy in host memory."""

    is_twice = False

    def __init__(self, model: torch.nn.Module, device: str, *, names: str) -> None:
        """Move the model, and view its copy. Raises UsageError, PreflightError."""
        self._model = OnDevice(model, device)
        live = view_live_tensors(self._model)
        self._live = name_as_files(model, live) if names == "checkpoint" else live
        self._there = self._model.tensors_of(self._live.buffers)

    def run(self, **arguments: Any) -> Any:
        """Run a pass on the device."""
        return self._model(**arguments)

    def live(self) -> LiveTensors:
        """Return the views of the copy."""
        return self._live

    def device_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return what these are views of, on the device."""
        return self._there
