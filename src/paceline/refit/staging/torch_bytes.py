"""Torch tensors as plain bytes: the words of their dtypes, and views without a copy."""

from collections.abc import Iterable, Mapping

import torch

from paceline.refit.errors import StagingError
from paceline.refit.model import CompletionFence, TensorBuffer
from paceline.refit.staging.host import plain_block

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

PROBED = 256
"""Elements of each tensor that a fingerprint reads."""
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


def live_view(name: str, tensor: torch.Tensor) -> TensorBuffer:
    """Return the live bytes of a tensor, to be served. Raises StagingError if it is no block."""
    if not is_host_block(tensor):
        raise StagingError(
            f"tensor {name!r} is not contiguous in host memory and cannot be served in place; "
            "stage with COPY_TO_HOST"
        )
    return byte_view(name, tensor)


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, int, int, bytes], ...]:
    """Return what changes when tensors are written to, without reading all of them.

    Torch counts what is written; not what fused optimizers write, nor what goes by ``data``.
    Those move nearly every element, so that some are looked at as well.
    """
    return tuple(
        (name, item.data_ptr(), item._version, _probe(item))  # noqa: SLF001 - torch's own advice
        for name, item in tensors.items()
    )


def _probe(tensor: torch.Tensor) -> bytes:
    """Return some elements, spread over rows and columns."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // PROBED) | 1].contiguous()
    return some.view(torch.uint8).cpu().numpy().tobytes()


def host_block(num_bytes: int) -> memoryview:
    """Return memory that a GPU copies into by itself, where there is one; plain memory elsewhere.

    Pages that stay where they are: without that a copy to the host is made in pieces, and the
    thread that asked for it stands.
    """
    if not torch.cuda.is_available():
        return plain_block(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data


def copies_made(devices: Iterable[torch.device]) -> CompletionFence:
    """Return what waits for the copies that were asked of these devices up to now.

    Copies are put into the stream that training uses, so whatever training does next comes after
    them there, and nobody waits here.
    """
    marks = []
    for device in set(devices):
        if device.type == "cuda":
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(device))
            marks.append(mark)
        elif device.type != "cpu":
            torch.get_device_module(device).synchronize(device)

    def wait() -> None:
        for mark in marks:
            mark.synchronize()

    return CompletionFence(wait)
