"""Linear modules that hold codes and scales, as the trainer's quantiser sends them.

The codes are what is live: versions are proven and written byte for byte, and never dequantised on
the way. A pass turns one module's codes into weights of the model's dtype, uses them and drops
them: memory falls to that of the codes, on every processor; speed does not rise.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch.nn.functional import linear

from paceline.core.errors import PreflightError, UsageError

FP8_BLOCK: Final = 128
"""Rows and columns that share a scale in published fp8 checkpoints."""
_MATRIX: Final = 2


class CodedLinear(torch.nn.Module):
    """Signs what a linear module does; ``weight`` is codes, and its scales are beside it."""

    weight: torch.Tensor

    def __init__(self, plain: torch.nn.Linear, code_type: torch.dtype, scales: str) -> None:
        """Take the place of ``plain``; ``scales`` is the name of the other buffer."""
        super().__init__()
        self._scales = scales
        self.register_buffer("weight", torch.zeros(plain.weight.shape, dtype=code_type))
        rows, columns = plain.weight.shape
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        shape = blocks if code_type.is_floating_point else (rows, 1)
        self.register_buffer(scales, torch.ones(shape, dtype=torch.float32))
        self.bias = plain.bias

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Multiply with the weights that the codes stand for."""
        return linear(given, self.decoded().to(given.dtype), self.bias)

    def decoded(self) -> torch.Tensor:
        """Return codes times scales, in fp32."""
        scales = self.get_buffer(self._scales)
        if self.weight.is_floating_point():
            rows, columns = self.weight.shape
            scales = scales.repeat_interleave(FP8_BLOCK, dim=0)[:rows]
            scales = scales.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]
        return self.weight.float() * scales


SCHEMES: Final[Mapping[str, Callable[[torch.nn.Linear], CodedLinear]]] = {
    "fp8-block": lambda plain: CodedLinear(plain, torch.float8_e4m3fn, "weight_scale_inv"),
    "int8-channel": lambda plain: CodedLinear(plain, torch.int8, "weight_scale"),
}
"""The words of the trainer's policy."""


def hold_codes(model: torch.nn.Module, policy: Mapping[str, str]) -> None:
    """Let modules hold codes: glob over tensor names -> scheme, as the trainer has it.

    Raises:
        UsageError: a scheme that is not known, or a glob that matches nothing.
        PreflightError: a tensor that the trainer would quantise and that is no linear module's.
    """
    if unknown := sorted(set(policy.values()) - SCHEMES.keys()):
        raise UsageError(f"unknown scheme {unknown[0]!r}; known: {', '.join(sorted(SCHEMES))}")
    found = {}
    for name, tensor in model.state_dict().items():
        rule = next((glob for glob in policy if fnmatchcase(name, glob)), None)
        if rule is not None and tensor.dim() == _MATRIX:
            found[name] = rule
    if idle := sorted(policy.keys() - found.values()):
        raise UsageError(f"{idle[0]!r} matches no matrix of this model")
    shared = _shared(model)
    for name, rule in found.items():
        path = name.rpartition(".")[0]
        plain = model.get_submodule(path)
        if type(plain) is not torch.nn.Linear or name in shared:
            raise PreflightError(
                f"{name} is no linear module's alone and cannot hold codes; name less than {rule!r}"
            )
        model.set_submodule(path, SCHEMES[policy[rule]](plain))


def _shared(model: torch.nn.Module) -> set[str]:
    """Return the names of tensors that have another name too."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict().items():
        names.setdefault(tensor.data_ptr(), []).append(name)
    return {name for group in names.values() if len(group) > 1 for name in group}
