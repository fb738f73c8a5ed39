"""Weights in files: whenever the process dies, recovery leaves exactly one of the two versions."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.refit.delta.order import kind_of
from paceline.refit.errors import ApplyError, UncertainStateError
from paceline.refit.journal import FileJournal, recover
from paceline.refit.kernels.registry import load_loops
from paceline.refit.model import TensorBuffer
from paceline.testing.crash_victim import COUNT, tensors

VICTIM = "paceline.testing.crash_victim"
WRITES_MAX = 20
SEAL_BYTES = 45


def states() -> tuple[bytes, bytes]:
    random = np.random.default_rng(5)
    old = random.integers(0, 2**16, 3 * COUNT, dtype=np.uint16)
    new = old.copy()
    new[10:COUNT:40] += np.uint16(1)
    new[COUNT : 2 * COUNT] = random.integers(0, 2**16, COUNT, dtype=np.uint16)
    new[2 * COUNT + 5] ^= np.uint16(0x8000)
    return old.tobytes(), new.tobytes()


def test_killed_at_every_write(tmp_path: Path) -> None:
    """Half a journal record, half a chunk, before the flush: v or v+1, and recovery is final."""
    old, new = states()
    for name, data in (("old", old), ("new", new)):
        (tmp_path / name).write_bytes(data)
    outcomes = []
    for nth in range(1, WRITES_MAX):
        (tmp_path / "weights").write_bytes(old)
        died = subprocess.run(
            [sys.executable, "-m", VICTIM, tmp_path, str(nth)],
            check=False,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=60,
        ).returncode
        after = bytearray((tmp_path / "weights").read_bytes())
        recovered = recover(tmp_path / "journal", tensors(memoryview(after)), flush=lambda: None)
        assert bytes(after) in {old, new}, nth
        assert not recovered or bytes(after) == old
        assert not recover(tmp_path / "journal", {}, flush=lambda: None)
        outcomes.append((died, recovered, bytes(after) == new))
        if died == 0:
            break
    assert outcomes[-1] == (0, False, True)
    assert (9, True, False) in outcomes
    assert (9, False, False) in outcomes


def journal_of(path: Path, *, name: str = "a", width: int = 2, at: int = 3) -> None:
    """A complete journal of one change."""
    words = np.zeros(10, dtype=f"<u{width}")
    new = words.copy()
    new[at] = 1
    dtype = {1: "U8", 2: "U16"}[width]
    kind = kind_of(dtype)
    live = {name: TensorBuffer(name=name, dtype=dtype, shape=(10,), data=words.data.cast("B"))}
    journal = FileJournal(path, live=live, flush=lambda: None)
    steps = load_loops("numpy").diff(words, new, kind, first=0, most=10)
    journal.keep(name, 0, steps, words[at : at + 1])
    journal.seal()


def test_journals_of_other_weights_are_refused(tmp_path: Path) -> None:
    """A journal that names other tensors writes nothing and stays."""
    data = memoryview(bytearray(b"\1" * 8))
    live = {"a": TensorBuffer(name="a", dtype="U16", shape=(4,), data=data)}
    for i, more in enumerate(({"name": "z"}, {"width": 1}, {"at": 4})):
        path = tmp_path / str(i)
        journal_of(path, **more)  # type: ignore[arg-type]
        with pytest.raises(UncertainStateError):
            recover(path, live, flush=lambda: None)
        assert path.exists()
    assert bytes(data) == b"\1" * 8


def four_words() -> tuple[dict[str, TensorBuffer], memoryview]:
    """What ``journal_of`` has kept the fourth word of, once that was overwritten."""
    data = memoryview(bytearray(6) + bytearray(b"\1\1"))
    return {"a": TensorBuffer(name="a", dtype="U16", shape=(4,), data=data)}, data


def test_cut_journals_were_never_sealed(tmp_path: Path) -> None:
    """Cut anywhere, or with pages that never reached the disk: nothing was written or put back."""
    whole = tmp_path / "whole"
    journal_of(whole)
    content = whole.read_bytes()
    live, data = four_words()
    for damaged in (*(content[:size] for size in range(len(content))), bytes(len(content))):
        path = tmp_path / "cut"
        path.write_bytes(damaged)
        assert not recover(path, live, flush=lambda: None)
        assert not path.exists()
    assert bytes(data) == bytes(6) + b"\1\1"
    assert recover(whole, live, flush=lambda: None)
    assert bytes(data) == bytes(8)


def test_damage_behind_a_seal_is_not_taken_for_no_seal(tmp_path: Path) -> None:
    """Words were written under a seal: a journal that rots is refused and stays."""
    path = tmp_path / "journal"
    journal_of(path)
    content = path.read_bytes()
    seal = content[-SEAL_BYTES:]
    live, data = four_words()
    for bit in range(8 * (len(content) - len(seal))):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(UncertainStateError):
            recover(path, live, flush=lambda: None)
        assert path.read_bytes() == damaged
    wild = bytearray(content)
    struct.pack_into("<Q", wild, 16 + 13, 2**60)
    path.write_bytes(wild)
    with pytest.raises(UncertainStateError, match="damaged"):
        recover(path, live, flush=lambda: None)
    assert bytes(data) == bytes(6) + b"\1\1"


def test_weights_put_there_anew_are_not_written_to(tmp_path: Path) -> None:
    """After a crash somebody copies other weights of the same shape over: they stay as they are."""
    journal_of(tmp_path / "journal")
    live, data = four_words()
    data[2] = 7
    with pytest.raises(UncertainStateError, match="not the tensor"):
        recover(tmp_path / "journal", live, flush=lambda: None)
    assert bytes(data) == b"\0\0\7\0\0\0\1\1"


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    """No room for a journal is an error of ours; weights that cannot be made safe keep theirs."""
    with pytest.raises(ApplyError, match="no journal"):
        FileJournal(tmp_path / "missing" / "journal", live={}, flush=lambda: None)
    journal_of(tmp_path / "journal")
    live, _ = four_words()

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(UncertainStateError, match="Input/output"):
        recover(tmp_path / "journal", live, flush=refuse)
    assert recover(tmp_path / "journal", live, flush=lambda: None)


def test_a_journal_is_never_overwritten(tmp_path: Path) -> None:
    """Starting an install over a journal that nobody recovered from is refused."""
    journal_of(tmp_path / "journal")
    with pytest.raises(FileExistsError):
        FileJournal(tmp_path / "journal", live={}, flush=lambda: None)
