"""How fast a tree reaches a machine over a real sshd, beside plain ``rsync -a`` by the same ssh."""

import os
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bars import Bar, at_least, at_most, run

from paceline.rental.remote.argv import ssh_words
from paceline.rental.remote.local import usable_rsync
from paceline.rental.remote.protocol import SshTarget
from paceline.rental.remote.shell import ShellParts, ShellRemote
from paceline.rental.remote.ssh import ssh_remote
from paceline.system import system_clock
from paceline.testing.fakes.machine import FakeMachine, make_key_pair

NUM_FILES = 10_000
NUM_DIRECTORIES = 100
FILE_BYTES = 1_000_000_000
BLOCK_BYTES = 1 << 20
TRIES = 3
TRIES_UNCHANGED = 5


def make_trees(root: Path) -> tuple[Path, Path]:
    """Make a tree of many small files and one of a single large file, both incompressible."""
    small, large = root / "small", root / "large"
    for directory in range(NUM_DIRECTORIES):
        (small / f"d{directory}").mkdir(parents=True)
        for file in range(NUM_FILES // NUM_DIRECTORIES):
            (small / f"d{directory}" / f"f{file}").write_bytes(os.urandom(1500))
    large.mkdir()
    with (large / "weights").open("wb") as out:
        for _ in range(FILE_BYTES // BLOCK_BYTES):
            out.write(os.urandom(BLOCK_BYTES))
    return small, large


def seconds(act: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def plain(target: SshTarget, control: Path, src: Path, dst: str) -> None:
    """Copy as a user would, over a shared connection that is open already, as ours is."""
    shell = shlex.join(ssh_words(target, control_path=control, connect_timeout_s=10))
    argv = ["rsync", "-a", "-e", shell, f"{src}/", f"{target.host}:{dst}/"]
    subprocess.run(argv, check=True)


def compare(
    remote: ShellRemote, machine: FakeMachine, by_rsync: Callable[[Path, str], None], src: Path
) -> tuple[float, float]:
    """Return how much of plain rsync's speed ours has at first, and its share of time again."""

    def ours() -> None:
        remote.push(src, "ours", includes=(), excludes=(), delete=False)

    def theirs() -> None:
        by_rsync(src, "theirs")

    first: dict[str, list[float]] = {"ours": [], "theirs": []}
    acts = {"ours": ours, "theirs": theirs}
    for turn in range(TRIES):
        # The order changes, since the second finds the disk busy with writing the first.
        for name in sorted(acts, reverse=bool(turn % 2)):
            shutil.rmtree(machine.home / name, ignore_errors=True)
            first[name].append(seconds(acts[name]))
    again: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(TRIES_UNCHANGED):
        for name, act in acts.items():
            again[name].append(seconds(act))
    for name in acts:
        shutil.rmtree(machine.home / name)
    return (
        min(first["theirs"]) / min(first["ours"]),
        statistics.median(again["ours"]) / statistics.median(again["theirs"]),
    )


def measure() -> Sequence[Bar]:
    """Copy both trees by both ways, in turns, and once more unchanged."""
    with tempfile.TemporaryDirectory(prefix="pl-sync-") as scratch:
        root = Path(scratch)
        key = make_key_pair(root / "key")
        small, large = make_trees(root)
        machine = FakeMachine(root / "m", authorized_keys=[key])
        machine.start()
        target = SshTarget(
            name="bench",
            host=machine.host,
            port=machine.port,
            user=machine.user,
            known_hosts=root / "known_hosts",
            identity=root / "key",
        )
        parts = ShellParts(clock=system_clock(), rsync=usable_rsync())
        remote = ssh_remote(target, machine_id="bench", parts=parts, control_dir=root / "c")
        bars: list[Bar] = []
        try:
            for name, src in (("10,000 files", small), ("1 GB file", large)):
                speed, again = compare(
                    remote, machine, lambda s, d: plain(target, root / "c" / "plain", s, d), src
                )
                bars += [
                    at_least(f"sync_to of {name}, speed / rsync -a", speed, 0.9),
                    at_most(f"sync_to of {name} unchanged, time / rsync -a", again, 1.2),
                ]
        finally:
            remote.disconnect()
            machine.stop()
    return bars


if __name__ == "__main__":
    run(measure, __doc__)
