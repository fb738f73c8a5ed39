"""Files for payloads are kept and used again, and are nobody's but the payload's meanwhile."""

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from paceline.refit.errors import NoRoomError, VerifyError
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.receiver.fetch import Fetcher, FetchLimits, FetchParts, spool_of
from paceline.refit.receiver.spool import SPARE_MAX, Spool, Spooled
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.testing.clock import FakeClock
from refit.conftest import SMALL_DISK_BYTES
from refit.receiver.test_fetch import payload, shard

SIZE = 2**20
KEEP_S = 60.0


class Disk:
    """A spool whose every payload is a file."""

    def __init__(self, folder: Path, *, keep_s: float = KEEP_S) -> None:
        self.clock = FakeClock()
        self.spool = Spool(memory_bytes_max=0, clock=self.clock, directory=folder, keep_s=keep_s)


def inode(spooled: Spooled) -> int:
    """Return which file it is."""
    assert spooled._fd is not None
    return os.fstat(spooled._fd).st_ino


def free_bytes(folder: Path) -> int:
    """Return the room that a disk has."""
    seen = os.statvfs(folder)
    return seen.f_bavail * seen.f_frsize


def test_a_file_is_used_again_once_nobody_has_a_view_of_it(tmp_path: Path) -> None:
    """A payload that is still read is not overwritten, through whichever view it is read."""
    disk = Disk(tmp_path)
    first = disk.spool.open(SIZE)
    first.write(0, memoryview(b"a" * SIZE))
    was = inode(first)
    reads = np.frombuffer(first.view.toreadonly()[10:20], dtype=np.uint8)
    del first
    second = disk.spool.open(SIZE)
    second.write(0, memoryview(b"b" * SIZE))
    assert inode(second) != was
    assert bytes(reads) == b"a" * 10
    del reads
    assert inode(disk.spool.open(SIZE)) == was


def test_files_grow_by_need(tmp_path: Path) -> None:
    """A larger payload goes into the same file, whole."""
    disk = Disk(tmp_path)
    was = inode(disk.spool.open(SIZE))
    larger = disk.spool.open(3 * SIZE)
    assert inode(larger) == was
    assert len(larger.view) == 3 * SIZE
    larger.write(3 * SIZE - 2, memoryview(b"zz"))
    larger.write(0, memoryview(b"yy"))
    assert bytes(larger.view[:2]) + bytes(larger.view[-2:]) == b"yyzz"


