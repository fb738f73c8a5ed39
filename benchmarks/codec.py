"""The delta codec against ModelExpress 0.7.0 and against the machine: bytes, speed, memory.

One 64 MiB bf16 tensor, Adam steps 100 -> 101. All contenders take turns on the same data; of
each the fastest turn counts. The peer runs in `.venv-peer` (`make peer`). One thread unless said.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from bars import Bar, at_least, at_most, run
from numba import njit
from snapshots import Snapshots, Words, entropy_given_exponent

from paceline.refit.apply import Checks, prove_live, stage_install, write_install
from paceline.refit.delta.codec import Tools, compose_tensors, encode_as
from paceline.refit.kernels.numba import compiled
from paceline.refit.kernels.registry import load_loops, process_tools
from paceline.refit.manifest.v1 import Scheme
from paceline.refit.model import TensorBuffer
from paceline.testing.payloads import delta_payload, tensor_entry

ROOT = Path(__file__).parents[1]
TURNS = 5
IN_A_ROW = 4
"""Within a turn, so that nobody pays for a processor that the one before left asleep."""
RATES = (1e-6, 3e-6, 1e-5)
FAST = Tools(loops=load_loops("numba"))
PLAIN = Tools(loops=load_loops("numpy"))

BYTES_FAST = (0.48, 0.49, 0.49)
BYTES_DENSE_LINK = (0.33, 0.36, 0.38)
BYTES_BOUND = (1.15, 1.15, 1.16)
ENCODE = (5, 3.5, 4)
APPLY = (4, 4, 4)
ENCODE_PLAIN = (1.7, 1.5, 1.5)


class Peer:
    """ModelExpress in a process of its own."""

    def __init__(self, folder: Path) -> None:
        python = ROOT / ".venv-peer" / "bin" / "python"
        if not python.exists():
            sys.exit("the peer is not installed; run: make peer")
        self._folder = folder
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("peer_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, *words: object) -> dict[str, float]:
        """Run one command and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def save(self, name: str, words: Words) -> Path:
        """Put a tensor where the peer can read it."""
        path = self._folder / f"{name}.npy"
        np.save(path, words)
        return path

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@njit(nogil=True)
def scan(old: Words, new: Words) -> int:
    """Count what differs: the least that any encoder has to do."""
    count = 0
    for at in range(0, len(old), 64):
        count += compiled.population(compiled.differs(old, new, at))
    return count


def told_of_threads(one: Callable[[], object], two: Callable[[], object]) -> None:
    """Tell what two threads cost more than one, in time that the processor worked for them.

    The bar is about time on the wall, which other processes take part of. What is shared between
    the two, such as memory, costs both; what is missing beyond that is waiting.
    """
    spent: list[tuple[float, float]] = []
    for _ in range(TURNS):
        marks = [time.process_time()]
        for work in (one, two):
            work()
            marks.append(time.process_time())
        spent.append((marks[1] - marks[0], marks[2] - marks[1]))
    alone, together = (min(turn) for turn in zip(*spent, strict=True))
    more = together / alone
    print(f"two threads take {more:.2f} x the processor time of one", file=sys.stderr)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of one turn."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Applying:
    """A receiver that goes from one version to the next, and back outside the clock."""

    def __init__(self, old: Words, new: Words) -> None:
        before, after = (buffer_of(words) for words in (old, new))
        self._manifest, payload = delta_payload({"w": before}, {"w": after}, chunk_bytes=4 * 2**20)
        self._objects = {self._manifest.objects[0].object_id: memoryview(payload)}
        self._base = {"w": tensor_entry(before)}
        self._old = old
        self._live = old.copy()
        self._buffers = {"w": buffer_of(self._live)}

    def __call__(self) -> float:
        """Apply once, every byte of the result proven; return the seconds."""
        self.go_back()
        return timed(self.apply)

    def go_back(self) -> None:
        """Be at the old version again."""
        self._live[:] = self._old

    def apply(self) -> None:
        """Prove the delta, write it, and hash every byte that is then there."""
        staged = stage_install(
            self._manifest,
            self._objects,
            live=self._buffers,
            aliases={},
            base=self._base,
            checks=Checks(whole=False, tools=FAST),
        )
        write_install(staged, tools=FAST, prove=True)
        rest = self._buffers.keys() - set(staged.changed_names)
        root = prove_live(self._buffers, staged.entries, only=rest)
        assert root == self._manifest.root_digest


def buffer_of(words: Words) -> TensorBuffer:
    """Wrap words as the one tensor of a model."""
    return TensorBuffer(
        name="w", dtype="BF16", shape=(len(words),), data=memoryview(words).cast("B")
    )


def encoder(scheme: Scheme, old: Words, new: Words, tools: Tools) -> Callable[[], bytes]:
    """Return the encoding of one step as a function of nothing."""
    before, after = buffer_of(old).data, buffer_of(new).data
    return lambda: bytes(encode_as(scheme, before, after, dtype="BF16", tools=tools))


