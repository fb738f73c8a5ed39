"""Weights as the codes and scales that quantised engines serve, made by the trainer.

Quantising before the delta is taken keeps every engine byte for byte with the trainer: the same
weights always give the same codes, and a step that moves no code costs nothing. A quantiser is
any function of name and tensor; it returns what is sent instead, by name, or None to send the
tensor itself.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Final

import torch

from paceline.refit.errors import StagingError
from paceline.refit.trainers.protocol import Quantise

FP8_BLOCK: Final = 128
"""Rows and columns that share a scale in published fp8 checkpoints."""
_E4M3_MAX: Final = 448.0
_INT8_MAX: Final = 127.0
_MATRIX: Final = 2


def quantiser(policy: Mapping[str, str]) -> Quantise:
    """Return the quantiser of a policy: glob over names -> ``fp8-block`` or ``int8-channel``.

    The first match counts. Only matrices of floats are quantised; norms and biases that a glob
    takes along are sent as they are.

    Raises:
        ValueError: a scheme that is not known.
    """
    unknown = sorted(set(policy.values()) - _SCHEMES.keys())
    if unknown:
        raise ValueError(f"unknown scheme {unknown[0]!r}; known: {', '.join(sorted(_SCHEMES))}")
    rules = dict(policy)

    def quantise(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor] | None:
        if tensor.dim() != _MATRIX or not tensor.dtype.is_floating_point or not tensor.numel():
            return None
        for pattern, scheme in rules.items():
            if fnmatchcase(name, pattern):
                return _SCHEMES[scheme](name, tensor)
        return None

    return quantise


def fp8_block(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return e4m3 codes and, under ``NAME_scale_inv``, an fp32 factor per block of 128 x 128.

    Raises:
        StagingError: a weight is not finite.
    """
    rows, columns = tensor.shape
    high, wide = (-(-size // FP8_BLOCK) for size in (rows, columns))
    weights = _finite(name, tensor)
    padding = (0, wide * FP8_BLOCK - columns, 0, high * FP8_BLOCK - rows)
    padded = torch.nn.functional.pad(weights, padding)
    blocks = padded.view(high, FP8_BLOCK, wide, FP8_BLOCK)
    scales = _scales(blocks.abs().amax(dim=(1, 3)), _E4M3_MAX)
    scaled = (blocks / scales[:, None, :, None]).clamp(-_E4M3_MAX, _E4M3_MAX)
    codes = scaled.view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    return {name: codes, f"{name}_scale_inv": scales}


def int8_channel(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return int8 codes and, under ``NAME_scale``, an fp32 factor per row.

    Raises:
        StagingError: a weight is not finite.
    """
    weights = _finite(name, tensor)
    scales = _scales(weights.abs().amax(dim=1, keepdim=True), _INT8_MAX)
    codes = (weights / scales).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return {name: codes, f"{name}_scale": scales}


_SCHEMES: Final[dict[str, Callable[[str, torch.Tensor], dict[str, torch.Tensor]]]] = {
    "fp8-block": fp8_block,
    "int8-channel": int8_channel,
}


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    weights = tensor.detach().float()
    if not bool(torch.isfinite(weights).all()):
        raise StagingError(
            f"tensor {name!r} has weights that are not finite; a block of codes would hide them: "
            "look at the last optimizer step, or send the tensor unquantised"
        )
    return weights


def _scales(largest: torch.Tensor, code_max: float) -> torch.Tensor:
    """Return what a code of one stands for; 1 where all weights are too small to matter."""
    scales = largest / code_max
    return torch.where(scales >= torch.finfo(torch.float32).tiny, scales, torch.ones_like(scales))
