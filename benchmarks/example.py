"""The arithmetic example as a measurement: bytes, reward, digests, wall time of one whole run."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bars import Bar, at_least, at_most, run

JOB = Path(__file__).parents[1] / "examples" / "arithmetic" / "local.yaml"
WALL_S_MAX = 180


def measure() -> Sequence[Bar]:
    """Run the example once and hold its report against the promises of the README."""
    command = [sys.executable, "-m", "paceline", "up", str(JOB), "--yes", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    report = json.loads(done.stdout.splitlines()[-1])
    deltas = report["versions_published"] - 1
    roots = {engine["root_digest"] for engine in report["engines"]}
    return [
        at_most(
            "delta bytes / full tensors", report["delta_bytes"] / max(1, report["full_bytes"]), 0.10
        ),
        at_least(
            "reward, last 5 - first 5", report["reward_last5"] - report["reward_first5"], 0.15
        ),
        at_least("versions published", deltas + 1, 20),
        at_most("digest mismatches", report["mismatches"], 0),
        at_most("different roots at the end", len(roots | {report["trainer"]["root_digest"]}), 1),
        at_most("wall, s", report["wall_s"], WALL_S_MAX),
    ]


if __name__ == "__main__":
    run(measure, __doc__)
