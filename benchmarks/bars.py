"""What every benchmark prints: bars with their limits, and the machine they were measured on."""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure and the limit it must keep."""

    name: str
    value: float
    limit: float
    ok: bool


def at_most(name: str, value: float, limit: float) -> Bar:
    """Return a bar that is kept while ``value`` does not exceed ``limit``."""
    return Bar(name=name, value=round(value, 4), limit=limit, ok=value <= limit)


def at_least(name: str, value: float, limit: float) -> Bar:
    """Return a bar that is kept while ``value`` reaches ``limit``."""
    return Bar(name=name, value=round(value, 4), limit=limit, ok=value >= limit)


def best_of_rounds(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return each way's seconds, the best of rounds in turn: others only slow us down."""
    best = dict.fromkeys(ways, math.inf)
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def note(text: str) -> None:
    """Say how far it is, where it does no harm."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """Return the facts that a reader needs to judge a figure."""
    return {
        "cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "processor": _processor(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def option(name: str, default: str) -> str:
    """Take an option of ours out of the command line; the rest is for ``run``."""
    if name not in sys.argv:
        return default
    at = sys.argv.index(name)
    value = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    return value


def run(measure: Callable[[], Sequence[Bar]], description: str) -> None:
    """Measure, print the bars as a table or as one JSON object last, exit 1 if one is missed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    wants_json = parser.parse_args().json
    bars = measure()
    if wants_json:
        print(json.dumps({"bars": [asdict(bar) for bar in bars], "machine": machine()}))
    else:
        for bar in bars:
            print(f"{'ok  ' if bar.ok else 'MISS'} {bar.name}: {bar.value} (limit {bar.limit})")
    sys.exit(0 if all(bar.ok for bar in bars) else 1)


def _processor() -> str:
    """Return the processor's own name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
