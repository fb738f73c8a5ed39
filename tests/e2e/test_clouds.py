"""The command line rents from a fake cloud, over real sockets and a real sshd."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.system import environ, system_clock
from paceline.testing.fakes.machine import has_sshd
from paceline.testing.fakes.machines import SshMachines
from paceline.testing.fakes.registry import FAKES, serve_fake

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server"),
]


def test_offers_and_a_command_on_a_rented_machine(tmp_path: Path) -> None:
    """`offers` shows the market; `run` rents where it may, runs, tears down; no bill goes on.

    Without `--backend` it asks everybody who lets it in.
    """
    machines = SshMachines(tmp_path / "machines")
    fake = FAKES["vast"]()(clock=system_clock(), machines=machines, boot_s=0.2)
    with serve_fake(fake) as found:
        env = {
            "PATH": environ()["PATH"],
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
            **found,
            "HOME": str(tmp_path),
            "PACELINE_STATE_DIR": str(tmp_path / "state"),
        }

        def paceline(*words: str) -> subprocess.CompletedProcess[str]:
            argv = [sys.executable, "-m", "paceline", *words]
            return subprocess.run(
                argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
            )

        offers = paceline("offers", "--gpu", "h100-1x", "--backend", "vast", "--json")
        assert offers.returncode == 0, offers.stderr
        assert "h100-sxm" in json.dumps(json.loads(offers.stdout))
        words = ("--gpu", "h100-1x", "--budget-usd", "8", "--yes")
        done = paceline("run", *words, "--", "uname", "-s")
        assert done.returncode == 0, done.stderr
        assert "Linux" in done.stdout + done.stderr
    assert len(fake.rentals) == 1
    assert fake.billing() == []
    fake.close()
