"""``paceline serve --engine vllm``: vLLM's own server, under the contract of rollout engines."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from vllm import SamplingParams

from paceline.core.waiting import wait_until
from paceline.refit.compose.vllm_offline import LlmFollower
from paceline.system import environ, system_clock
from paceline.testing.small_run import DATA_TOKEN, SmallRun
from paceline.testing.tiny_model import tiny_model

PATIENCE_S = 90.0
LONG = 450
"""Tokens, enough for an update to fall between them."""
ASKED_MAX = 20

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
def serve(tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that starts an engine of a run."""
    started = []

    def start(run: SmallRun, *further: str, **environment: str) -> Any:
        config = run.config
        command = [sys.executable, "-m", "paceline", "serve", "--engine", "vllm"]
        options = {
            "model": model_dir,
            "control": config.control,
            "credentials": config.credentials,
            "model-name": config.model_name,
            "run-id": config.run_id,
            "grace": 5,
        }
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        process = subprocess.Popen(
            [*command, "--", "--max-model-len", "512", "--enforce-eager", *further],
            env={**environ(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.fixture
def run(tmp_path: Path, model_dir: Path) -> Iterator[SmallRun]:
    with SmallRun(tmp_path, tiny_model(model_dir, seed=1), model_dir=model_dir) as run:
        yield run


def test_serves_a_run(serve: Callable[..., Any], run: SmallRun) -> None:
    """Nothing before a version is in; then tokens with their versions, also across an update."""
    process = serve(run)
    endpoint = json.loads(process.stdout.readline())["endpoint"]
    with httpx.Client(
        base_url=endpoint, headers={"Authorization": f"Bearer {DATA_TOKEN}"}, timeout=60
    ) as http:
        assert http.get("/health").json()["state"] == "loading"
        chat = {"model": "m", "messages": [{"role": "user", "content": "1"}]}
        assert http.post("/v1/chat/completions", json=chat).status_code == 503
        assert ask(http, "1+2=").status_code == 503
        run.publish_full()
        await_version(http, run)
        first = ask(http, "1+2=").json()["choices"][0]
        assert [span["root_digest"] for span in first["weight_versions"]] == [run.root]
        assert len(ask(http, "1", n=3, temperature=0).json()["choices"]) == 3
        across_an_update(http, run)
        assert httpx.post(f"{endpoint}/tokenize", json={}).status_code == 401
        assert http.post("/collective_rpc", json={}).status_code == 403
        assert ask(http, "1", top_p=0.5).status_code == 400
        tokens = http.post("/tokenize", json={"model": "m", "prompt": "1+2="})
        assert tokens.headers["x-paceline-version-id"] == run.uid
        assert f"paceline_installs {run.sequence + 1}.0" in http.get("/metrics").text
        (report,) = run.control.list_installed("m")
        assert (report.root_digest, report.verified) == (run.root, "mirror-bytes")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.slow
def test_server_does_not_outlive_its_starter(serve: Callable[..., Any], run: SmallRun) -> None:
    """Killing ``paceline serve`` ends vLLM, workers and all."""
    process = serve(run)
    endpoint = json.loads(process.stdout.readline())["endpoint"]
    (server,) = psutil.Process(process.pid).children()
    everybody = [server, *server.children(recursive=True)]
    process.kill()
    _, alive = psutil.wait_procs(everybody, timeout=60)
    assert alive == []
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{endpoint}/health")


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "update-fetched",
        "update-staged",
        "workers-writing",
        "update-written",
        "workers-written",
        "workers-settled",
    ],
)
def test_a_worker_killed_in_an_update(
    serve: Callable[..., Any], run: SmallRun, llm: Any, point: str
) -> None:
    """The engine ends; the record says the old version, and the next engine serves the new one."""
    dying = ("--worker-extension-cls", "engines.dying.DyingExtension")
    process = serve(run, *dying, PYTHONPATH=":".join(sys.path), PACELINE_TEST_DIES_AT=point)
    process.stdout.readline()
    run.publish_full()
    await_report(run)
    old_root = run.root
    run.train(share=0.02, seed=1)
    run.publish_delta()
    assert process.wait(PATIENCE_S) != 0
    (left,) = run.control.list_installed("m")
    assert (left.sequence, left.root_digest) == (0, old_root)
    endpoint = json.loads(serve(run).stdout.readline())["endpoint"]
    await_report(run)
    headers = {"Authorization": f"Bearer {DATA_TOKEN}"}
    with httpx.Client(base_url=endpoint, headers=headers, timeout=60) as http:
        served = ask(http, "1+2=", max_tokens=24, temperature=0, ignore_eos=True).json()
    follower = LlmFollower(llm, run.config)
    follower.catch_up(timeout_s=PATIENCE_S)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    (wanted,) = llm.generate("1+2=", params, use_tqdm=False)
    assert served["choices"][0]["token_ids"] == list(wanted.outputs[0].token_ids)
    follower.close()


def await_report(run: SmallRun) -> None:
    wait_until(
        lambda: run.root in {each.root_digest for each in run.control.list_installed("m")},
        what=f"a report of {run.uid}",
        clock=system_clock(),
        timeout_s=PATIENCE_S,
        interval_s=0.05,
    )


def across_an_update(http: httpx.Client, run: SmallRun) -> None:
    """Let updates fall into running requests until one has; its tokens name both, in order."""
    for turn in range(ASKED_MAX):
        old = run.uid
        fields = {"model": "m", "prompt": "1+2=", "max_tokens": LONG, "seed": turn}
        body = {**fields, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = filter(None, response.iter_lines())
            pieces = [next(lines)]
            run.train(share=0.02, seed=turn)
            run.publish_delta()
            pieces += lines
        await_version(http, run)
        assert pieces.pop() == "data: [DONE]"
        choices = [json.loads(piece.removeprefix("data: "))["choices"][0] for piece in pieces]
        spans = [span for choice in choices for span in choice["weight_versions"]]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == LONG
        named = list(dict.fromkeys(span["version_id"] for span in spans))
        if named == [old, run.uid]:
            return
        assert named == [old]  # it ended before the update was ready
    pytest.fail("no update fell into a request")


def ask(http: httpx.Client, prompt: str, **fields: object) -> httpx.Response:
    wanted = {"model": "m", "prompt": prompt, "max_tokens": 8, **fields}
    return http.post("/v1/completions", json=wanted)


def await_version(http: httpx.Client, run: SmallRun) -> None:
    wait_until(
        lambda: http.get("/health").json().get("root_digest") == run.root,
        what=f"version {run.uid}",
        clock=system_clock(),
        timeout_s=PATIENCE_S,
        interval_s=0.05,
    )
