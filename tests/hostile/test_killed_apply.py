"""``versions apply`` in real processes that are killed, starved of disk, or not alone.

Versions are composed, dense, quantised and canonical. Whatever happens, a checkpoint is one of
the two versions, or the next call makes it so.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from paceline.core.waiting import wait_until
from paceline.refit.delta.canonical import FullTensor, render_full_shard
from paceline.refit.delta.order import Words
from paceline.refit.inspection import (
    apply_version,
    compose_versions,
    make_delta,
    read_checkpoint,
    read_version,
    write_canonical,
    write_version,
)
from paceline.refit.kernels.registry import process_tools
from paceline.system import environ, system_clock

IS_NIGHT = environ().get("HYPOTHESIS_PROFILE") == "nightly"
KILLS = 60 if IS_NIGHT else 1
MIB = 2**20
ENV = {**environ(), "PYTHONPATH": os.pathsep.join(sys.path)}
"""Of the child; what is compiled is found where this process keeps it."""


def states(folder: Path, *, size: int = 4 * MIB) -> list[Path]:
    """Three states of a checkpoint: few steps, new codes and scales, and a tensor made anew."""
    source = np.random.default_rng(3)
    words: dict[str, tuple[str, Words]] = {
        "steps": ("BF16", source.integers(0x3C00, 0x3D00, size // 2, dtype=np.uint16)),
        "dense": ("BF16", source.integers(0, 2**16, size // 2, dtype=np.uint16)),
        "codes": ("F8_E4M3", source.integers(0, 120, size, dtype=np.uint8)),
        "codes_scale_inv": ("F32", source.random(64, dtype=np.float32).view(np.uint32)),
        "still": ("I64", source.integers(0, 9, 100).view(np.uint64)),
    }
    found = []
    for at in range(3):
        path = folder / f"v{at}.safetensors"
        tensors = {
            name: FullTensor(dtype=dtype, shape=(len(each),), data=each.tobytes())
            for name, (dtype, each) in words.items()
        }
        path.write_bytes(without_checksums(render_full_shard(tensors)))
        found.append(path)
        words["steps"][1][at :: 50 + at] += np.uint16(1)
        words["codes"][1][at::300] += np.uint8(3)
        words["codes_scale_inv"][1][at] ^= np.uint32(8)
        words["dense"][1][:] = source.integers(0, 2**16, size // 2, dtype=np.uint16)
    return found


def without_checksums(shard: bytes) -> bytes:
    """Return the file as others write it: checksums forbid to change tensors in place."""
    length = int.from_bytes(shard[:8], "little")
    header = shard[8 : 8 + length]
    start, stop = header.index(b'"__metadata__"'), header.index(b"},") + 2
    cleaned = (header[:start] + header[stop:]).ljust(length)
    return shard[:8] + cleaned + shard[8 + length :]


def composed(folder: Path, files: list[Path]) -> tuple[Path, Path, Path]:
    """From the first state to the third, in one delta that was made of two."""
    tools = process_tools()
    v0, v1, v2 = map(read_checkpoint, files)
    for each in (v0, v1, v2):  # full words do not compose; the others change in both
        each.pop("dense")
    files = [without(path, "dense", folder / f"c{path.name}") for path in files]
    pair = [make_delta(a, b, slot_id="s", tools=tools) for a, b in ((v0, v1), (v1, v2))]
    write_version(folder / "composed", compose_versions(*pair))
    return folder / "composed", files[0], files[2]


def without(path: Path, name: str, into: Path) -> Path:
    """Copy a checkpoint without one tensor."""
    kept = {
        each.name: FullTensor(dtype=each.dtype, shape=each.shape, data=each.data)
        for each in read_checkpoint(path).values()
        if each.name != name
    }
    into.write_bytes(without_checksums(render_full_shard(kept)))
    return into


def mixed(folder: Path, files: list[Path]) -> tuple[Path, Path, Path]:
    """Steps, full words, codes and scales in one delta of ours."""
    base, new = map(read_checkpoint, files[:2])
    write_version(folder / "mixed", make_delta(base, new, slot_id="s", tools=process_tools()))
    return folder / "mixed", files[0], files[1]


def canonical(folder: Path, files: list[Path]) -> tuple[Path, Path, Path]:
    """The same as stock receivers read it."""
    base, new = map(read_checkpoint, files[:2])
    write_canonical(folder / "canonical", base, new, version="b", base_version="a")
    return folder / "canonical", files[0], files[1]


def start(version: Path, checkpoint: Path, *before: str) -> "subprocess.Popen[bytes]":
    """Begin to apply."""
    run = "from paceline.__main__ import main; raise SystemExit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join((*before, run)), "versions", "apply", version, checkpoint],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def has_begun(process: "subprocess.Popen[bytes]", journal: Path) -> bool:
    """Say whether there is a journal, or will be none any more."""
    return journal.exists() or process.poll() is not None


Make = Callable[[Path, list[Path]], tuple[Path, Path, Path]]


@pytest.mark.parametrize(
    "make",
    [mixed, *(pytest.param(make, marks=pytest.mark.slow) for make in (composed, canonical))],
)
def test_killed_while_it_writes(tmp_path: Path, make: Make) -> None:
    """Killed at any moment after the journal appeared: the next call ends with the new version."""
    version, old, new = make(tmp_path, states(tmp_path))
    before, after = old.read_bytes(), new.read_bytes()
    chance, clock = np.random.default_rng(7), system_clock()
    for at in range(KILLS):
        target = tmp_path / f"target{at}.safetensors"
        target.write_bytes(before)
        journal = tmp_path / f".target{at}.paceline-undo"
        with start(version, target) as process:
            wait_until(
                partial(has_begun, process, journal),
                what="a journal",
                timeout_s=60,
                interval_s=0.0002,
                clock=clock,
            )
            clock.sleep(chance.random() * 0.02)
            process.kill()
        if target.read_bytes() != after or journal.exists():
            with start(version, target) as process:
                assert process.wait(60) == 0, process.stdout
        assert target.read_bytes() == after
        assert not journal.exists()
        target.unlink()


LITTLE_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
"""


