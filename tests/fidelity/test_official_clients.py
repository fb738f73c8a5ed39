"""The providers' own clients work against our fakes, so what is proven on those means something.

Each client has an environment of its own, made by `make clients`: their pinned libraries do not
go with ours.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.system import system_clock
from paceline.testing.fakes.registry import FAKES, serve_fake

pytestmark = pytest.mark.fidelity

_ROOT = Path(__file__).parents[2]
_VAST = _ROOT / ".venv-vastai" / "bin" / "vastai"
_RUNPOD = _ROOT / ".venv-runpod" / "bin" / "python"


def _run(argv: list[str], environ: dict[str, str], home: Path) -> str:
    """Return what a client prints; with nothing of our environment."""
    base = {"PATH": "/usr/bin:/bin", "HOME": str(home), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        argv, env={**base, **environ}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{argv[1:3]}: {done.stdout[-1000:]} {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.skipif(not _VAST.exists(), reason="needs the client vastai: make clients")
def test_the_vendors_vast_cli_rents_labels_stops_and_destroys(tmp_path: Path) -> None:
    """Search to destroy by `vastai`, each answer understood by it."""
    fake = FAKES["vast"]()(clock=system_clock(), boot_s=0.0)

    with serve_fake(fake) as environ:

        def vastai(*words: str) -> str:
            return _run([str(_VAST), *words], environ, tmp_path)

        offers = json.loads(vastai("search", "offers", "gpu_name=H100_SXM num_gpus=1", "--raw"))
        assert {offer["gpu_name"] for offer in offers} == {"H100 SXM"}
        offer = str(offers[0]["id"])
        words = ("--image", "ubuntu:24.04", "--disk", "20", "--label", "a", "--ssh", "--direct")
        made = json.loads(vastai("create", "instance", offer, *words, "--raw"))
        instance = str(made["new_contract"])
        vastai("label", "instance", instance, "b")
        assert vastai("ssh-url", instance).strip() == "ssh://root@127.0.0.1:22"
        vastai("stop", "instance", instance)
        (row,) = json.loads(vastai("show", "instances", "--raw"))
        assert (row["label"], row["intended_status"]) == ("b", "stopped")
        vastai("start", "instance", instance)
        assert "sshd started" in vastai("logs", instance)
        vastai("attach", "ssh", instance, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0")
        assert json.loads(vastai("show", "user", "--raw"))["credit"] == fake.balance_usd
        vastai("destroy", "instance", instance, "-y")
        assert json.loads(vastai("show", "instances", "--raw")) == []
    assert fake.billing() == []


@pytest.mark.skipif(not _RUNPOD.exists(), reason="needs the client runpod: make clients")
def test_the_vendors_runpod_client_deploys_stops_and_terminates(tmp_path: Path) -> None:
    """The GraphQL part by `runpod`: created, listed, stopped, resumed, gone."""
    fake = FAKES["runpod"]()(clock=system_clock(), boot_s=0.0)
    with serve_fake(fake) as environ:
        script = Path(__file__).with_name("drive_runpod.py")
        found = json.loads(_run([str(_RUNPOD), str(script), fake.key], environ, tmp_path))
    assert "NVIDIA B200" in found["gpus"]
    assert found["memory_gb"] == 141
    assert found["listed"] == [[found["created"], "paceline-fidelity-1", 2]]
    assert found["ports"][0]["privatePort"] == 22
    assert (found["stopped"], found["resumed"], found["gone"]) == ("EXITED", "RUNNING", None)
    assert "API key" in found["refused"]
    assert fake.billing() == []


def test_the_official_nebius_sdk_creates_waits_and_deletes(tmp_path: Path) -> None:
    """The SDK's own calls, operations and errors, over a real gRPC server."""
    from paceline.testing.fakes.nebius import PROJECT_ID

    fake = FAKES["nebius"]()(clock=system_clock(), boot_s=0.5)
    with serve_fake(fake) as environ:
        script = Path(__file__).with_name("drive_nebius.py")
        argv = [sys.executable, str(script), environ["NEBIUS_ENDPOINT"], fake.key, PROJECT_ID]
        found = json.loads(_run(argv, {}, tmp_path).splitlines()[-1])
    assert "gpu-b200-sxm" in found["platforms"]
    assert found["created"].startswith("computeinstance-")
    assert (found["state"], found["address"]) == ("RUNNING", "127.0.0.1/32")
    assert found["listed"] == ["paceline-fidelity-1"]
    assert found["absent"] == "NOT_FOUND"
