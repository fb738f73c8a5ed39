"""Seeded runs that go wrong in every way, and what 500 machines cost to look after.

`python benchmarks/orchestrator.py --json` tells as many stories as fit into half a minute; with
SEEDS=20000 the full number. With `--keep FILE` stories are kept there as they are told, and a call
that was ended goes on where it was: for one state of the code. Bars: nothing billing off record, no
cap passed, no wait past its deadline, the same story for the same seed; a reconcile of 500 machines
on five backends in a second of CPU, `paceline ls` with as many on record in half a second.
"""

import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bars import Bar, at_least, at_most, option, run

from paceline.rental.orchestrator import Orchestrator, RentRequest
from paceline.store.sqlite import SqliteStore
from paceline.system import system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.backend import ListingFakeBackend
from paceline.testing.simulator import Simulation, Story

_NUM_SEEDS = 800
_NUM_REPLAYS = 40
_NUM_MACHINES = 500
_NUM_BACKENDS = 5
_NUM_LS = 5


def measure(keep: str) -> Sequence[Bar]:
    """Tell stories, then count calls."""
    logging.disable(logging.CRITICAL)
    num_seeds = int(os.environ.get("SEEDS", _NUM_SEEDS))
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        stories = told(pool, num_seeds, Path(keep) if keep else None)
        again = list(pool.map(tell, range(_NUM_REPLAYS), chunksize=5))
    for story in stories:
        for problem in story.problems:
            print(f"seed {story.seed}: {problem}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        reconcile_s, ls_s = scale(Path(name))
    return [
        at_least("stories", len(stories), num_seeds),
        at_most("billing off record, or in the end", count(stories, "record", "end"), 0),
        at_most("runs that passed their cap", count(stories, "spent"), 0),
        at_most("waits past their deadline", count(stories, "took", "waited"), 0),
        at_most("stories with any problem", sum(bool(one.problems) for one in stories), 0),
        at_most("seeds that told another story", differing(stories, again), 0),
        at_least(
            "machines made, per story", sum(one.num_created for one in stories) / num_seeds, 2
        ),
        at_least("kills, per story", sum(one.num_crashes for one in stories) / num_seeds, 0.25),
        at_least("capped runs, per story", sum(one.is_capped for one in stories) / num_seeds, 0.01),
        at_most(f"CPU s to reconcile {_NUM_MACHINES} machines", reconcile_s, 1.0),
        at_most(f"s for paceline ls with {_NUM_MACHINES} machines", ls_s, 0.5),
    ]


def told(pool: ProcessPoolExecutor, num_seeds: int, keep: Path | None) -> list[Story]:
    """Return a story for every seed; those that were kept are not told again."""
    if keep is None:
        return list(pool.map(tell, range(num_seeds), chunksize=25))
    keep.touch()
    kept = {story.seed: story for story in map(_read, keep.read_text().splitlines())}
    missing = [seed for seed in range(num_seeds) if seed not in kept]
    with keep.open("a") as file:
        for story in pool.map(tell, missing, chunksize=25):
            file.write(json.dumps(asdict(story)) + "\n")
            file.flush()
            kept[story.seed] = story
    return [kept[seed] for seed in range(num_seeds)]


def _read(line: str) -> Story:
    fields = json.loads(line)
    return Story(**{**fields, "log": (), "problems": tuple(fields["problems"])})


def tell(seed: int) -> Story:
    """Return one story."""
    logging.disable(logging.CRITICAL)
    return Simulation(seed).run()


def count(stories: Sequence[Story], *words: str) -> int:
    """Return how many problems have one of these words."""
    return sum(
        any(word in problem for word in words) for one in stories for problem in one.problems
    )


def differing(stories: Sequence[Story], again: Sequence[Story]) -> int:
    """Return how many seeds were not told line by line as before."""
    return sum(one.digest != other.digest for one, other in zip(stories, again, strict=False))


def scale(state_dir: Path) -> tuple[float, float]:
    """Return CPU seconds of a reconcile, and the best wall time of ``paceline ls``."""
    store = SqliteStore(state_dir / "paceline.sqlite", clock=system_clock())
    clock = FakeClock(time_s=time.time())
    names = [f"cloud-{number}" for number in range(_NUM_BACKENDS)]
    backends = {name: ListingFakeBackend(clock=clock, name=name, boot_s=0.0) for name in names}
    nonces = itertools.count()
    rental = Orchestrator(
        store=store,
        backend=backends.__getitem__,
        clock=clock,
        nonce=lambda: f"{next(nonces):06x}",
        notify=lambda _name, _fields: None,
    )
    for number in range(_NUM_MACHINES):
        rental.rent(
            RentRequest(
                run_id=f"run-{number % 20}",
                role="rollout",
                index=number,
                gpu="g-1x",
                backends=(names[number % _NUM_BACKENDS],),
                min_disk_gb=1,
                max_dph=None,
                image="",
                ssh_pubkey_path=Path("k"),
            )
        )
    begun_s = time.process_time()
    rental.reconcile(backends=names)
    reconcile_s = time.process_time() - begun_s
    store.close()
    return reconcile_s, min(ls_once(state_dir) for _ in range(_NUM_LS))


def ls_once(state_dir: Path) -> float:
    """Return the wall time of one call, the start of Python included."""
    env = {**os.environ, "PACELINE_STATE_DIR": str(state_dir)}
    begun_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "ls"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    took_s = time.monotonic() - begun_s
    if len(done.stdout.splitlines()) != _NUM_MACHINES + 1:
        raise RuntimeError(f"ls shows {len(done.stdout.splitlines())} lines: {done.stderr}")
    return took_s


if __name__ == "__main__":
    run(partial(measure, option("--keep", "")), "the orchestrator under simulation, and at scale")
