"""Deltas on the device: the host's bytes, exact results, and only changed elements cross.

The triton kernel runs in triton's interpreter, on the same CPU tensors.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.refit.delta.codec import encode_as
from paceline.refit.errors import ParseError
from paceline.refit.kernels.registry import load_device_loops
from paceline.refit.manifest.v1 import Scheme
from paceline.refit.model import DTYPE_BITS
from paceline.refit.staging.device import apply_on_device, encode_on_device

TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def tensor_of(data: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(TYPES[dtype])


def check_round_trip(dtype: str, base: bytes, new: bytes, loops_name: str) -> None:
    """Encode on the device, compare with the host, apply on the device."""
    loops = load_device_loops(loops_name)
    live = tensor_of(base, dtype)
    found = encode_on_device(live, tensor_of(new, dtype), dtype=dtype, loops=loops)
    if base == new:
        assert found is None
        return
    assert found is not None
    assert found.data == encode_as(Scheme.GAP, base, new, dtype=dtype)
    changed = apply_on_device(memoryview(found.data), live, dtype=dtype, loops=loops)
    assert bytes(live.view(torch.uint8).numpy()) == new
    assert changed == found.changed_elements
    with pytest.raises(ParseError):
        apply_on_device(memoryview(found.data), live, dtype=dtype, loops=loops)
    assert bytes(live.view(torch.uint8).numpy()) == new


@given(
    st.sampled_from(sorted(TYPES)),
    st.sampled_from([1, 2, 1023, 1024, 1025, 5000]),
    st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_torch_round_trip(dtype: str, count: int, density: float, seed: int) -> None:
    """Any bits of any dtype, any density; a second application meets another base."""
    random = np.random.default_rng(seed)
    width = DTYPE_BITS[dtype] // 8
    base = random.integers(0, 256, (count, width), dtype=np.uint8)
    mine = random.random(count) < density
    new = np.where(mine[:, None], random.integers(0, 256, base.shape, dtype=np.uint8), base)
    check_round_trip(dtype, base.tobytes(), new.tobytes(), "torch")


TRITON = """
import numpy as np
from refit.staging import test_device
random = np.random.default_rng(0)
for dtype, width in (("BF16", 2), ("F8_E4M3", 1), ("F32", 4), ("I64", 8)):
    for count in (1, 1024, 3000):
        base = random.integers(0, 256, (count, width), dtype=np.uint8)
        new = base.copy(); new[::7] ^= 1; new[-1] ^= 128
        test_device.check_round_trip(dtype, base.tobytes(), new.tobytes(), "triton")
print("done")
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="no triton on this platform"
)
def test_triton_round_trip(tmp_path: Path) -> None:
    """The triton kernel finds and compacts exactly what torch does, in every width."""
    done = subprocess.run(
        [sys.executable, "-c", TRITON],
        env={
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TRITON_INTERPRET": "1",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout == "done\n", done.stderr[-2000:]


def test_what_does_not_fit_is_refused() -> None:
    """Views with strides and tensors of other sizes are the caller's error."""
    loops = load_device_loops("torch")
    square = torch.zeros(4, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="dense"):
        encode_on_device(square.T[1:], square.T[1:], dtype="BF16", loops=loops)
    with pytest.raises(ValueError, match="size"):
        encode_on_device(square, square[:2], dtype="BF16", loops=loops)
    with pytest.raises(ValueError, match="4-byte"):
        encode_on_device(square, square, dtype="F32", loops=loops)
