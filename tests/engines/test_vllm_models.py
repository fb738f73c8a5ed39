"""Other models in vLLM than the plain one: each is an engine of its own."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from engines.conftest import as_in_files
from paceline.refit.compose.vllm_offline import LLM_ARGS, LlmFollower
from paceline.testing.small_run import SmallRun
from paceline.testing.tiny_model import tiny_model, write_tiny_moe, write_tiny_qwen3

pytestmark = pytest.mark.timeout(400)

PATIENCE_S = 60.0
OPTIONS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 128,
    "disable_log_stats": True,
}

RANK = 8
SIZES: dict[str, Any] = {
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
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


def write_lora(model: Any, place: Path) -> LoRARequest:
    """Write a LoRA of random numbers, as PEFT saves one."""
    stream, tensors = torch.Generator().manual_seed(7), {}
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            path = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = parameter.shape
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                tensors[f"{path}.lora_{part}.weight"] = torch.randn(shape, generator=stream) * 0.3
    place.mkdir()
    save_file(tensors, place / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "down_proj"],
    }
    (place / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("one", 1, str(place))


def accepted_share(llm: Any) -> float:
    """Return how many of a draft's guesses the model takes, for some prompts."""

    def counts() -> tuple[float, float]:
        found = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
        made = found["vllm:spec_decode_num_draft_tokens"]
        return found["vllm:spec_decode_num_accepted_tokens"], made

    before = counts()
    answers(llm)
    accepted, made = (now - then for now, then in zip(counts(), before, strict=True))
    assert made > 0
    return accepted / made


@pytest.fixture
def moe_run(tmp_path: Path) -> Iterator[SmallRun]:
    model_dir = write_tiny_moe(tmp_path / "moe", **MOE_SIZES)
    model = tiny_model(model_dir, seed=1)
    with SmallRun(tmp_path, model, model_dir=model_dir, read=as_in_files) as run:
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


@pytest.mark.slow
def test_a_lora_over_weights_that_change(tmp_path: Path) -> None:
    """VLLM adds its LoRA to the weights of the newest version, as an engine that starts with them.

    The LoRA is a file that vLLM reads, and no version: it does not change here.
    """
    model_dir = write_tiny_qwen3(tmp_path / "model", tie_word_embeddings=False, **SIZES)
    model = tiny_model(model_dir, seed=1)
    lora = write_lora(model, tmp_path / "lora")
    options = {"enable_lora": True, "max_lora_rank": RANK}
    with SmallRun(tmp_path, model, model_dir=model_dir) as run:
        llm = start(model_dir, **options, **LLM_ARGS)
        follower = LlmFollower(llm, run.config)
        run.publish_full()
        follower.catch_up(timeout_s=PATIENCE_S)
        first = answers(llm, lora_request=lora)
        run.train(share=0.05, seed=1)
        run.publish_delta()
        follower.catch_up(timeout_s=PATIENCE_S)
        assert llm.collective_rpc("paceline_prove") == [run.root]
        got = answers(llm, lora_request=lora), answers(llm)
        follower.close()
        del llm
        gc.collect()
        fresh = start(save_whole(run, model_dir, tmp_path / "whole"), **options)
    assert got == (answers(fresh, lora_request=lora), answers(fresh))
    assert len(set(map(tuple, (first, *got)))) == len((first, *got))


@pytest.mark.slow
def test_a_draft_is_part_of_the_version(tmp_path: Path) -> None:
    """A draft that is the model's twin guesses right, also after updates, as long as both come."""
    model_dir = write_tiny_qwen3(tmp_path / "model", **SIZES)
    models = [tiny_model(model_dir, seed=1) for _ in range(2)]
    guessing = {"model": str(model_dir), "method": "draft_model", "num_speculative_tokens": 3}
    with SmallRun(tmp_path, models[0], model_dir=model_dir, draft=models[1]) as run:
        options = {**OPTIONS, "disable_log_stats": False}
        llm = LLM(model=str(model_dir), speculative_config=guessing, **options, **LLM_ARGS)
        follower = LlmFollower(llm, run.config)
        run.publish_full()
        follower.catch_up(timeout_s=PATIENCE_S)
        first = accepted_share(llm)
        run.train(share=0.05, seed=1)
        run.publish_delta()
        follower.catch_up(timeout_s=PATIENCE_S)
        second = accepted_share(llm)
        run._train(models[0], share=0.5, seed=2)
        run.publish_delta()
        follower.catch_up(timeout_s=PATIENCE_S)
        apart = accepted_share(llm)
        assert llm.collective_rpc("paceline_prove") == [run.root]
        follower.close()
    assert min(first, second) > 0.9 > apart


@pytest.mark.slow
def test_two_tensor_parallel_workers_follow_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of rows and of columns, whole and as deltas: tokens are those of the same from one.

    And those of a fresh start with the newest files.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    workers: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    model_dir = write_tiny_qwen3(tmp_path / "model", **SIZES)
    with SmallRun(tmp_path, tiny_model(model_dir, seed=1), model_dir=model_dir) as run:
        llm = start(model_dir, **LLM_ARGS, **workers)
        follower = LlmFollower(llm, run.config)
        for axis in (0, 1):
            found = []
            for turn in range(3):
                run.train(share=0.02, seed=turn)
                run.publish_halves(axis=axis, is_full=not turn)
                installed = follower.catch_up(timeout_s=PATIENCE_S)
                assert installed.version_id == run.uid
                assert llm.collective_rpc("paceline_prove") == [installed.root_digest] * 2
                found.append((run.state, answers(llm)))
            assert len({str(got) for _, got in found}) == 3
            for state, got in found:
                run.publish_state(state)
                assert follower.catch_up(timeout_s=PATIENCE_S).version_id == run.uid
                assert answers(llm) == got
        follower.close()
        del llm, follower
        gc.collect()
        again = start(save_whole(run, model_dir, tmp_path / "files"), **workers)
        assert answers(again) == got
