"""After kill -9, gc finds and ends what is ours on two clouds, over sockets and a real sshd."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.system import environ, system_clock
from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.gpus import can_fake_gpus
from paceline.testing.fakes.machine import has_sshd
from paceline.testing.fakes.machines import SshMachines
from paceline.testing.fakes.registry import FAKES, serve_fake

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,  # Vast allows a call in two seconds; what it shows is in tests/runs as well
    pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server"),
    pytest.mark.skipif(not can_fake_gpus(), reason="needs cc: apt-get install gcc"),
]
_WAIT_S = 60.0


@pytest.fixture
def clouds(tmp_path: Path) -> Iterator[tuple[dict[str, FakeCloud], dict[str, str]]]:
    """Two providers on loopback, and the environment of an operator who has their keys."""
    env = {
        "PATH": environ()["PATH"],
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "HOME": str(tmp_path),
        "PACELINE_STATE_DIR": str(tmp_path / "state"),
    }
    fakes: dict[str, FakeCloud] = {}
    with ExitStack() as stack:
        for name in ("vast", "runpod"):
            machines = SshMachines(tmp_path / name)
            fakes[name] = FAKES[name]()(clock=system_clock(), machines=machines, boot_s=0.2)
            stack.callback(fakes[name].close)
            env |= stack.enter_context(serve_fake(fakes[name]))
        yield fakes, env


def test_gc_ends_what_is_ours_and_nothing_else(
    clouds: tuple[dict[str, FakeCloud], dict[str, str]], tmp_path: Path
) -> None:
    """Ours goes with --yes, what only bears our label with --strays, what is foreign never."""
    fakes, env = clouds

    def start(*words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "paceline", *words]
        out = subprocess.PIPE
        return subprocess.Popen(argv, env=env, cwd=tmp_path, stdout=out, stderr=out, text=True)

    def paceline(*words: str) -> str:
        process = start(*words)
        out, err = process.communicate(timeout=_WAIT_S)
        assert process.returncode == 0, err
        return out

    fakes["runpod"].plant(label="paceline-elsewhere-trainer-0-ab")
    fakes["vast"].plant(label="a colleague's")
    words = (
        "--backend",
        "runpod",
        "--gpu",
        "h100-1x",
        "--budget-usd",
        "8",
        "--yes",
        "--run-id",
        "r",
    )
    victim = start("run", *words, "--", "sleep", "300")
    journal = tmp_path / "runs" / "r" / "events.jsonl"
    deadline = time.monotonic() + _WAIT_S
    while not (journal.exists() and "role.started" in journal.read_text()):
        assert time.monotonic() < deadline, victim.communicate()
        assert victim.poll() is None, victim.communicate()
        time.sleep(0.1)
    victim.kill()
    victim.communicate()

    found = json.loads(paceline("gc", "--json"))
    assert [one["whose"] for one in found["machines"]] == ["ours", "unknown"]
    assert (found["foreign"], found["ended"]) == ({"vast": 1}, False)
    ended = json.loads(paceline("gc", "--yes", "--json"))
    assert [proof["reads"][0] for proof in ended["proofs"]] == ["its state reads destroyed"]
    assert [one.label for one in fakes["vast"].billing()] == ["a colleague's"]
    assert len(fakes["runpod"].billing()) == 1
    paceline("gc", "--yes", "--strays", "--min-age", "0")
    assert fakes["runpod"].billing() == []
    billed = json.loads(paceline("cost", "r", "--actual", "--json"))
    [one] = billed["billed"]
    assert one["theirs_usd"] is not None
    assert abs(one["difference_usd"]) < 0.05
