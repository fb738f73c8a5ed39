"""Served engines: the pause of an update, what the rollout client costs, an engine that is killed.

The pause is that of the transformers engine, 1 GiB of bf16 weights of which 1 % change by one
step at random places, against copying all weights once; then a model of twice the size with as
many changed elements. First with weights held twice, as `paceline serve` does where memory allows:
then the pause is an exchange of two sets, and what is written beside it, while passes run, is on
stderr. Then with weights held once, where it has to write. One random element in a hundred is in
every fourth cache line and in every second pair of lines, which many processors fetch together, and
each has to be fetched and written back. So a line on stderr and a bar say what the least possible
costs: known words stored at known places of the same tensors by a compiled loop, with as many
threads. The copy is torch's own, by one thread or by all, whichever is faster.
Client and direct calls take turns at one engine. Then ``generator_vllm.py``, where ``make vllm``
was made. Takes about eight minutes and 11 GiB.
"""

import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from bars import Bar, at_most, run
from numba import njit
from transformers import Qwen3Config

from paceline.refit.apply import Checks, stage_install, write_install
from paceline.refit.generators.protocol import (
    EngineConfig,
    EngineHealth,
    EngineState,
    InstalledVersion,
    Sampling,
)
from paceline.refit.generators.transformers.engine import TransformersEngine
from paceline.refit.kernels.registry import process_tools
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import InstalledReport, TensorBuffer
from paceline.refit.receiver.spare import SpareSet
from paceline.refit.rollouts import Fleet, RolloutClient, RolloutConfig
from paceline.refit.rollouts.wire import render_request
from paceline.refit.serving.app import ServingParts, build_app
from paceline.refit.serving.server import EngineServer
from paceline.system import chance, system_async_clock, system_clock
from paceline.testing.payloads import delta_payload, tensor_entry
from paceline.testing.tiny_model import tiny_model, tiny_tokenizer, write_tiny_qwen3, write_weights

LAYERS = 37
"""Of 14.2 million parameters each, with the embedding 1 GiB of bf16."""
CHANGED = 0.01
TURNS = 6
EXCHANGES = 1000
CALLS = 300
PROMPTS = 400
VLLM_PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
KILL_AFTER = 60
TOKEN = "token-of-a-benchmark"  # noqa: S105
LABEL = InstalledVersion(version_id="v1", sequence=1, root_digest="aa")
SAMPLING = Sampling(max_tokens=4, seed=1, ignore_eos=True)


def build_engine(folder: Path, *, layers: int, held: str) -> TransformersEngine:
    """Return an engine whose weights are about a GiB for LAYERS layers."""
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return TransformersEngine(
        EngineConfig(model_dir=folder, weights=held), clock=system_clock(), new_seed=lambda: 0
    )


