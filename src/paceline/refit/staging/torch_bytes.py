"""Torch tensors as plain bytes: the words of their dtypes, and views without a copy."""

import torch

from paceline.refit.model import TensorBuffer

DTYPE_WORDS: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
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
if hasattr(torch, "float8_e8m0fnu"):  # younger than the oldest torch we take
    DTYPE_WORDS[torch.float8_e8m0fnu] = "F8_E8M0"

WORD_DTYPES = {word: dtype for dtype, word in DTYPE_WORDS.items()}


def is_host_block(tensor: torch.Tensor) -> bool:
    """Say whether the tensor is one dense row-major block of host memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def byte_view(name: str, tensor: torch.Tensor) -> TensorBuffer:
    """Return the live bytes of a tensor for which ``is_host_block`` holds; nothing is copied."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    return TensorBuffer(
        name=name,
        dtype=DTYPE_WORDS[tensor.dtype],
        shape=tuple(tensor.shape),
        data=raw.numpy().data,
    )
