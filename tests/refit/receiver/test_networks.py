"""Two clouds on one computer: who cannot dial the trainer gets its weights from who can."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from paceline.refit import compose
from paceline.testing.netns import NetworkRefusedError, Networks

WORKER = Path(__file__).parents[3] / "benchmarks" / "link_worker.py"
SIZE = {"tensors": 4, "elements": 2**20}
"""8 MiB."""


@pytest.fixture
def nets() -> Iterator[Networks]:
    """Yield networks, where this computer allows them."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("only root on Linux makes network namespaces")
    try:
        made = Networks()
    except NetworkRefusedError as exc:
        pytest.skip(f"this machine refuses network namespaces: {exc}")
    yield made
    made.close()


class Process:
    """One worker of the benchmark, on its machine."""

    def __init__(self, nets: Networks, machine: str, given: Mapping[str, object]) -> None:
        self._process = subprocess.Popen(
            nets.command(machine, [sys.executable, str(WORKER), json.dumps(given)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def hear(self, key: str) -> dict[str, object]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found: dict[str, object] = json.loads(line)
            if key in found:
                return found
        raise AssertionError(f"it ended without {key!r}")

    def kill(self) -> None:
        with self._process:
            self._process.kill()


def test_an_island_is_supplied_by_its_neighbour(nets: Networks, tmp_path: Path) -> None:
    """The trainer's cloud cannot be dialled from the island, nor the island from there.

    The bridge has a link to both; the island reaches the control service through a tunnel over
    it, and believes what the bridge serves by the trainer's signature alone.
    """
    tokens, keys = tmp_path / "tokens.json", compose.create_run_keys(tmp_path / "keys.json")
    compose.create_token_file(tokens)
    nets.add("control", {"a": None})
    nets.add("trainer", {"a": 200})
    nets.add("bridge", {"a": 200, "b": 200})
    nets.add("island", {"b": 200})
    made: list[Process] = []

    def start(machine: str, network: str, **given: object) -> Process:
        told = {"tokens": str(tokens), "host": nets.address(machine, network), **SIZE, **given}
        process = Process(nets, machine, told)
        made.append(process)
        return process

    try:
        address = str(start("control", "a", role="control").hear("address")["address"])
        trainer = start(
            "trainer", "a", role="trainer", control=address, signing_key=keys.signing_key
        )
        trainer.hear("ready")
        tunnel = start("bridge", "b", role="tunnel", control=address)
        through = str(tunnel.hear("address")["address"])
        followers = {
            name: start(
                name,
                "b",  # the bridge serves on into the island's network only
                role="receiver",
                name=name,
                verify_key=keys.verify_key,
                control=address if name == "bridge" else through,
            )
            for name in ("bridge", "island")
        }
        for follower in followers.values():
            follower.hear("ready")
            follower.ask(do="follow")
            follower.hear("following")
        before = nets.sent_bytes("trainer", "a")
        trainer.ask(do="step", changed=0)
        full = int(str(trainer.hear("payload_bytes")["payload_bytes"]))
        roots = {str(each.hear("installed")["root"]) for each in followers.values()}
        trainer.ask(do="step", changed=0.01)
        roots |= {str(each.hear("installed")["root"]) for each in followers.values()}
        assert len(roots) == 2, "each version is the same on both"
        assert nets.sent_bytes("trainer", "a") - before < 1.3 * full
    finally:
        for process in made:
            process.kill()


def test_namespaces_are_taken_away(nets: Networks) -> None:
    """Closing leaves no namespace behind."""
    nets.add("one", {"a": None})
    name = nets.command("one", [])[-1]
    assert name in _listed()
    nets.close()
    deadline = time.monotonic() + 5  # noqa: TID251 - the kernel's own time
    while name in _listed():
        assert time.monotonic() < deadline  # noqa: TID251 - as above


def _listed() -> str:
    return subprocess.run(
        ["ip", "netns", "list"],  # noqa: S607 - the system's
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    ).stdout
