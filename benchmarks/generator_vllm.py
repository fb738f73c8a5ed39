"""vLLM as a rollout engine: what refits cost in tokens, and whether each version is that version.

Needs .venv-vllm (``make vllm``), and goes on in it by itself. Takes about four minutes.
"""

import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bars import Bar, at_least, run

PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
QUICK = bool(os.environ.get("PACELINE_BENCH_QUICK"))

REFIT_EVERY_S = 2.0
WINDOW_S = 2 * REFIT_EVERY_S
PAIRS = 3 if QUICK else 10
"""Of a window with refits and one without, next to each other: what else the machine does hits
both, and the median of the pairs' ratios is not moved by what hits one."""
WARM_S = 15.0
"""The first requests of all compile loops."""
CLIENTS = 4
TOKENS = 32
VERSIONS = 5 if QUICK else 50
FRESH_AT = (VERSIONS,) if QUICK else (1, 25, 50)
PROMPTS = ("1+2=", "9*(8-7)=", "abc, abc, abc, ", "12345")

SIZES = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "max_position_embeddings": 256,
}
LLM_OPTIONS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 256,
    "disable_log_stats": True,
}


def measure() -> Sequence[Bar]:
    """Measure both."""
    return [*throughput(), *equality()]


def throughput() -> list[Bar]:
    """Serve by vLLM's own server; windows with and without refits take turns."""
    from paceline.refit import compose
    from paceline.testing.small_run import SmallRun
    from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir = write_tiny_qwen3(folder / "model", **SIZES)
        with SmallRun(folder, tiny_model(model_dir, seed=1), model_dir=model_dir) as small:
            config = _with_args(small.config, "--max-model-len", "256", "--enforce-eager")
            small.publish_full()
            versions = _encoded(small, PAIRS * round(WINDOW_S / REFIT_EVERY_S))
            engine = compose.start_any_engine(config)
            try:
                counts = _alternate(engine.endpoint, versions)
            finally:
                engine.stop()
    ratios = [refits / none for none, refits in counts]
    whole = sum(refits for _, refits in counts) / sum(none for none, _ in counts)
    print(f"pairs {sorted(round(each, 3) for each in ratios)}, all {whole:.3f}", file=sys.stderr)
    ratio = statistics.median(ratios)
    return [at_least("vllm_tokens_with_refits_ratio", ratio, 0.90)]


def _encoded(small: Any, count: int) -> Iterator[Callable[[], object]]:
    """Return what publishes one version after another, all encoded now.

    To train and to encode is another machine's work: here it would be counted as the engine's.
    """
    made = []
    for seed in range(count):
        small.train(share=0.01, seed=seed)
        made.append(small.encode_delta())
    return iter(made)


def _with_args(config: Any, *args: str) -> Any:
    from dataclasses import replace

    return replace(config, server_args=args)


def _alternate(
    endpoint: str, versions: Iterator[Callable[[], object]]
) -> list[tuple[float, float]]:
    """Return for every pair the tokens of its window without refits, and of the one with them."""
    import httpx

    from paceline.testing.small_run import DATA_TOKEN

    done, pairs = threading.Event(), []
    headers = {"Authorization": f"Bearer {DATA_TOKEN}"}
    with httpx.Client(base_url=endpoint, headers=headers, timeout=60) as http:
        while not http.get("/health").is_success:
            time.sleep(0.1)
        ask = partial(_ask, endpoint, headers, done)
        threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        time.sleep(WARM_S)
        for turn in range(PAIRS):
            order = (False, True) if turn % 2 else (True, False)  # drift cancels out
            counts = {refits: _window(versions if refits else None, http) for refits in order}
            pairs.append((counts[False], counts[True]))
        done.set()
        for thread in threads:
            thread.join(60)
    return pairs


def _window(versions: Iterator[Callable[[], object]] | None, http: Any) -> float:
    """Let one window pass, and publish in it; returns the tokens that vLLM made."""
    begun, ends = _made(http), time.monotonic() + WINDOW_S
    while (left := ends - time.monotonic()) > 0:
        if versions is not None and left > REFIT_EVERY_S / 2:
            next(versions)()
        time.sleep(min(REFIT_EVERY_S, left))
    return _made(http) - begun


def _made(http: Any) -> float:
    """Return the tokens that vLLM has made, as it counts them itself."""
    lines = http.get("/vllm/metrics").raise_for_status().text.splitlines()
    found = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def _ask(endpoint: str, headers: dict[str, str], done: threading.Event) -> None:
    """Ask one request after the other."""
    import httpx

    fields = {"model": "m", "prompt": PROMPTS[1], "max_tokens": TOKENS, "ignore_eos": True}
    with httpx.Client(base_url=endpoint, headers=headers, timeout=60) as http:
        while not done.is_set():
            http.post("/v1/completions", json=fields).raise_for_status()


def equality() -> list[Bar]:
    """Follow versions by deltas, and compare with an engine that loads each checkpoint whole."""
    from vllm import LLM

    from paceline.refit.compose.vllm_offline import LLM_ARGS, LlmFollower
    from paceline.testing.small_run import SmallRun
    from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3

    reloads = fresh = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Untied: vLLM's own reload leaves the packed copy of a tied output layer as it was.
        sizes = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}
        model_dir = write_tiny_qwen3(folder / "model", tie_word_embeddings=False, **sizes)
        model = tiny_model(model_dir, seed=1)
        with SmallRun(folder, model, model_dir=model_dir) as small:
            options: dict[str, Any] = {**LLM_OPTIONS, "max_model_len": 128}
            first = whole_checkpoint(small, model_dir, folder / "v0")
            follows = LLM(model=str(model_dir), **options, **LLM_ARGS)
            reloading = LLM(model=str(first), **options)
            follower = LlmFollower(follows, small.config)
            small.publish_full()
            for at in range(1, VERSIONS + 1):
                follower.catch_up(timeout_s=60)
                small.train(share=0.02, seed=at)
                small.publish_delta()
                follower.catch_up(timeout_s=60)
                got = answers(follows)
                place = whole_checkpoint(small, model_dir, folder / f"v{at}")
                reloading.collective_rpc("reload_weights", kwargs={"weights_path": str(place)})
                reloading.reset_prefix_cache()
                reloads += got == answers(reloading)
                if at in FRESH_AT:
                    started = LLM(model=str(place), **options)
                    fresh += got == answers(started)
                    del started
                    gc.collect()
            follower.close()
    return [
        at_least("vllm_versions_equal_to_a_full_load", reloads, VERSIONS),
        at_least("vllm_versions_equal_to_a_fresh_start", fresh, len(FRESH_AT)),
    ]


def whole_checkpoint(small: Any, model_dir: Path, place: Path) -> Path:
    """Write everything that a fresh engine starts from."""
    small.save(place)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (place / name).write_bytes((model_dir / name).read_bytes())
    return place


def answers(llm: Any) -> list[tuple[int, ...]]:
    """Return greedy continuations."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    if Path(sys.prefix).name != ".venv-vllm":
        if not PYTHON.exists():
            sys.exit("vLLM is not installed; run: make vllm")
        os.execv(PYTHON, [str(PYTHON), *sys.argv])  # noqa: S606
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )
    run(measure, __doc__ or "")