def test_no_room_for_the_journal(tmp_path: Path) -> None:
    """The kernel does not let the journal grow: an error that says so, nothing has changed."""
    version, old, _ = mixed(tmp_path, states(tmp_path))
    before = old.read_bytes()
    for size in (0, 16, MIB) if IS_NIGHT else (MIB,):
        with start(version, old, LITTLE_DISK.format(size=size)) as process:
            assert process.wait(60) != 0
            assert process.stdout is not None
            said = process.stdout.read().decode()
        assert "Traceback" not in said
        assert "File too large" in said
        assert old.read_bytes() == before
        assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_two_at_one_checkpoint(tmp_path: Path) -> None:
    """Both start at once; one writes, the other is refused, by the lock or by the base."""
    version, old, new = mixed(tmp_path, states(tmp_path))
    after = new.read_bytes()
    pair = [start(version, old) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].decode() for process in pair]
    assert sorted(process.returncode == 0 for process in pair) == [False, True], said
    assert old.read_bytes() == after
    assert not list(tmp_path.glob(".*"))
    assert any(word in text for text in said for word in ("another process", "applies to"))


def test_a_checkpoint_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """While one applies, a second one neither takes back nor writes."""
    files = states(tmp_path, size=1000)
    version, old, new = mixed(tmp_path, files)
    refusals = itertools.count()

    def read(base: object) -> object:
        with start(version, old) as second:
            assert second.wait(60) != 0
            assert second.stdout is not None
            assert "another process" in second.stdout.read().decode()
        next(refusals)
        return read_version(version)

    apply_version(read, old, tools=process_tools())  # type: ignore[arg-type]
    assert next(refusals) == 1
    assert old.read_bytes() == new.read_bytes()
