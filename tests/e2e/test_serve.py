"""``paceline serve`` as real processes beside a real control service and a real source of bytes."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

import paceline
from paceline.core.waiting import wait_until
from paceline.refit import compose
from paceline.refit.control.auth import write_private_json
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.generators.protocol import Sampling
from paceline.refit.generators.transformers.tensors import view_live_tensors
from paceline.refit.model import InstalledReport, TensorBuffer
from paceline.refit.rollouts import Completion
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.system import system_clock
from paceline.testing.fakes.trainer import FakeTrainer, State, root_of
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3

pytestmark = pytest.mark.e2e

SOURCES = str(Path(paceline.__file__).parents[1])
SERVE = f"import sys; sys.path.insert(0, {SOURCES!r}); from paceline.cli.main import main; main()"
DATA_TOKEN = "data-token-of-a-test"  # noqa: S105
TIMEOUT_S = 90.0


@dataclass
class Run:
    """What a run has beside its engines."""

    control: ControlPlane
    trainer: FakeTrainer
    states: list[State]
    credentials: Path
    spawn: Callable[[int], subprocess.Popen[str]]


def state_of(model: torch.nn.Module) -> State:
    """Copy a model's bytes."""
    return {
        name: TensorBuffer(
            name=name, dtype=each.dtype, shape=each.shape, data=memoryview(bytes(each.data))
        )
        for name, each in view_live_tensors(model).buffers.items()
    }


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    model_dir = write_tiny_qwen3(tmp_path / "model")
    tokens = compose.create_token_file(tmp_path / "tokens.json")
    service = compose.start_control_server(token_file=tmp_path / "tokens.json")
    control = compose.connect_control(service.address, token=tokens["operator"])
    credentials = tmp_path / "credentials.json"
    fields = {"role": "generator", "control_token": tokens["generator"], "data_token": DATA_TOKEN}
    write_private_json(credentials, fields)
    server = HttpObjectServer(token=lambda: DATA_TOKEN)
    model = tiny_model(model_dir, seed=1)
    states = [state_of(model)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[:3] += 0.5
    states.append(state_of(model))
    aliases = tuple(sorted(view_live_tensors(model).aliases.items()))
    trainer = FakeTrainer(control, server, aliases=aliases)
    processes: list[subprocess.Popen[str]] = []

    def spawn(index: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", "--model", str(model_dir), "--grace", "5"],
            env={
                "PACELINE_CONTROL": service.address,
                "PACELINE_CREDENTIALS": str(credentials),
                "PACELINE_MODEL": "m",
                "PACELINE_RUN_ID": "r",
                "PACELINE_INDEX": str(index),
                "PACELINE_MAX_STALENESS": "2",
                "HF_HUB_OFFLINE": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield Run(control, trainer, states, credentials, spawn)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()
    control.close()
    server.close()
    service.stop()


def await_reports(
    control: ControlPlane, wanted: Callable[[list[InstalledReport]], bool]
) -> list[InstalledReport]:
    wait_until(
        lambda: wanted(list(control.list_installed("m"))),
        what="the engines' reports",
        clock=system_clock(),
        timeout_s=TIMEOUT_S,
        interval_s=0.05,
    )
    return list(control.list_installed("m"))


def test_two_engines_from_loading_to_the_end(run: Run) -> None:
    """Engines refuse without weights, follow to the trainer's digest, and go on when one dies."""
    processes = [run.spawn(index) for index in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert_loading(json.loads(process.stdout.readline())["endpoint"])

    run.trainer.publish_full("v0", 0, run.states[0])
    first = await_reports(run.control, lambda reports: [r.sequence for r in reports] == [0, 0])
    assert {each.root_digest for each in first} == {root_of(run.states[0])}
    run.trainer.publish_delta("v1", 1, run.states[0], run.states[1], base_uid="v0")
    second = await_reports(run.control, lambda reports: [r.sequence for r in reports] == [1, 1])
    assert {each.root_digest for each in second} == {root_of(run.states[1])}
    assert all(each.fetched_bytes > 0 and each.state == "ready" for each in second)

    rollouts = compose.connect_rollouts(
        run.control,
        model_name="m",
        run_id="r",
        max_staleness=0,
        data_token=compose.load_credentials(run.credentials).data_token,
    )
    prompts = [[10, 11], [12], [13, 14, 15]] * 4
    sampling = Sampling(max_tokens=8, n=2, seed=1, ignore_eos=True)
    before = rollouts.complete(prompts, sampling)
    assert engines_of(before) == {each.worker_id for each in second}
    processes[0].kill()
    after = rollouts.complete(prompts, sampling)
    assert len(engines_of(after)) == 1
    assert all(len(each.token_ids) == 8 for choices in after for each in choices)
    rollouts.close()

    processes[1].send_signal(signal.SIGTERM)
    assert processes[1].wait(TIMEOUT_S) == 0


def assert_loading(endpoint: str) -> None:
    headers = {"Authorization": f"Bearer {DATA_TOKEN}"}
    with httpx.Client(base_url=endpoint, headers=headers, trust_env=False) as client:
        assert client.get("/health").json()["state"] == "loading"
        assert client.post("/v1/completions", json={"prompt": "1+1="}).status_code == 503


def engines_of(answers: list[list[Completion]]) -> set[str]:
    return {each.engine_id for choices in answers for each in choices}
