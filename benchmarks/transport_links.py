"""Refits over links of a given rate, between network namespaces of this computer. Needs root.

The trainer's link has 200 Mbit/s both ways, a receiver's 1 Gbit/s; each process is the real thing
(publisher, control service over gRPC, receiver with its relay, HTTP), in a namespace of its own.
Sizes are chosen so that links are the limit and not two cores. Rates are compared with what a
bare socket gets through the same link; egress is what the trainer's device has sent, headers
included. Eight engines that install at once on two cores wait for the cores, so fan-out is told
both until the bytes are proven and until they are served. There is no delay on these links:
kernels may lack netem. ``--only spread`` or ``--only links`` measures one half.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from bars import Bar, at_least, at_most, note, option, run

from paceline.refit import compose
from paceline.testing.netns import NetworkRefusedError, Networks, networks

WORKER = Path(__file__).with_name("link_worker.py")
SLOW_MBIT, FAST_MBIT = 200, 1000
CHANGED = 0.009
"""Elements that change per step at a learning rate of 1e-6, see snapshots.py."""
LARGE = {"tensors": 16, "elements": 2**25}
"""1 GiB of bf16."""
SMALL = {"tensors": 16, "elements": 2**22}
"""128 MiB: enough that the link takes far longer than eight receivers' hashes on two cores."""
RAW_BYTES = 64 * 2**20
NUM_RECEIVERS = 8


class Worker:
    """One process on one machine."""

    def __init__(self, nets: Networks, machine: str, given: Mapping[str, object]) -> None:
        argv = [sys.executable, str(WORKER), json.dumps(given)]
        self.process = subprocess.Popen(
            nets.command(machine, argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
        )
        self._lines: Queue[dict[str, Any]] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def ask(self, **command: object) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, key: str, *, timeout_s: float = 180.0) -> dict[str, Any]:
        """Return the next answer that has ``key``; others before it are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                found = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                sys.exit(f"a worker did not say {key!r} within {timeout_s:g} s")
            if key in found:
                return found

    def kill(self) -> None:
        """End it as a power cut does."""
        self.process.kill()
        self.process.wait()


class World:
    """Control service, trainer and receivers of one run."""

    def __init__(self, nets: Networks, folder: Path, size: Mapping[str, int]) -> None:
        self._nets = nets
        self._size = size
        self._tokens = folder / "tokens.json"
        self._keys = compose.create_run_keys(folder / "keys.json")
        compose.create_token_file(self._tokens)
        self.workers: list[Worker] = []
        nets.add("control", {"wan": None})
        nets.add("trainer", {"wan": SLOW_MBIT})
        host = nets.address("control", "wan")
        self._control = self._worker("control", {"role": "control", "host": host})
        self._address = self._control.hear("address")["address"]
        self.trainer = self._worker(
            "trainer", {"role": "trainer", "signing_key": self._keys.signing_key, **self._given()}
        )
        self.trainer.hear("ready")

    def receiver(self, name: str) -> Worker:
        """Start a receiver that follows the run."""
        self._nets.add(name, {"wan": FAST_MBIT})
        given = {"role": "receiver", "name": name, "verify_key": self._keys.verify_key}
        worker = self._worker(name, {**given, **self._given()})
        worker.hear("ready")
        worker.ask(do="follow")
        worker.hear("following")
        return worker

    def raw_rate(self) -> float:
        """Return the bytes per second that a bare socket gets from the trainer."""
        self._nets.add("probe", {"wan": FAST_MBIT})
        worker = self._worker("probe", {"role": "receiver", "name": "probe", **self._given()})
        worker.hear("ready")
        self.trainer.ask(do="raw", bytes=RAW_BYTES)
        port = self.trainer.hear("port")["port"]
        worker.ask(do="raw", host=self._nets.address("trainer", "wan"), port=port)
        done = worker.hear("raw_s")
        worker.kill()
        return float(done["bytes"]) / float(done["raw_s"])

    def publish(self, **command: object) -> dict[str, Any]:
        """Publish the next version; returns once it is READY."""
        self.trainer.ask(**command)
        return self.trainer.hear("payload_bytes")

    def egress(self) -> int:
        """Return the bytes that the trainer has sent."""
        return self._nets.sent_bytes("trainer", "wan")

    def close(self) -> None:
        """End every process."""
        for worker in self.workers:
            worker.kill()

    def _given(self) -> dict[str, object]:
        return {"control": self._address, "tokens": str(self._tokens), **self._size}

    def _worker(self, machine: str, given: Mapping[str, object]) -> Worker:
        told = {"host": self._nets.address(machine, "wan"), "tokens": str(self._tokens), **given}
        worker = Worker(self._nets, machine, told)
        self.workers.append(worker)
        return worker


@contextmanager
def world(size: Mapping[str, int]) -> Iterator[World]:
    """Yield a run on networks of its own."""
    with ExitStack() as parts:
        nets = parts.enter_context(networks())
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        made = World(nets, folder, size)
        parts.callback(made.close)
        yield made


def links() -> Sequence[Bar]:
    """One receiver: how much of the link full, delta and composed payloads use."""
    with world(LARGE) as made:
        link = made.raw_rate()
        note(f"a bare socket gets {link / 1e6:.2f} MB/s")
        first = made.receiver("first")
        published = made.publish(do="step", changed=0)
        whole = first.hear("fetched")
        full_s = first.hear("installed")["at"] - published["asked_at"]
        published = made.publish(do="step", changed=CHANGED)
        delta = first.hear("fetched")
        refit_s = first.hear("installed")["at"] - published["asked_at"]
        for _ in range(3):
            made.publish(do="step", changed=CHANGED)
            first.hear("installed")
        late = made.receiver("late")
        late.hear("fetched")
        composed = late.hear("fetched")
        assert "-from-" in composed["fetched"], composed
    shares = {
        name: each["bytes"] / each["fetch_s"] / link
        for name, each in (("full", whole), ("delta", delta), ("composed", composed))
    }
    note(
        f"installed {refit_s:.2f} s after the step, the full version {full_s:.2f} s: "
        f"{whole}, {delta}, {composed}"
    )
    return [
        *(at_least(f"{name}: share of the link", share, 0.95) for name, share in shares.items()),
        at_most("refit at 1e-6 / full tensors", refit_s / full_s, 0.02),
    ]


def spread() -> Sequence[Bar]:
    """Eight receivers beside one, and eight of whom two are killed."""
    alone = fan_out(1)
    note(f"one alone: {alone}")
    eight = fan_out(NUM_RECEIVERS)
    note(f"eight: {eight}")

    def kill_two(workers: Sequence[Worker]) -> None:
        time.sleep(0.4 * alone.proven_s)
        for worker in workers[1:3]:
            worker.kill()

    six = fan_out(NUM_RECEIVERS, disturb=kill_two, dying=slice(1, 3))
    note(f"two killed: {six}")
    return [
        at_most("eight / one alone, proven", eight.proven_s / alone.proven_s, 1.5),
        at_most(
            "eight receivers / one alone, installed", eight.installed_s / alone.installed_s, 1.5
        ),
        at_most("trainer's egress / payload", eight.egress, 1.3),
        at_most("digests of the six left when two of eight are killed", len(six.roots), 1),
        at_most("the six left / one alone, proven", six.proven_s / alone.proven_s, 3.0),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreading:
    """One version's way to every receiver."""

    proven_s: float
    """From READY until the last one has all bytes, proven by their hashes."""
    installed_s: float
    """From READY until the last engine serves them: on few cores this measures the cores too."""
    egress: float
    """What the trainer has sent, over the payload."""
    roots: frozenset[str]