def test_a_payload_is_no_longer_than_it_says(tmp_path: Path) -> None:
    """A shorter one in the same file shows nothing of what was there behind it."""
    disk = Disk(tmp_path)
    was = inode(disk.spool.open(SIZE))
    shorter = disk.spool.open(SIZE // 2)
    assert inode(shorter) == was
    assert len(shorter.view) == SIZE // 2


def test_small_payloads_do_not_hold_a_large_file(small_disk: Path) -> None:
    """A run that goes on with deltas gives back the room of the full version before."""
    disk = Disk(small_disk)
    was = inode(disk.spool.open(SIZE))
    for _ in range(3):
        small = disk.spool.open(SIZE // SPARE_MAX - 1)
        assert inode(small) != was
        disk.clock.advance(KEEP_S / 2)
        del small
    disk.spool.trim()
    assert free_bytes(small_disk) > SMALL_DISK_BYTES - SIZE // 2


def test_idle_files_go_in_time(small_disk: Path) -> None:
    """A disk is not held for ever; not even for a moment where nothing is kept."""
    disk = Disk(small_disk)
    kept = disk.spool.open(SIZE)
    disk.clock.advance(10 * KEEP_S)
    disk.spool.trim()
    assert free_bytes(small_disk) == SMALL_DISK_BYTES - SIZE, "it is in use"
    del kept
    disk.spool.trim()
    disk.clock.advance(KEEP_S - 1)
    disk.spool.trim()
    assert free_bytes(small_disk) == SMALL_DISK_BYTES - SIZE
    disk.clock.advance(1)
    disk.spool.trim()
    assert free_bytes(small_disk) == SMALL_DISK_BYTES
    Disk(small_disk, keep_s=0).spool.open(SIZE)
    assert free_bytes(small_disk) == SMALL_DISK_BYTES


def test_kept_files_do_not_stand_in_the_way(small_disk: Path) -> None:
    """Where room is short, what is kept for later goes first."""
    disk = Disk(small_disk)
    small, large = disk.spool.open(SIZE // 8), disk.spool.open(2 * SIZE)
    del small, large
    filler = small_disk / "filler"
    filler.write_bytes(bytes(free_bytes(small_disk) - SIZE + SIZE // 16))
    whole = disk.spool.open(3 * SIZE)
    assert len(whole.view) == 3 * SIZE
    assert free_bytes(small_disk) < SIZE // 8
    with pytest.raises(NoRoomError, match="is full"):
        disk.spool.open(SIZE)


def test_a_spool_goes_with_its_files(small_disk: Path) -> None:
    """Nothing is left of it once the last payload goes."""
    disk = Disk(small_disk)
    view = disk.spool.open(SIZE).view
    disk.spool.open(SIZE)
    del disk
    gc.collect()
    assert free_bytes(small_disk) == SMALL_DISK_BYTES - SIZE
    del view
    assert free_bytes(small_disk) == SMALL_DISK_BYTES


def served(num_elements: int) -> tuple[Manifest, bytes, MemoryObjectServer]:
    manifest, data = payload(num_elements)
    source = MemoryObjectServer()
    source.serve_object(manifest.objects[0].object_id, [memoryview(data)])
    return manifest, data, source


def fetcher_in(folder: Path, *, window_bytes: int = 200_000) -> Fetcher:
    limits = FetchLimits(window_bytes=window_bytes, spool_dir=folder)
    return Fetcher(MemoryObjectReader(), FetchParts(clock=FakeClock(), limits=limits))


def fetch_with(fetcher: Fetcher, manifest: Manifest, endpoint: str) -> memoryview:
    found = fetcher.fetch_objects(manifest, [shard(endpoint)], bytes_max=2**30)
    return found[manifest.objects[0].object_id]


def test_versions_in_turn_into_kept_files(tmp_path: Path) -> None:
    """Each version is its own, while the one before is read."""
    fetcher = fetcher_in(tmp_path)
    before = memoryview(b"")
    expected = b""
    for num_elements in (300_000, 300_000, 250_001, 400_000, 300_000):
        manifest, data, source = served(num_elements)
        view = fetch_with(fetcher, manifest, source.endpoint)
        assert view == data
        assert before == expected
        before, expected = view, data
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_in_the_middle_keeps_the_version_before(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that is read stays whole, the new one is refused, and room lets it follow."""
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: os.ftruncate(fd, at + size))
    fetcher = fetcher_in(small_disk)
    manifest, data, source = served(600_000)
    view = fetch_with(fetcher, manifest, source.endpoint)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(free_bytes(small_disk) - SIZE // 2))
    with pytest.raises(NoRoomError, match="No space left"):
        fetch_with(fetcher, manifest, source.endpoint)
    assert view == data
    filler.unlink()
    again = fetch_with(fetcher, manifest, source.endpoint)
    assert again == data
    assert view == data


def test_two_fetches_at_once_have_a_file_each(tmp_path: Path) -> None:
    """Slots of one version share a spool and nothing else."""
    limits = FetchLimits(window_bytes=200_000, spool_dir=tmp_path)
    spool = spool_of(limits, FakeClock())
    cases = [served(300_000 + 7 * index) for index in range(3)]
    gate = threading.Barrier(len(cases), timeout=20)
    found: dict[int, bool] = {}

    def fetch(index: int) -> None:
        manifest, data, source = cases[index]
        parts = FetchParts(clock=FakeClock(), limits=limits, spool=spool)
        for _ in range(4):
            gate.wait()
            view = fetch_with(Fetcher(MemoryObjectReader(), parts), manifest, source.endpoint)
            gate.wait()
            found[index] = found.get(index, True) and view == data
            del view

    threads = [threading.Thread(target=fetch, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(len(cases)), True)


def test_a_fetch_that_fails_leaves_its_file_to_the_next(tmp_path: Path) -> None:
    """What a failed fetch left in a file is never seen, and its room is used again."""
    fetcher = fetcher_in(tmp_path)
    manifest, data, source = served(300_000)
    liar = MemoryObjectServer()
    liar.serve_object(manifest.objects[0].object_id, [memoryview(data[:-4] + b"lies")])
    with pytest.raises(VerifyError):
        fetch_with(fetcher, manifest, liar.endpoint)
    gc.collect()
    assert fetch_with(fetcher, manifest, source.endpoint) == data


KILLED = """
import sys
from pathlib import Path
from paceline.refit.receiver.spool import Spool
from paceline.system import system_clock
spool = Spool(
    memory_bytes_max=0, clock=system_clock(), directory=Path(sys.argv[1]), keep_s=600
)
spool.open(2**20)
held = spool.open(2**20)
print(len(held.view), flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_no_file(small_disk: Path) -> None:
    """Neither what it was filling nor what it kept takes room after it."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(small_disk)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{2**20}\n"
        assert free_bytes(small_disk) == SMALL_DISK_BYTES - SIZE
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert free_bytes(small_disk) == SMALL_DISK_BYTES
    assert list(small_disk.iterdir()) == []