def changed_state(live: Mapping[str, TensorBuffer], count: int) -> dict[str, TensorBuffer]:
    """Return a copy in which ``count`` elements at random places are one step away."""
    rng = np.random.default_rng(0)
    total = sum(len(buffer.data) // 2 for buffer in live.values())
    state = {}
    for name, buffer in live.items():
        words = np.frombuffer(buffer.data, np.uint16).copy()
        places = rng.integers(0, len(words), max(1, round(count * len(words) / total)))
        words[np.unique(places)] ^= 1
        state[name] = TensorBuffer(
            name=name, dtype=buffer.dtype, shape=buffer.shape, data=words.data.cast("B")
        )
    return state


def put_in(
    engine: TransformersEngine,
    spare: SpareSet | None,
    base: Mapping[str, TensorBuffer],
    payload: tuple[Manifest, bytes],
) -> float:
    """Install as the receiver does and return the pause."""
    (manifest, data), tools = payload, process_tools()
    entries = {name: tensor_entry(buffer) for name, buffer in base.items()}
    checks = Checks(whole=True, tools=tools)
    staged = stage_install(
        manifest,
        {manifest.objects[0].object_id: memoryview(data)},
        live=engine.live_tensors() if spare is None else spare.levelled(entries),
        aliases=engine.tensor_aliases(),
        base=entries,
        checks=checks,
    )
    if spare is None:
        return engine.at_safe_point(
            lambda: write_install(staged, tools=tools), installed=LABEL, timeout_s=60
        )
    began = time.perf_counter()
    spare.write(staged, whole=checks.whole)
    written = time.perf_counter()
    pause = engine.at_safe_point(spare.exchange, installed=LABEL, timeout_s=60)
    spare.follow(staged, whole=checks.whole)
    after = time.perf_counter() - written
    print(
        f"beside the pause: written in {written - began:.3f} s, followed in {after:.3f} s",
        file=sys.stderr,
    )
    return pause


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Of updates of as many elements, back and forth."""

    longest: float
    shortest: float
    """Held twice: of further exchanges too, for microseconds are hard to compare."""


def pauses_of(engine: TransformersEngine, count: int) -> Pauses:
    """Return what updates of ``count`` elements pause."""
    live, second = engine.live_tensors(), engine.spare_weights()
    spare = (
        None
        if second is None
        else SpareSet(second, live=engine.live_tensors, tools=process_tools())
    )
    old = {
        name: TensorBuffer(
            name=name, dtype=each.dtype, shape=each.shape, data=memoryview(bytes(each.data))
        )
        for name, each in live.items()
    }
    new = changed_state(live, count)
    aliases = tuple(engine.tensor_aliases().items())
    pauses = []
    ways = [
        (old, delta_payload(old, new, aliases=aliases)),
        (new, delta_payload(new, old, aliases=aliases)),
    ]
    for turn in range(TURNS):
        base, payload = ways[turn % 2]
        pauses.append(put_in(engine, spare, base, payload))
    longest = max(pauses)
    if spare is not None:
        pauses += [
            engine.at_safe_point(spare.exchange, installed=LABEL, timeout_s=60)
            for _ in range(EXCHANGES)
        ]
    return Pauses(longest=longest, shortest=min(pauses))


def copy_of(engine: TransformersEngine) -> float:
    """Return the shortest time in which torch copies all live weights into memory that is there."""
    live = [
        torch.frombuffer(each.data, dtype=torch.int16) for each in engine.live_tensors().values()
    ]
    target = [torch.zeros_like(each) for each in live]
    before, times = torch.get_num_threads(), []
    for threads in (1, os.cpu_count() or 1):
        torch.set_num_threads(threads)
        for _ in range(TURNS):
            began = time.perf_counter()
            for into, each in zip(target, live, strict=True):
                into.copy_(each)
            times.append(time.perf_counter() - began)
    torch.set_num_threads(before)
    return min(times)


@njit("void(uint16[::1], uint32[::1], uint16[::1])", nogil=True)
def store(words: Any, places: Any, news: Any) -> None:
    """Store known words at known places."""
    for at in range(len(places)):
        words[places[at]] = news[at]


def floor_of(engine: TransformersEngine, count: int) -> float:
    """Return the shortest time in which the words of such an update can be stored."""
    live = engine.live_tensors()
    jobs = []
    for name, new in changed_state(live, count).items():
        words, after = (np.frombuffer(each.data, np.uint16) for each in (live[name], new))
        places = np.flatnonzero(words != after).astype(np.uint32)
        jobs.append((words, places, words[places]))  # what is there: weights stay what they are
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        list(process_tools().run(lambda job: store(*job), jobs))
        times.append(time.perf_counter() - began)
    return min(times)


def measure_pauses(held: str) -> list[Bar]:
    """Measure at one size and at twice that, with as many changed elements."""
    found = []
    count = 0
    for layers in (LAYERS, 2 * LAYERS):
        with tempfile.TemporaryDirectory() as folder:
            engine = build_engine(Path(folder), layers=layers, held=held)
            size = sum(len(buffer.data) for buffer in engine.live_tensors().values())
            count = count or round(size / 2 * CHANGED)
            pauses, copy, floor = pauses_of(engine, count), copy_of(engine), floor_of(engine, count)
            print(
                f"{size / 2**30:.2f} GiB held {held}: pause {pauses.shortest:.6f} to "
                f"{pauses.longest:.6f} s, copy {copy:.4f} s, "
                f"bare stores {floor:.4f} s = {floor / copy:.2f} x copy",
                file=sys.stderr,
            )
            found.append((pauses, copy, floor))
            engine.close(timeout_s=10)
            del engine
            gc.collect()
    (small, copy, floor), (large, _, _) = found
    growth = large.shortest / small.shortest
    if held == "once":
        return [
            at_most(
                "held once: pause / bare stores of the same elements", small.shortest / floor, 1.5
            ),
            at_most("held once: pause, model twice as large / pause", growth, 1.3),
        ]
    return [
        at_most("pause / full copy, 1 GiB bf16, 1 % changed", small.longest / copy, 0.15),
        at_most("pause, model twice as large / pause, as many changes", growth, 1.3),
    ]


@contextmanager
def served() -> Iterator[str]:
    """Serve a tiny model in this process; yields where."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as parts:
        model_dir = write_tiny_qwen3(Path(folder))
        engine = TransformersEngine(
            EngineConfig(model_dir=model_dir), clock=system_clock(), new_seed=lambda: 0
        )
        parts.callback(engine.close, timeout_s=10)
        model = tiny_model(model_dir, seed=1)
        engine.at_safe_point(
            lambda: write_weights(engine.live_tensors(), model), installed=LABEL, timeout_s=5
        )
        server = EngineServer(host="127.0.0.1", port=0, clock=system_clock())
        app = build_app(
            ServingParts(
                engine=engine,
                model_name="m",
                token=TOKEN,
                health=lambda: EngineHealth(state=EngineState.READY, installed=LABEL),
                figures=dict,
                newest=lambda: 1,
                clock=system_clock(),
                new_id=lambda: "x",
            )
        )
        server.start(app, grace_s=1)
        parts.callback(server.close, timeout_s=20)
        yield server.endpoint


@dataclass(frozen=True, kw_only=True)
class Process:
    """An engine in a process of its own."""

    endpoint: str
    popen: "subprocess.Popen[str]"


def spawn() -> Process:
    """Start one and wait until it answers."""
    command = [sys.executable, __file__, "--serve"]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert popen.stdout is not None
    return Process(endpoint=json.loads(popen.stdout.readline())["endpoint"], popen=popen)


def client_of(*endpoints: str) -> RolloutClient:
    """Return a client of engines at these addresses."""
    reports = tuple(
        InstalledReport(
            worker_id=f"engine-{at}",
            model_name="m",
            endpoint=endpoint,
            version_id=LABEL.version_id,
            sequence=LABEL.sequence,
            root_digest=LABEL.root_digest,
            state="ready",
            installed_at_unix_ms=0,
            fetched_bytes=0,
            refit_ms=0,
            pause_ms=0,
        )
        for at, endpoint in enumerate(endpoints)
    )
    return RolloutClient(
        RolloutConfig(max_staleness=0, token=TOKEN, model_name="m"),
        fleet=lambda: Fleet(reports=reports, newest=1),
        clock=system_async_clock(),
        chance=chance,
    )


def measure_client() -> Bar:
    """Let the client and a direct call take turns at an engine in another process."""
    process = spawn()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    direct, through = list[float](), list[float]()
    try:
        with (
            client_of(process.endpoint) as rollouts,
            httpx.Client(base_url=process.endpoint, headers=headers, trust_env=False) as http,
        ):
            for at in range(CALLS):
                prompt = [10 + at % 20, 11]
                began = time.perf_counter()
                body = render_request(prompt, SAMPLING, model_name="m")
                http.post("/v1/completions", json=body).raise_for_status()
                direct.append(time.perf_counter() - began)
                began = time.perf_counter()
                rollouts.complete([prompt], SAMPLING)
                through.append(time.perf_counter() - began)
    finally:
        stop(process)
    added_ms = (statistics.median(through) - statistics.median(direct)) * 1000
    return at_most("rollout client over a direct call, p50, ms", added_ms, 3)


def measure_kill() -> Bar:
    """SIGKILL one of two engines under load; count prompts without an answer."""
    processes = [spawn(), spawn()]
    answers: list[int] = []
    sampling = Sampling(max_tokens=30, seed=1, ignore_eos=True)
    try:
        with client_of(*(each.endpoint for each in processes)) as rollouts:
            prompts = [[10 + at % 20, 12] for at in range(PROMPTS)]
            for at, choices in rollouts.complete_each(prompts, sampling):
                answers.append(at)
                assert len(choices[0].token_ids) == sampling.max_tokens
                if len(answers) == KILL_AFTER:
                    processes[0].popen.send_signal(signal.SIGKILL)
    finally:
        for process in processes:
            stop(process)
    return at_most("requests lost, an engine killed under load", PROMPTS - len(set(answers)), 0)


def stop(process: Process) -> None:
    """End a process that may have ended."""
    process.popen.kill()
    process.popen.wait(timeout=60)


def measure() -> Sequence[Bar]:
    """Hold everything against its limit."""
    return [measure_client(), measure_kill(), *measure_both(), *measure_vllm()]


def measure_both() -> list[Bar]:
    """Measure pauses with weights held twice, then once."""
    return [*measure_pauses("twice"), *measure_pauses("once")]


def measure_vllm() -> list[Bar]:
    """Take the bars of vLLM from its own environment, if that is there."""
    beside = Path(__file__).with_name("generator_vllm.py")
    if not VLLM_PYTHON.exists():
        print("vLLM left out: run `make vllm` first", file=sys.stderr)
        return []
    command = [str(VLLM_PYTHON), str(beside), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=1800)
    return [Bar(**bar) for bar in json.loads(done.stdout.splitlines()[-1])["bars"]]


def serve() -> None:
    """Be one of the engines, until whoever started us is gone."""
    torch.set_num_threads(1)
    with served() as endpoint:
        print(json.dumps({"endpoint": endpoint}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        run(measure, __doc__)
