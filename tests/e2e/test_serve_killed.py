"""``paceline serve`` dies by SIGKILL inside an update: what comes back is one version, exactly."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from paceline.core.waiting import wait_until
from paceline.refit.model import InstalledReport
from paceline.system import system_clock
from paceline.testing.small_run import DATA_TOKEN, SmallRun
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3

pytestmark = pytest.mark.e2e

TIMEOUT_S = 90.0
PROMPT = [10, 11, 12]
TOKENS = 12
IN_WRITE = "update-in-write:30"
"""In the middle of the second update: the first one writes 24 tensors of one chunk each."""
LATER = ("leased", "fetched", "staged", "written", "labelled", "following", "proven")
STAGES = (
    ("twice", IN_WRITE),
    *(pytest.param("twice", f"update-{stage}:2", marks=pytest.mark.slow) for stage in LATER),
    pytest.param("twice", "update-in-write:55", marks=pytest.mark.slow),  # of the set that follows
    *(
        pytest.param("once", stage, marks=pytest.mark.slow)
        for stage in (IN_WRITE, "update-written:2", "update-proven:2")
    ),
)
"""All of the second update."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    model_dir = write_tiny_qwen3(tmp_path / "model")
    with SmallRun(tmp_path, tiny_model(model_dir, seed=1), model_dir=model_dir) as small:
        yield small


@pytest.fixture
def serve(run: SmallRun) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the same worker, to die at a point or at none."""
    processes = []

    def spawn(point: str, weights: str = "auto") -> subprocess.Popen[bytes]:
        how = ["paceline.testing.killed_at", point] if point else ["paceline"]
        command = [sys.executable, "-m", *how, "serve", "--model"]
        process = subprocess.Popen(
            [*command, str(run.config.engine.model_dir), "--grace", "5", "--weights", weights],
            env={
                "PYTHONPATH": ":".join(sys.path),
                "PACELINE_CONTROL": run.config.control,
                "PACELINE_CREDENTIALS": str(run.config.credentials),
                "PACELINE_MODEL": "m",
                "PACELINE_RUN_ID": "r",
                "PACELINE_INDEX": "0",
                "HF_HUB_OFFLINE": "1",
            },
            stdout=subprocess.DEVNULL,
        )
        processes.append(process)
        return process

    yield spawn
    for process in processes:
        process.kill()
        process.wait(TIMEOUT_S)


@pytest.mark.parametrize(("weights", "stage"), STAGES)
def test_killed_in_an_update(
    run: SmallRun, serve: Callable[..., subprocess.Popen[bytes]], weights: str, stage: str
) -> None:
    """The record says the old version, with its own root; the next process serves the new one."""
    dying = serve(stage, weights)
    run.publish_full()
    old = await_report(run, endpoint_but="")
    greedy = greedy_of(run)
    assert tokens_of(old) == greedy
    old_root = run.root
    run.train(share=0.02, seed=1)
    run.publish_delta()
    assert dying.wait(TIMEOUT_S) == -signal.SIGKILL
    (left,) = run.control.list_installed("m")
    assert (left.sequence, left.root_digest) == (0, old_root)
    serve("")
    new = await_report(run, endpoint_but=old.endpoint)
    assert new.verified == "live-bytes"
    assert tokens_of(new) == greedy_of(run) != greedy


def await_report(run: SmallRun, *, endpoint_but: str) -> InstalledReport:
    """Wait until an engine elsewhere reports the newest version."""

    def found() -> InstalledReport | None:
        for each in run.control.list_installed("m"):
            if each.root_digest == run.root and each.endpoint != endpoint_but:
                return each
        return None

    wait_until(
        lambda: found() is not None,
        what=f"a report of {run.uid}",
        clock=system_clock(),
        timeout_s=TIMEOUT_S,
        interval_s=0.05,
    )
    report = found()
    assert report is not None
    return report


def tokens_of(engine: InstalledReport) -> list[int]:
    """Ask the engine for the greedy continuation."""
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{engine.endpoint}/v1/completions",
        json={"model": "m", **asked},
        headers={"Authorization": f"Bearer {DATA_TOKEN}"},
        timeout=TIMEOUT_S,
        trust_env=False,
    )
    token_ids: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return token_ids


def greedy_of(run: SmallRun) -> list[int]:
    """Continue by the library's own loop."""
    ids = torch.tensor([PROMPT])
    out = run.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
    )
    return [int(token_id) for token_id in out[0, len(PROMPT) :]]
