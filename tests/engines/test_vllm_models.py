"""Other models in vLLM than the plain one: each is an engine of its own."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from paceline.refit.compose.vllm_offline import LLM_ARGS, LlmFollower
from paceline.testing.small_run import SmallRun
from paceline.testing.tiny_model import tiny_model, write_tiny_moe

PATIENCE_S = 60.0
OPTIONS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 128,
    "disable_log_stats": True,
}

MOE_SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 24}
"""Experts of a width that vLLM pads for the CPU."""


@pytest.fixture(autouse=True)
def _in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each engine have one: vLLM does not start twice in one."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def start(model_dir: Path, **options: Any) -> Any:
    return LLM(model=str(model_dir), **OPTIONS, **options)


def answers(llm: Any, **how: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    outputs = llm.generate(["1+2=", "9*(8-7)=", "abc, "], params, use_tqdm=False, **how)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def save_whole(run: SmallRun, model_dir: Path, place: Path) -> Path:
    """Write everything that a fresh engine starts from."""
    run.save(place)
    for path in model_dir.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place


@pytest.fixture
def moe_run(tmp_path: Path) -> Iterator[SmallRun]:
    model_dir = write_tiny_moe(tmp_path / "moe", **MOE_SIZES)
    with SmallRun(tmp_path, tiny_model(model_dir, seed=1), model_dir=model_dir) as run:
        yield run


@pytest.mark.slow
def test_a_mixture_of_experts(moe_run: SmallRun, tmp_path: Path) -> None:
    """Experts go into vLLM's fused parameters, and its tokens are those of a fresh start."""
    run, model_dir = moe_run, moe_run.config.engine.model_dir
    llm = start(model_dir, **LLM_ARGS)
    follower = LlmFollower(llm, run.config)
    run.publish_full()
    follower.catch_up(timeout_s=PATIENCE_S)
    first = answers(llm)
    for turn in range(2):
        run.train(share=0.05, seed=turn)
        run.publish_delta()
        assert follower.catch_up(timeout_s=PATIENCE_S).root_digest == run.root
    (ways,) = llm.collective_rpc("paceline_ways")
    assert {way for name, way in ways.items() if "experts" in name} == {"reload"}
    assert llm.collective_rpc("paceline_prove") == [run.root]
    got = answers(llm)
    follower.close()
    del llm
    gc.collect()
    fresh = start(save_whole(run, model_dir, tmp_path / "whole"))
    assert got == answers(fresh) != first