def measure_rate(index: int, snapshots: Snapshots, peer: Peer) -> list[Bar]:
    """Return the bars of one learning rate."""
    rate = RATES[index]
    old, new = snapshots(rate, 100), snapshots(rate, 101)
    paths = [peer.save(f"{rate}-{name}", words) for name, words in (("old", old), ("new", new))]
    two = process_tools(2)
    contenders: dict[str, Callable[[], float]] = {
        "peer": lambda: peer.ask("encode", *paths)["seconds"],
        "peer apply": lambda: peer.ask("apply")["seconds"],
        "fast": lambda: timed(encoder(Scheme.GAP, old, new, FAST)),
        "two threads": lambda: timed(encoder(Scheme.GAP, old, new, two)),
        "numpy": lambda: timed(encoder(Scheme.GAP, old, new, PLAIN)),
        "apply": Applying(old, new),
        "scan": lambda: timed(lambda: scan(old, new)),
    }
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, turn in contenders.items():
            turns[name] += [turn() for _ in range(IN_A_ROW)]
    best = {name: min(seconds) for name, seconds in turns.items()}
    for name, seconds in best.items():
        print(f"{rate:g} {name}: {new.nbytes / seconds / 1e9:.2f} GB/s", file=sys.stderr)
    theirs = peer.ask("encode", *paths)["bytes"]
    fast, dense_link = (
        len(encoder(scheme, old, new, FAST)()) for scheme in (Scheme.GAP, Scheme.CLASSED)
    )
    at = f"at {rate:g}"
    bars = [
        at_most(f"bytes, fast / peer, {at}", fast / theirs, BYTES_FAST[index]),
        at_most(f"bytes, dense link / peer, {at}", dense_link / theirs, BYTES_DENSE_LINK[index]),
        at_most(
            f"bytes, dense link / entropy given exponent, {at}",
            dense_link / entropy_given_exponent(old, new),
            BYTES_BOUND[index],
        ),
        at_least(f"encode speed, fast / peer, {at}", best["peer"] / best["fast"], ENCODE[index]),
        at_least(
            f"apply + full verify speed, fast / peer, {at}",
            best["peer apply"] / best["apply"],
            APPLY[index],
        ),
        at_least(
            f"encode speed, numpy / peer, {at}",
            best["peer"] / best["numpy"],
            ENCODE_PLAIN[index],
        ),
    ]
    if index == 0:
        told_of_threads(*(encoder(Scheme.GAP, old, new, tools) for tools in (FAST, two)))
        bars += [
            at_least("fast encode / compiled scan, at 1e-06", best["scan"] / best["fast"], 0.30),
            at_least("two threads / one, at 1e-06", best["fast"] / best["two threads"], 1.8),
        ]
    return bars


def measure_steps(snapshots: Snapshots, peer: Peer) -> list[Bar]:
    """Return the bars of the first step, and of sixteen steps composed without the weights."""
    first = [peer.save(f"first{step}", snapshots(1e-6, step)) for step in (0, 1)]
    theirs = peer.ask("encode", *first)["bytes"]
    ours = len(encoder(Scheme.CLASSED, snapshots(1e-6, 0), snapshots(1e-6, 1), FAST)())
    states = [snapshots(1e-6, step) for step in range(100, 117)]
    deltas = [encoder(Scheme.GAP, *pair, FAST)() for pair in pairwise(states)]
    composed = deltas[0]
    for delta in deltas[1:]:
        found = compose_tensors(
            memoryview(composed), memoryview(delta), dtype="BF16", num_elements=len(states[0])
        )
        assert found is not None
        composed = bytes(found.data)
    assert composed == encoder(Scheme.GAP, states[0], states[-1], FAST)()
    return [
        at_most("bytes, first step, dense link / peer, at 1e-06", ours / theirs, 0.12),
        at_most(
            "bytes, 16 steps composed / their sum, at 1e-06",
            len(composed) / sum(map(len, deltas)),
            0.40,
        ),
    ]


def measure_memory(copies: int) -> list[Bar]:
    """Return peak memory beside a tensor of so many copies of the snapshot / the limit.

    The kernel's own high-water mark of this process, set back before each part.
    """
    snapshots = Snapshots({1e-6: [100, 101]})
    old, new = (np.tile(snapshots(1e-6, step), copies) for step in (100, 101))
    encoder(Scheme.GAP, old[:1000], new[:1000], FAST)()
    bars = []
    for scheme in (Scheme.GAP, Scheme.CLASSED):
        encode = encoder(scheme, old, new, FAST)
        extra, size = peak_of(encode)
        limit = 2 * size + 64 * 2**20
        bars.append(
            at_most(f"memory, encode {scheme.value}, {copies * 64} MiB / limit", extra / limit, 1)
        )
    Applying(old[:1000], new[:1000])()
    applying = Applying(old, new)
    extra, _ = peak_of(applying.apply)
    gap = len(encoder(Scheme.GAP, old, new, FAST)())
    limit = 2 * gap + 64 * 2**20
    bars.append(at_most(f"memory, apply, {copies * 64} MiB / limit", extra / limit, 1))
    return bars


def peak_of(work: Callable[[], object]) -> tuple[int, int]:
    """Return by how much memory rose over where it was, and the length of the result."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    result = work()
    return _status("VmHWM") - before, len(result) if isinstance(result, bytes) else 0


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field}: this measurement needs Linux")


def measure() -> Sequence[Bar]:
    """Measure everything, the data first."""
    wanted = {1e-6: [0, 1, *range(100, 117)], 3e-6: [100, 101], 1e-5: [100, 101]}
    snapshots = Snapshots(wanted)
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(Path(folder))
        bars = [bar for index in range(len(RATES)) for bar in measure_rate(index, snapshots, peer)]
        bars += measure_steps(snapshots, peer)
        peer.close()
    script = (
        "import codec, dataclasses, json; "
        "print(json.dumps([dataclasses.asdict(bar) for bar in codec.measure_memory(16)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return [*bars, *(Bar(**found) for found in json.loads(done.stdout.splitlines()[-1]))]


if __name__ == "__main__":
    run(measure, __doc__)
