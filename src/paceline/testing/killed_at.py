"""``python -m paceline.testing.killed_at POINT WORDS...``: a paceline that dies at a named point.

It dies by SIGKILL, in the middle of a real command, when a function is about to be entered or has
just returned, perhaps not for the first time. Nothing of the command is changed for that: the
interpreter's own profiling tells.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FrameType

POINTS: Mapping[str, tuple[str, str]] = {
    "run-recorded": ("RunLedger.create", "return"),
    "intent-written": ("Ledger.add", "return"),
    "create-answered": ("*Backend.provision", "return"),
    "id-recorded": ("*Backend.wait_running", "call"),
    "machine-up": ("*Backend.wait_running", "return"),
    "secrets-written": ("write_kit", "return"),
    "set-up": ("bootstrap", "return"),
    "role-begun": ("Supervised.begin", "return"),
    "role-ended": ("Supervised.wait", "return"),
    "pulling": ("Fleet.pull", "call"),
    "destroying": ("*Backend.teardown", "call"),
    "destroyed-unrecorded": ("*Backend.teardown", "return"),
    "end-unrecorded": ("RunLedger.finish", "call"),
    "update-leased": ("Fetcher.fetch_manifest", "call"),
    "update-fetched": ("Fetcher.fetch_objects", "return"),
    "update-staged": ("stage_install", "return"),
    "update-in-write": ("_write_chunk", "return"),
    "update-written": ("write_install", "return"),
    "update-labelled": ("PassGate.at_safe_point", "return"),
    "update-following": ("SpareSet.follow", "call"),
    "update-proven": ("Installer.install", "return"),
    "workers-writing": ("WorkerWeights._push", "call"),
    "workers-written": ("WorkerWeights.apply", "return"),
    "workers-settled": ("WorkerWeights.settle", "return"),
}
"""Name of a point -> function, where a star stands for the provider, and whether the process dies
before its first line or after its last."""


def die_at(
    point: str, points: Mapping[str, tuple[str, str]] = POINTS
) -> Callable[[FrameType, str, object], None]:
    """Return a profile function that kills this process at ``point``, or ``point:n``, the n-th."""
    point, _, nth = point.partition(":")
    name, when = points[point]
    left = int(nth or 1)
    is_any = name.startswith("*")
    name = name.removeprefix("*")

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event != when:
            return
        found = frame.f_code.co_qualname
        if found == name or (is_any and found.endswith(name)):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    return profile


def main() -> None:
    """Run the command line until the point is reached."""
    point, *words = sys.argv[1:]
    if point.startswith("update-"):  # imports of that size take a minute with a profile
        import_module("paceline.refit.generators.transformers.engine")
    profile = die_at(point)
    threading.setprofile(profile)
    sys.setprofile(profile)
    from paceline.cli.main import main as paceline

    paceline(words)


if __name__ == "__main__":
    main()
