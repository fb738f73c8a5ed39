"""Publishing by several ranks: what it costs each of them, and how soon they know that one is gone.

Two cores cannot run four ranks at once, so ranks take turns: one stages, the others sleep, and each
has one core, alone or not. What is measured is staging in the steady state: copy, hash, encode. A
rank's time is the median of its rounds without the time in which its thread could have run while
others had the core: that is what a busy machine adds, and no two ranks alike. The slowest rank
counts. Processor time is beside it, and the plain ratio is told on the way.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bars import Bar, at_most, note, option, run

from paceline.core.waiting import wait_until
from paceline.refit.model import VersionState
from paceline.store.memory import MemoryStore
from paceline.system import environ, system_clock
from paceline.testing.fakes.control import LoopbackControl
from paceline.testing.ranks import run_environment, start_ranks

RANKS = 4
JOB = Path(__file__).parent / "ranks" / "staging.py"
MEBIBYTES = int(option("--mib", "512"))
KILLS = int(option("--kills", "1"))
VICTIM = 2


def measure() -> Sequence[Bar]:
    """Measure both; ``--kills 0`` leaves the second out."""
    return [*staging_bars(), *(killed_bars() if KILLS else ())]


def staging_bars() -> Sequence[Bar]:
    """Compare a rank of four with a quarter of one that has everything."""
    alone, ranks = staged(1)[0], staged(RANKS)
    bars = []
    for kind in ("full", "delta"):
        own, processor, every = (
            max(each[kind][index] for each in ranks) / (alone[kind][index] / RANKS)
            for index in range(3)
        )
        what = f"of a rank, of 1/{RANKS} of one alone"
        bars.append(at_most(f"{kind}: time {what}", own, 1.25))
        bars.append(at_most(f"{kind}: processor time {what}", processor, 1.25))
        note(f"{kind}: time with what others took {what}: {every:.2f}")
    return bars


def staged(world: int) -> list[dict[str, list[float]]]:
    """Run the job and return what each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        argv += [f"--nproc-per-node={world}", str(JOB), folder, str(MEBIBYTES)]
        settings = {**environ(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(argv, check=True, env=settings, stdout=sys.stderr, timeout=600)
        return [json.loads((Path(folder) / f"{world}-{r}.json").read_text()) for r in range(world)]


def killed_bars() -> Sequence[Bar]:
    """Kill a rank that the others wait for; the slowest to know counts."""
    known_s, restarted = [], 0
    for _ in range(KILLS):
        with tempfile.TemporaryDirectory() as folder:
            seconds, is_ready = killed(Path(folder))
            known_s.append(seconds)
            restarted += is_ready
    return [
        at_most("seconds until every other rank knows that one was killed", max(known_s), 5.0),
        at_most("next versions that did not come after the restart", KILLS - restarted, 0),
    ]


def killed(folder: Path) -> tuple[float, bool]:
    """Return how long the others took, and whether the version after the restart was READY."""
    clock = system_clock()
    control = LoopbackControl(MemoryStore(clock=clock))
    settings = run_environment(folder, control)
    others = [rank for rank in range(RANKS) if rank != VICTIM]
    with start_ranks(folder, settings, ranks=RANKS, incarnation="1") as ranks:
        ranks.go(0, *range(RANKS))
        ranks.ended(0, *range(RANKS))
        ranks.go(1, *others)
        wait_until(
            lambda: len(shards_of(control, "run-000001")) == len(others),
            what="all slots but one",
            clock=clock,
            timeout_s=60,
            interval_s=0.02,
        )
        ranks.kill(VICTIM)
        began = clock.monotonic()
        ended = ranks.ended(1, *others)
        seconds = max(float(str(each["at_s"])) for each in ended.values()) - began
        assert all("error" in each for each in ended.values()), ended
    with start_ranks(folder, settings, ranks=RANKS, incarnation="2") as ranks:
        ranks.go(0, *range(RANKS))
        found = {str(each.get("version")) for each in ranks.ended(0, *range(RANKS)).values()}
    states = {version.uid: version.state for version in control.ledger.list_versions("m")}
    control.stop()
    return seconds, len(found) == 1 and states.get(found.pop()) is VersionState.READY


def shards_of(control: LoopbackControl, uid: str) -> Sequence[object]:
    """Return the shards of a version; none before it is there."""
    known = {version.uid for version in control.ledger.list_versions("m")}
    return control.ledger.list_shards(uid) if uid in known else []


if __name__ == "__main__":
    run(measure, "publishing by several ranks of a trainer")
