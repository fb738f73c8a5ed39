"""The arithmetic example as a measurement: one whole run, and one in which an engine is killed.

Takes about three minutes. The second run measures the longest time between two steps from the
kill on; how long the steps take otherwise is in the first.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from bars import Bar, at_least, at_most, run

JOB = Path(__file__).parents[1] / "examples" / "arithmetic" / "local.yaml"
RUN_S_MAX = 600
WALL_S_MAX = 180
KILL_AT_STEP = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run printed and wrote."""

    report: dict[str, Any]
    steps: dict[int, float]
    """Step -> seconds since the start at which it was told."""
    exit_status: int


def run_example(on_step: Callable[[str, int], None] = lambda run_id, step: None) -> Measured:
    """Run the whole example; ``on_step`` is called with the run's id after every step."""
    run_id = f"bench-{time.time_ns():x}"
    steps: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        command = [sys.executable, "-m", "paceline", "up", str(JOB), "--yes", "--json"]
        command += ["--run-id", run_id, "--out", str(out)]
        with (
            (Path(directory) / "stdout").open("w") as stdout,
            subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True) as process,
        ):
            begun = time.monotonic()
            for line in process.stderr or ():
                sys.stderr.write(line)
                words = line.split()
                if words[:1] == ["step"]:
                    steps[int(words[1])] = time.monotonic() - begun
                    on_step(run_id, int(words[1]))
            status = process.wait(RUN_S_MAX)
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return Measured(report=report, steps=steps, exit_status=status)


def kill_engine(run_id: str, index: int) -> None:
    """SIGKILL the serving process of one rollout."""
    wanted = {"PACELINE_RUN_ID": run_id, "PACELINE_ROLE": "rollout", "PACELINE_INDEX": str(index)}
    for process in psutil.process_iter():
        try:
            is_ours = wanted.items() <= process.environ().items()
            if is_ours and "serve" in process.cmdline():
                process.send_signal(signal.SIGKILL)
                return
        except psutil.Error:  # ended, or another user's
            continue
    raise RuntimeError(f"no engine {index} of {run_id} runs")


def longest_gap(steps: dict[int, float], *, since: int) -> float:
    """Return the longest time between two steps that were told, from step ``since`` on."""
    told = [at for step, at in sorted(steps.items()) if step >= since]
    return max(after - before for before, after in pairwise(told))


def num_roots(report: dict[str, Any]) -> int:
    """Return how many root digests trainer and engines ended with: one, if all is well."""
    return len({end["root_digest"] for end in (report["trainer"], *report["engines"])})


def installed_everywhere(report: dict[str, Any]) -> int:
    """Return how many versions every engine of the end installed."""
    engines = {engine["worker_id"] for engine in report["engines"]}
    return sum(
        engines <= {install["worker_id"] for install in version["installs"]}
        for version in report["versions"]
    )


def measure() -> Sequence[Bar]:
    """Hold two whole runs against the promises of the README."""

    def kill_once(run_id: str, step: int) -> None:
        if step == KILL_AT_STEP:
            kill_engine(run_id, index=1)

    whole, hurt = run_example(), run_example(kill_once)
    report = whole.report
    share = report["delta_bytes"] / max(1, report["full_bytes"])
    largest = max(
        version["payload_bytes"] / version["full_bytes"]
        for version in report["versions"]
        if version["payload_format"] == "XOR_DELTA"
    )
    gain = report["reward_last5"] - report["reward_first5"]
    worst_mismatches = max(report["mismatches"], hurt.report["mismatches"])
    return [
        at_least("reward, last 5 - first 5", gain, 0.15),
        at_least("versions published", report["versions_published"], 20),
        at_least("versions installed by every engine", installed_everywhere(report), 20),
        at_most("digest mismatches", worst_mismatches, 0),
        at_most("different roots at the end", num_roots(report), 1),
        at_most("delta bytes / full tensors", share, 0.10),
        at_most("largest delta / full tensors", largest, 0.10),
        at_most("wall, s", report["wall_s"], WALL_S_MAX),
        at_most("longest gap between steps, s", longest_gap(whole.steps, since=1), 10),
        at_most(
            "longest gap after an engine was killed, s",
            longest_gap(hurt.steps, since=KILL_AT_STEP),
            10,
        ),
        at_most("different roots at the end, an engine killed", num_roots(hurt.report), 1),
        at_most("worst exit status", max(whole.exit_status, hurt.exit_status), 0),
    ]


if __name__ == "__main__":
    run(measure, __doc__)
