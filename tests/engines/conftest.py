"""vLLM for real, on the CPU, with a model small enough for a test: one engine for many tests.

Run by ``make engines`` in an environment of its own; elsewhere there is nothing to collect.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HAS_VLLM = find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

if HAS_VLLM:
    os.environ.update(  # noqa: TID251 - where vLLM reads it
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # tests reach into the worker
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )
    from paceline.refit.compose.vllm_offline import LLM_ARGS, LlmFollower
    from paceline.refit.model import TensorBuffer
    from paceline.testing.small_run import SmallRun
    from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3

SIZES: dict[str, Any] = {
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model's configuration and tokenizer, without weights."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="session")
def llm(model_dir: Path) -> Any:
    """Return an ``LLM`` with garbage for weights, in this process."""
    from vllm import LLM

    return LLM(
        model=str(model_dir),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        enable_prefix_caching=True,
        disable_log_stats=True,
        **LLM_ARGS,
    )


@pytest.fixture
def run(tmp_path: Path, model_dir: Path) -> Iterator["SmallRun"]:
    """Return a run that has published nothing."""
    with SmallRun(tmp_path, tiny_model(model_dir, seed=1), model_dir=model_dir) as run:
        yield run


@pytest.fixture
def follower(llm: Any, run: "SmallRun") -> Iterator["LlmFollower"]:
    """Return what keeps the engine on the run; nothing is installed yet."""
    follower = LlmFollower(llm, run.config)
    yield follower
    follower.close()


def as_in_files(model: Any) -> "dict[str, TensorBuffer]":
    """Copy a model's tensors as files name them, which have one for each expert."""
    from paceline.refit.generators.transformers.sets import view_named

    views = view_named(model, "checkpoint").buffers
    return {name: replace(view, data=memoryview(bytes(view.data))) for name, view in views.items()}


def worker(llm: Any) -> Any:
    """Return the worker inside an ``LLM`` of this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker
