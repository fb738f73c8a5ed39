"""Clouds on one computer, with ways that are missing: weights arrive by those that there are."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.refit import compose
from paceline.system import environ
from paceline.testing.moto_server import ACCESS_KEY, REGION, SECRET_KEY
from paceline.testing.netns import NetworkRefusedError, Networks

WORKER = Path(__file__).parents[3] / "benchmarks" / "link_worker.py"
SIZE = {"tensors": 4, "elements": 2**20}
"""8 MiB."""
TRAINER_ADDRESS, MEETING_ADDRESS = "10.99.0.1", "10.99.0.2"
"""In no network: reached by a route or not at all."""


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

    def __init__(
        self,
        nets: Networks,
        machine: str,
        given: Mapping[str, object],
        env: Mapping[str, str],
    ) -> None:
        self._process = subprocess.Popen(
            nets.command(machine, [sys.executable, str(WORKER), json.dumps(given)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environ(), **env},
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


class Run:
    """Processes of one run, killed when left."""

    def __init__(self, nets: Networks, folder: Path, parts: ExitStack) -> None:
        self._nets = nets
        self._parts = parts
        self._tokens = folder / "tokens.json"
        self._keys = compose.create_run_keys(folder / "keys.json")
        compose.create_token_file(self._tokens)
        self.env: dict[str, str] = {}
        self.more: dict[str, object] = {}
        """What trainer and receivers are told besides."""

    def start(self, machine: str, host: str, **given: object) -> Process:
        told = {"tokens": str(self._tokens), "host": host, **SIZE, **given}
        process = Process(self._nets, machine, told, self.env)
        self._parts.callback(process.kill)
        return process

    def trainer(self, host: str, *, control: object) -> Process:
        keys = {"signing_key": self._keys.signing_key}
        found = self.start("trainer", host, role="trainer", control=control, **keys, **self.more)
        found.hear("ready")
        return found

    def follow(self, hosts: Mapping[str, tuple[str, object]]) -> list[Process]:
        """Start receivers by machine: host and control address; return once they follow."""
        keys = {"verify_key": self._keys.verify_key}
        found = [
            self.start(name, host, role="receiver", name=name, control=at, **keys, **self.more)
            for name, (host, at) in hosts.items()
        ]
        for each in found:
            each.hear("ready")
            each.ask(do="follow")
        for each in found:
            each.hear("following")
        return found


@pytest.fixture
def run(nets: Networks, tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as parts:
        yield Run(nets, tmp_path, parts)


def serve_two_versions(trainer: Process, followers: list[Process]) -> int:
    """Publish a full version and a delta, which all followers come to serve; return full bytes."""
    roots = set()
    sizes = []
    for changed in (0, 0.01):
        trainer.ask(do="step", changed=changed)
        sizes.append(int(str(trainer.hear("payload_bytes")["payload_bytes"])))
        roots |= {str(each.hear("installed")["root"]) for each in followers}
    assert len(roots) == 2, "each version is the same on all"
    return sizes[0]


def test_an_island_is_supplied_by_its_neighbour(nets: Networks, run: Run) -> None:
    """The trainer's cloud cannot be dialled from the island, nor the island from there.

    The bridge has a link to both; the island reaches the control service through a tunnel over
    it, and believes what the bridge serves by the trainer's signature alone.
    """
    nets.add("control", {"a": None})
    nets.add("trainer", {"a": 200})
    nets.add("bridge", {"a": 200, "b": 200})
    nets.add("island", {"b": 200})
    control = run.start("control", nets.address("control", "a"), role="control").hear("address")
    trainer = run.trainer(nets.address("trainer", "a"), control=control["address"])
    near = nets.address("bridge", "b")  # it serves on into the island's network only
    tunnel = run.start("bridge", near, role="tunnel", control=control["address"]).hear("address")
    followers = run.follow(
        {
            "bridge": (near, control["address"]),
            "island": (nets.address("island", "b"), tunnel["address"]),
        }
    )
    before = nets.sent_bytes("trainer", "a")
    full = serve_two_versions(trainer, followers)
    assert nets.sent_bytes("trainer", "a") - before < 1.3 * full


@pytest.mark.slow
def test_only_the_trainer_can_be_dialled(nets: Networks, run: Run) -> None:
    """Receivers that nobody reaches, each other neither, take everything from the trainer.

    They still tell each other through the control service what they have, in vain.
    """
    nets.add("trainer", {"a": 200, "b": 200})
    nets.add_address("trainer", TRAINER_ADDRESS)
    for name, network in (("one", "a"), ("two", "b")):
        nets.add(name, {network: 200})
        nets.route(name, TRAINER_ADDRESS, via="trainer", network=network)
    control = run.start("trainer", TRAINER_ADDRESS, role="control").hear("address")["address"]
    trainer = run.trainer(TRAINER_ADDRESS, control=control)
    hosts = {"one": nets.address("one", "a"), "two": nets.address("two", "b")}
    followers = run.follow({name: (host, control) for name, host in hosts.items()})
    full = serve_two_versions(trainer, followers)
    for network in ("a", "b"):
        assert nets.sent_bytes("trainer", network) > full


def test_only_the_trainer_can_dial(nets: Networks, run: Run) -> None:
    """A trainer that nobody reaches puts its weights where both sides reach: into a bucket.

    Its own address comes to nothing; the second way of the same version is the bucket.
    """
    nets.add("meeting", {"a": 200, "b": 200})
    nets.add("trainer", {"a": 200})
    nets.add_address("meeting", MEETING_ADDRESS)
    for name, network in (("trainer", "a"), ("one", "b"), ("two", "b")):
        if name != "trainer":
            nets.add(name, {network: 200})
        nets.route(name, MEETING_ADDRESS, via="meeting", network=network)
    bucket = run.start("meeting", MEETING_ADDRESS, role="bucket").hear("endpoint")
    run.env = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": str(bucket["endpoint"]),
    }
    run.more = {"transports": ["http", "objectstore"], "bucket": bucket["bucket"]}
    control = run.start("meeting", MEETING_ADDRESS, role="control").hear("address")["address"]
    trainer = run.trainer(nets.address("trainer", "a"), control=control)
    hosts = {name: nets.address(name, "b") for name in ("one", "two")}
    followers = run.follow({name: (host, control) for name, host in hosts.items()})
    full = serve_two_versions(trainer, followers)
    assert full < nets.sent_bytes("trainer", "a") < 1.5 * full
    assert nets.sent_bytes("meeting", "b") > full


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
