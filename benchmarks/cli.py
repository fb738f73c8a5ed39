"""How long the command line takes to say what it can do."""

import subprocess
import sys
import time
from collections.abc import Sequence

from bars import Bar, at_most, run

TRIES = 9


def best_ms(command: list[str]) -> float:
    """Return the fastest of several whole-process runs, in milliseconds."""
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append((time.perf_counter() - start) * 1000)
    return min(times)


def measure() -> Sequence[Bar]:
    """Time ``--help`` as a process of its own, and beside an interpreter that does nothing."""
    help_ms = best_ms([sys.executable, "-m", "paceline", "--help"])
    bare_ms = best_ms([sys.executable, "-c", "pass"])
    return [
        at_most("paceline --help, ms", help_ms, 200),
        at_most("paceline --help / bare interpreter", help_ms / bare_ms, 12),
    ]


if __name__ == "__main__":
    run(measure, __doc__)
