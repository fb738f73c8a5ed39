"""What publishing costs a training loop: how long it stands, what it computes, what memory.

A model of 1 GiB in bf16 with sparse steps, COPY_TO_HOST, XOR_DELTA, over real sockets on loopback.
The copy that it is compared with is one memcpy of the same bytes between memory that is in use
already, in turns with the publishes. ``--mib 64`` for a small one.
"""

import ctypes
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from bars import Bar, at_least, at_most, option, run

from paceline.core.registry import load_entry
from paceline.refit.publisher import Publisher, PublisherOptions
from paceline.refit.trainers.registry import TRAINER_ENGINES
from paceline.refit.transports.registry import OBJECT_SERVERS
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.fakes.control import LoopbackControl

ROUNDS = 7
WARM = 3
"""Rounds in which memory is asked for, before those that count."""
ARENAS = 3
"""One is the base: the shadow. Two are staged: a capture, and the newest full version."""
TENSORS = 128


class Model(torch.nn.Module):
    """As many bf16 weights as asked for, in tensors of the size that layers have."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        rows = num_bytes // (2 * TENSORS * 1024)
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(
                torch.randn(rows, 1024, generator=generator).to(torch.bfloat16) * 0.02,
                requires_grad=False,
            )
            for _ in range(TENSORS)
        )

    def step(self, number: int) -> None:
        """Move one element in 97, each by one place of its dtype."""
        for index, weight in enumerate(self.layers):
            flat = weight.view(-1)[(number + index) % 97 :: 97]
            flat.add_(flat.abs() * 0.01)


@contextmanager
def publishing(model: Model) -> Iterator[Publisher]:
    """A started publisher of a model, over real sockets."""
    clock = system_clock()
    trainer = load_entry(TRAINER_ENGINES, "torch", port="trainer engine")(
        clock=clock, arenas=ARENAS
    )
    trainer.bind_tensors(model)
    with ExitStack() as parts:
        service = LoopbackControl(MemoryStore(clock=clock))
        parts.callback(service.stop)
        control = service.client()
        parts.callback(control.close)
        server = load_entry(OBJECT_SERVERS, "http", port="transport")(token=lambda: "t")
        parts.callback(server.close)
        options = PublisherOptions(
            model_name="m", run_id="bench", worker_id="t0", keep_old=0, anchor_every=4
        )
        publisher = Publisher(
            control=control, trainer=trainer, source=server, clock=clock, options=options
        )
        yield parts.enter_context(publisher)


def measure_stall(num_bytes: int) -> list[Bar]:
    """Return the stall of a publish, the one before being out."""
    model = Model(num_bytes)
    here, there = (np.ones(num_bytes, dtype=np.uint8) for _ in range(2))
    idle, copies = list[float](), list[float]()
    with publishing(model) as publisher:
        for number in range(WARM + ROUNDS):
            model.step(number)
            start = time.perf_counter()
            ctypes.memmove(there.ctypes.data, here.ctypes.data, num_bytes)
            copied = time.perf_counter()
            publication = publisher.publish(step=number)
            idle.append(time.perf_counter() - copied)
            copies.append(copied - start)
            behind = publication.result().publish_ms / 1000
    idle, copies = idle[WARM:], copies[WARM:]
    memcpy = statistics.median(copies)
    print(
        f"memcpy {memcpy:.3f} s ({num_bytes / memcpy / 1e9:.1f} GB/s), stall "
        f"{statistics.median(idle):.3f} s, all of a publish {behind:.3f} s",
        file=sys.stderr,
    )
    ratios = [stall / copy for stall, copy in zip(idle, copies, strict=True)]
    return [at_most("stall per publish / one memcpy", statistics.median(ratios), 1.3)]


def measure_bits(num_bytes: int) -> list[Bar]:
    """Compare steps that follow a publish at once with the same steps of a model without."""
    alone, published = Model(num_bytes), Model(num_bytes)
    roots = set()
    with publishing(published) as publisher:
        for number in range(4):
            alone.step(number)
            published.step(number)
            roots.add(publisher.publish(step=number))
            alone.step(100 + number)
            published.step(100 + number)
        versions = {each.result().root_digest for each in roots}
    same = all(
        torch.equal(one.view(torch.int16), two.view(torch.int16))
        for one, two in zip(alone.layers, published.layers, strict=True)
    )
    is_right = float(same and len(versions) == len(roots))
    return [at_least("a step right after publish is bit for bit that without", is_right, 1)]


def measure_memory(num_bytes: int) -> list[Bar]:
    """Return what publishing holds in steady state / ring and shadow."""
    model = Model(num_bytes)
    before = resident()
    with publishing(model) as publisher:
        for number in range(12):
            model.step(number)
            publisher.publish(step=number).result()
        ctypes.CDLL(None).malloc_trim(0)
        held = resident() - before
    print(f"held {held / num_bytes:.3f} x the weights", file=sys.stderr)
    name = "steady-state memory / (staged ring + one shadow)"
    return [at_most(name, held / (ARENAS * num_bytes), 1.05)]


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS: this measurement needs Linux")


SIZE = int(option("--mib", "1024")) * 2**20


def measure() -> Sequence[Bar]:
    """Measure all of it; memory first, before anything else has taken some."""
    publish_once(Model(TENSORS * 2048))
    bars = [*measure_memory(SIZE), *measure_stall(SIZE), *measure_bits(min(SIZE, 256 * 2**20))]
    return [*bars, *measure_ranks()]


def measure_ranks() -> Sequence[Bar]:
    """Return the bars of several ranks, which have a file of their own."""
    if find_spec("trainer_ranks") is None:
        return []
    found: Sequence[Bar] = import_module("trainer_ranks").measure()
    return found


def publish_once(model: Model) -> None:
    """Have everything imported and compiled."""
    with publishing(model) as publisher:
        for number in range(2):
            model.step(number)
            publisher.publish(step=number).result()


if __name__ == "__main__":
    run(measure, __doc__)
