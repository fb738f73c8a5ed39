"""The nights of docs/guides/overnight.md, by the very commands that it shows."""

import re
import subprocess
import sys

import pytest

from e2e.operating import ROOT
from paceline.system import environ
from paceline.testing.fakes.machine import has_sshd

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server"),
]
GUIDE = (ROOT / "docs" / "guides" / "overnight.md").read_text(encoding="utf-8")
NIGHTS = re.findall(r"^python (examples/overnight/rehearse\.py) (\w+)$", GUIDE, re.MULTILINE)


def test_the_guide_shows_three_nights() -> None:
    """A preemption, a budget and a kill, each as a command."""
    assert [name for _, name in NIGHTS] == ["preemption", "budget", "kill"]


@pytest.mark.slow  # Vast allows a call in two seconds; what a night shows is in other tests as well
@pytest.mark.parametrize(("script", "name"), NIGHTS, ids=[name for _, name in NIGHTS])
def test_a_night_is_as_the_guide_says(script: str, name: str) -> None:
    """The command ends well, having checked each promise, and nothing bills at the provider."""
    env = {"PATH": environ()["PATH"], "PYTHONPATH": str(ROOT / "src")}
    argv = [sys.executable, str(ROOT / script), name]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("ok  nothing bills at the provider")
