"""Hundreds of versions through a loaded engine: memory stays flat, and every sample is right."""

import threading
from pathlib import Path

import psutil
import pytest

from paceline.refit.generators.protocol import Sampling
from paceline.system import environ, system_clock
from paceline.testing.tiny_model import write_tiny_qwen3
from refit.generators.refitting import Follower, MemoryRun

SOAK_S = float(environ().get("PACELINE_SOAK_S", "60"))
SETTLED_AFTER = 50
"""Versions after which caches and allocators have what they keep."""
GROWTH_MAX = 1.1
ANCHOR_EVERY = 8


class Load:
    """Threads that ask one engine each, without a pause, and look at every answer."""

    def __init__(self, followers: list[Follower]) -> None:
        self.problems: list[BaseException] = []
        self.num_answers = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in followers]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, follower: Follower) -> None:
        try:
            while not self._stop.is_set():
                found = follower.generate([10, 20, 30], Sampling(max_tokens=20, n=2, seed=1))
                for choice in found.choices:
                    sequences = [span.installed.sequence for span in choice.spans]
                    assert sequences == sorted(sequences)
                    assert choice.spans[-1].end == len(choice.token_ids)
                self.num_answers += 1
        except BaseException as exc:  # noqa: BLE001 - the test tells of it
            self.problems.append(exc)


def advance(run: MemoryRun, followers: list[Follower]) -> None:
    """Publish the next version, have every engine install it, and forget an old one."""
    uid = run.publish(is_full=run.sequence % ANCHOR_EVERY == 0)
    for follower in followers:
        follower.settle()
        installed = follower.gate.installed()
        assert installed is not None
        assert installed.version_id == uid
    if run.sequence >= 2 * ANCHOR_EVERY:
        run.retire(f"v{run.sequence - 2 * ANCHOR_EVERY}")
        run.ledger.reap()
    run.model.step()


@pytest.mark.slow
@pytest.mark.timeout(2 * SOAK_S + 600)
def test_soak(tmp_path: Path) -> None:
    """Under load, version after version, nothing grows and no digest is ever wrong."""
    clock, process = system_clock(), psutil.Process()
    run = MemoryRun(write_tiny_qwen3(tmp_path / "model"))
    followers = [Follower(run, f"g-{at}") for at in range(2)]
    advance(run, followers)
    load = Load(followers)
    deadline, settled = clock.monotonic() + SOAK_S, 0
    while clock.monotonic() < deadline and not load.problems:
        advance(run, followers)
        if run.sequence == SETTLED_AFTER:
            settled = process.memory_info().rss
    load.stop()
    refusals = [each.receiver.figures()["refusals"] for each in followers]
    for follower in followers:
        follower.close()
    assert load.problems == []
    assert load.num_answers > 0
    assert refusals == [0, 0]
    assert run.sequence > SETTLED_AFTER
    assert process.memory_info().rss < GROWTH_MAX * settled
