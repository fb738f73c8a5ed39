"""Quantised wires: codes and scales travel as deltas of their own, byte for byte."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.refit.apply import Checks, prove_live, stage_install, write_install
from paceline.refit.delta.codec import Tools, encode_tensor
from paceline.refit.kernels.registry import load_loops
from paceline.refit.model import TensorBuffer
from paceline.testing.payloads import delta_payload, tensor_entry

BLOCK = 32
TOOLS = Tools(loops=load_loops())


def quantised(weights: torch.Tensor, code_type: torch.dtype) -> dict[str, TensorBuffer]:
    """Codes and one fp32 scale per block: deterministic, as a trainer has to do it."""
    blocks = weights.float().reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1).clamp_min(1e-12) / torch.finfo(code_type).max
    codes = (blocks / scales[:, None]).to(code_type)
    word = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}[code_type]
    return {
        "w": buffer("w", word, codes.reshape(-1).view(torch.uint8)),
        "w_scale": buffer("w_scale", "F32", scales.view(torch.uint8)),
    }


def buffer(name: str, dtype: str, raw: torch.Tensor) -> TensorBuffer:
    data = memoryview(bytearray(raw.numpy().tobytes()))
    width = 4 if dtype == "F32" else 1
    return TensorBuffer(name=name, dtype=dtype, shape=(len(data) // width,), data=data)


@pytest.mark.parametrize("code_type", [torch.float8_e4m3fn, torch.float8_e5m2])
@given(
    seed=st.integers(0, 2**31),
    step=st.sampled_from([0.0, 1e-4, 1e-2]),
    outlier=st.booleans(),
)
@settings(max_examples=15)
def test_codes_and_scales_arrive_together(
    code_type: torch.dtype, seed: int, step: float, outlier: bool
) -> None:
    """Whether codes change, scales change, both or neither: the pair is that of the trainer."""
    random = torch.Generator().manual_seed(seed)
    weights = torch.randn(640, generator=random) * 0.02
    moved = weights + step * torch.randn(640, generator=random) * 0.02
    if outlier:
        moved[BLOCK * 3 + 1] = 7.0
    base, new = quantised(weights, code_type), quantised(moved, code_type)
    live = {
        name: TensorBuffer(
            name=name,
            dtype=item.dtype,
            shape=item.shape,
            data=memoryview(bytearray(item.data)),
        )
        for name, item in base.items()
    }
    manifest, data = delta_payload(base, new)
    staged = stage_install(
        manifest,
        {manifest.objects[0].object_id: memoryview(data)},
        live=live,
        aliases={},
        base={name: tensor_entry(item) for name, item in base.items()},
        checks=Checks(tools=TOOLS),
    )
    write_install(staged, tools=TOOLS)
    assert prove_live(live, staged.entries) == manifest.root_digest
    assert {name: bytes(item.data) for name, item in live.items()} == {
        name: bytes(item.data) for name, item in new.items()
    }


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"])
def test_every_code_to_every_code(dtype: str) -> None:
    """All 65 536 pairs of codes survive, NaN and -0 among them; packed fp4 is bytes."""
    old = np.repeat(np.arange(256, dtype=np.uint8), 256)
    new = np.tile(np.arange(256, dtype=np.uint8), 256)
    found = encode_tensor(old.tobytes(), new.tobytes(), dtype=dtype, tools=TOOLS)
    assert found is not None
    base = {
        "w": TensorBuffer(name="w", dtype=dtype, shape=(65536,), data=memoryview(old.tobytes()))
    }
    after = {
        "w": TensorBuffer(name="w", dtype=dtype, shape=(65536,), data=memoryview(new.tobytes()))
    }
    live = {
        "w": TensorBuffer(
            name="w", dtype=dtype, shape=(65536,), data=memoryview(bytearray(old.tobytes()))
        )
    }
    manifest, data = delta_payload(base, after, scheme_of={"w": found.scheme})
    staged = stage_install(
        manifest,
        {manifest.objects[0].object_id: memoryview(data)},
        live=live,
        aliases={},
        base={"w": tensor_entry(base["w"])},
    )
    write_install(staged)
    assert bytes(live["w"].data) == new.tobytes()