def fan_out(
    count: int,
    *,
    disturb: Callable[[Sequence[Worker]], None] = lambda workers: None,
    dying: slice = slice(0, 0),
) -> Spreading:
    """Publish one full version to so many receivers."""
    with world(SMALL) as made:
        workers = [made.receiver(f"r{at}") for at in range(count)]
        before = made.egress()
        published = made.publish(do="step", changed=0)
        disturb(workers)
        left = [each for each in workers if each not in workers[dying]]
        proven = [each.hear("fetched") for each in left]
        installed = [each.hear("installed") for each in left]
        sent = made.egress() - before
    return Spreading(
        proven_s=max(each["at"] for each in proven) - published["at"],
        installed_s=max(each["at"] for each in installed) - published["at"],
        egress=sent / published["payload_bytes"],
        roots=frozenset(each["root"] for each in installed),
    )


_QUESTIONS: Mapping[str, Callable[[], Sequence[Bar]]] = {"spread": spread, "links": links}


def measure(only: Sequence[str]) -> Sequence[Bar]:
    """Return the bars of these questions."""
    try:
        return [bar for name in only for bar in _QUESTIONS[name]()]
    except NetworkRefusedError as exc:
        sys.exit(f"namespaces cannot be made here: {exc}")


if __name__ == "__main__":
    asked = option("--only", ",".join(_QUESTIONS)).split(",")
    run(lambda: measure(asked), __doc__ or "")
