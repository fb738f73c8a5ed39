"""Where vLLM's own loader puts elements, proven on parameters that are left as they were loaded."""

from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model

from engines.conftest import worker
from paceline.refit.apply import FULL, stage_install
from paceline.refit.generators.vllm import strategy
from paceline.refit.generators.vllm.mirror import allocate, as_tensor, changes_of
from paceline.refit.generators.vllm.part import ModelPart
from paceline.refit.model import TensorBuffer
from paceline.testing.payloads import delta_payload, tensor_entry
from paceline.testing.small_run import state_of
from paceline.testing.tiny_model import tiny_model, write_tiny_moe


@pytest.fixture(params=["dense", "experts"])
def kind_dir(
    request: pytest.FixtureRequest,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Return a model of layers that are fused, or of experts that are."""
    if request.param == "dense":
        return model_dir
    # In an engine they are packed, and loaded by layer; here they are as the loader left them.
    known = strategy.PLAIN_METHODS | {"UnquantizedFusedMoEMethod"}
    monkeypatch.setattr(strategy, "PLAIN_METHODS", known)
    return write_tiny_moe(tmp_path / "moe")


@pytest.fixture(params=[(1, 0), (2, 0), (2, 1)], ids=["whole", "half0", "half1"])
def vllm_config(
    request: pytest.FixtureRequest, llm: Any, kind_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Return a model's configuration, as in one of so many tensor-parallel workers."""
    size, rank = request.param
    real = parallel_state.get_tp_group()
    group = SimpleNamespace(
        world_size=size, rank_in_group=rank, device_group=real.device_group, ranks=[0, 1][:size]
    )
    monkeypatch.setattr(parallel_state, "_EP", real)
    monkeypatch.setattr(parallel_state, "_TP", group)
    config = copy(worker(llm).vllm_config)
    config.model_config = ModelConfig(model=str(kind_dir), dtype="bfloat16")
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with set_current_vllm_config(config):
        yield config


def load_plainly(config: Any, state: Mapping[str, TensorBuffer]) -> Any:
    """Return a model as vLLM's loader leaves it, before anything is packed."""
    config.compilation_config.static_forward_context = {}
    with torch.device("cpu"), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(config)
        finally:
            torch.set_default_dtype(torch.float32)
        for parameter in model.parameters():
            parameter.zero_()
    model.load_weights((name, as_tensor(buffer)) for name, buffer in state.items())
    return model


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.data.view(torch.int16).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("adopts", [True, False])
def test_changed_elements_alone_give_what_a_load_gives(
    vllm_config: Any, kind_dir: Path, adopts: bool
) -> None:
    """Fused, sharded, experts: elements written one by one equal a load of everything."""
    before = state_of(tiny_model(kind_dir, seed=1))
    after = {
        name: with_changes(buffer, seed=at) for at, (name, buffer) in enumerate(before.items())
    }
    model = load_plainly(vllm_config, before)
    part = ModelPart(model, vllm_config=vllm_config, model_config=vllm_config.model_config)
    entries = [tensor_entry(buffer) for buffer in before.values()]
    part.bind(entries)
    assert set(part.ways.values()) == {"elements"}
    live = {entry.name: allocate(entry) for entry in entries}
    for name, buffer in before.items():
        live[name].data[:] = buffer.data
    if adopts:
        live |= part.adopt(live)
    manifest, data = delta_payload(before, after)
    staged = stage_install(
        manifest,
        {manifest.objects[0].object_id: memoryview(data)},
        live=live,
        aliases={},
        base={entry.name: entry for entry in entries},
        checks=FULL,
    )
    for name, buffer in after.items():
        live[name].data[:] = buffer.data
    part.push(changes_of(staged), live)
    wanted = bits(load_plainly(vllm_config, after))
    found = bits(model)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    # And whole tensors, back to where it began.
    for name, buffer in before.items():
        live[name].data[:] = buffer.data
    part.push(dict.fromkeys(before), live)
    back = bits(load_plainly(vllm_config, before))
    assert all(torch.equal(each, back[name]) for name, each in bits(model).items())


def with_changes(buffer: TensorBuffer, *, seed: int) -> TensorBuffer:
    """Return a copy in which a tenth of the elements has other bits."""
    words = np.frombuffer(buffer.data, dtype=np.uint16).copy()
    dice = np.random.default_rng(seed)
    chosen = dice.choice(len(words), size=max(1, len(words) // 10), replace=False)
    words[chosen] ^= dice.integers(1, 2**16, size=len(chosen), dtype=np.uint16)
    return TensorBuffer(
        name=buffer.name, dtype=buffer.dtype, shape=buffer.shape, data=memoryview(words.tobytes())
    )
