"""``python -m paceline.testing.killed_trainer``: trainers that die at a named point of a publish.

Reads orders from standard input, one JSON object a line, and forks a trainer for each: what a
trainer imports takes longer than what it does here. Writes a line when one has ended, or has done
its steps and serves them until a file ``stop`` is there.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.core.registry import load_entry
from paceline.core.waiting import wait_until
from paceline.refit.control.client import GrpcControlPlane
from paceline.refit.publisher import Publisher, PublisherOptions
from paceline.refit.trainers.registry import TRAINER_ENGINES
from paceline.refit.transports.registry import OBJECT_SERVERS
from paceline.system import chance, system_clock
from paceline.testing.killed_at import die_at

PUBLISH_POINTS: Mapping[str, tuple[str, str]] = {
    "captured": ("TorchModuleTrainer.capture", "return"),
    "staged": ("TorchModuleTrainer.stage_captured", "return"),
    "uncreated": ("Advertiser._create", "call"),
    "created": ("Advertiser._create", "return"),
    "served": ("VersionShelf.serve", "return"),
    "manifest-served": ("HttpObjectServer.publish_manifest", "return"),
    "described": ("GrpcControlPlane.describe_version", "return"),
    "ready": ("GrpcControlPlane.create_shard", "return"),
    "committed": ("TorchModuleTrainer.commit_staged", "return"),
    "anchored": ("Publisher._anchor", "return"),
}
"""Name of a point -> function, and whether the process dies before it or after it, in the order of
a publish. Those from ``ready`` on die with a version that engines may have."""
WAIT_S = 60.0
DATA_TOKEN = "data-token-of-a-test"  # noqa: S105
SIZE = 5000


def train(order: Mapping[str, Any]) -> None:
    """Take steps from where the last save was, publish each, and stay until told to stop."""
    folder = Path(order["folder"])
    weights = {"w": torch.zeros(SIZE, dtype=torch.float32), "b": torch.ones(7)}
    begun = _load(folder, weights)
    clock = system_clock()
    trainer_class: Any = load_entry(TRAINER_ENGINES, "torch", port="trainer engine")
    server_class: Any = load_entry(OBJECT_SERVERS, "http", port="transport")
    trainer = trainer_class(clock=clock)
    trainer.bind_tensors(weights)
    if order.get("point"):
        profile = die_at(order["point"], PUBLISH_POINTS)
        threading.setprofile(profile)
        sys.setprofile(profile)
    with ExitStack() as parts:
        token = order["token"]
        control = GrpcControlPlane(
            order["control"], token=lambda: token, clock=clock, chance=chance
        )
        parts.callback(control.close)
        server = server_class(token=lambda: DATA_TOKEN)
        parts.callback(server.close)
        publisher = Publisher(
            control=control,
            trainer=trainer,
            source=server,
            clock=clock,
            options=PublisherOptions(
                model_name="m",
                run_id="run",
                worker_id=f"trainer-{os.getpid()}",
                anchor_every=3,
                compose=False,
                close_wait_s=1,
            ),
            notify=lambda name, fields: _tell(folder, name, fields),
        )
        parts.enter_context(publisher)
        root = ""
        for step in range(begun, order["steps"]):
            weights["w"][step % 50 :: 50] += 1
            if order["saves"] == "before":
                _save(folder, weights, step + 1)
            root = publisher.publish(step=step + 1).result(WAIT_S).root_digest
            if order["saves"] == "after":
                _save(folder, weights, step + 1)
        _write(folder / "done", json.dumps({"root": root, "run": publisher.run_id}).encode())
        stop = folder / "stop"
        wait_until(
            stop.exists, what="the word to stop", clock=clock, timeout_s=WAIT_S, interval_s=0.02
        )


def _load(folder: Path, weights: Mapping[str, torch.Tensor]) -> int:
    path = folder / "weights.npz"
    if not path.exists():
        return 0
    with np.load(path) as found:
        for name, tensor in weights.items():
            tensor.copy_(torch.from_numpy(found[name]))
        return int(found["step"])


def _save(folder: Path, weights: Mapping[str, torch.Tensor], step: int) -> None:
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in weights.items()}
    with (folder / "weights.new").open("wb") as file:
        np.savez(file, step=step, **arrays)
    (folder / "weights.new").replace(folder / "weights.npz")


def _write(path: Path, data: bytes) -> None:
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)


def _tell(folder: Path, name: str, fields: Mapping[str, object]) -> None:
    with (folder / "events.jsonl").open("a", encoding="utf8") as file:
        file.write(json.dumps({"event": name, **fields}) + "\n")


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def main() -> None:
    """Fork a trainer for each order, one after another."""
    torch.set_num_threads(1)
    _say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                train(order)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        _say(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
