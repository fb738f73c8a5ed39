"""The embedded store keeps the contract, across processes, kills, full disks and damage."""

import itertools
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paceline.core.clock import Clock
from paceline.store.protocol import StoreError
from paceline.store.sqlite import SqliteStore
from paceline.system import environ
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.store import StoreContract

_SRC = str(Path(__file__).parents[2] / "src")


class TestSqliteStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self._paths = (tmp_path / f"{n}.db" for n in itertools.count())

    def make(self, clock: Clock) -> SqliteStore:
        return SqliteStore(next(self._paths), clock=clock)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store.db"


def open_store(path: Path, *, busy_timeout_s: float = 10.0) -> SqliteStore:
    return SqliteStore(path, clock=FakeClock(), busy_timeout_s=busy_timeout_s)


def start(path: Path, body: str) -> subprocess.Popen[str]:
    """Run ``body`` in a process of its own, with ``store`` open on ``path``."""
    program = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from paceline.store.protocol import ConflictError\n"
        "from paceline.store.sqlite import SqliteStore\n"
        "from paceline.system import system_clock\n"
        f"store = SqliteStore(Path({str(path)!r}), clock=system_clock())\n"
    ) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=dict(environ()) | {"PYTHONPATH": _SRC},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_store_is_private_and_survives_being_opened_again(path: Path) -> None:
    """The file and its journal have mode 0600, and the next opener reads what was written."""
    first = open_store(path)
    first.commit(expect={}, writes={"a": b"1"})
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    first.close()
    second = open_store(path)
    record = second.get("a")
    assert record is not None
    assert record.value == b"1"
    second.close()
    assert [file.name for file in path.parent.iterdir()] == ["store.db"]


def test_an_existing_file_is_made_private(path: Path) -> None:
    """A store that others could read is closed to them when it is opened."""
    open_store(path).close()
    path.chmod(0o644)
    open_store(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_processes_lose_no_update(path: Path) -> None:
    """Both create the store at once and count one key up; the sum is exact."""
    body = """
        done = 0
        while done < 40:
            record = store.get("n")
            try:
                store.commit(
                    expect={"n": record.revision if record else 0},
                    writes={"n": b"%d" % (int(record.value if record else 0) + 1)},
                )
            except ConflictError:
                continue
            done += 1
    """
    processes = [start(path, body) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    for process in processes:
        process.communicate()
    store = open_store(path)
    record = store.get("n")
    assert record is not None
    assert record.value == b"80"
    store.close()


def test_a_commit_that_returned_survives_sigkill(path: Path) -> None:
    """A process killed right after commit leaves the record, and no half of the next one."""
    process = start(
        path,
        """
        store.commit(expect={}, writes={"a": b"kept", "b": b"kept"})
        store._connection.execute("BEGIN IMMEDIATE")
        store._connection.execute("DELETE FROM record")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    store = open_store(path)
    assert [(record.key, record.value) for record in store.list("")] == [
        ("a", b"kept"),
        ("b", b"kept"),
    ]
    store.close()


def test_a_lock_held_too_long_says_so(path: Path) -> None:
    """Another writer makes commit fail after the busy timeout, and changes nothing."""
    store = open_store(path, busy_timeout_s=0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked by another process"):
        store.commit(expect={}, writes={"a": b"1"})
    other.execute("ROLLBACK")
    other.close()
    store.commit(expect={}, writes={"b": b"1"})
    assert [record.key for record in store.list("")] == ["b"]
    store.close()


def test_a_slow_reader_does_not_hold_up_a_writer(path: Path) -> None:
    """A commit goes through while another process is in the middle of reading."""
    store = open_store(path, busy_timeout_s=0.05)
    store.commit(expect={}, writes={"a": b"1"})
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT value FROM record").fetchall() == [(b"1",)]
    store.commit(expect={}, writes={"a": b"2"})
    assert reader.execute("SELECT value FROM record").fetchall() == [(b"1",)]
    reader.close()
    store.close()


def test_a_full_disk_changes_nothing(path: Path) -> None:
    """When no page can be added the old records stay and the next commit works."""
    store = open_store(path)
    store.commit(expect={}, writes={"a": b"old"})
    connection = store._connection
    assert connection is not None
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="disk is full"):
        store.commit(expect={}, writes={"a": b"new", "big": bytes(1 << 20)})
    record = store.get("a")
    assert record is not None
    assert record.value == b"old"
    connection.execute("PRAGMA max_page_count = 1000000")
    store.commit(expect={"a": record.revision}, writes={"a": b"new"})
    store.close()


def test_something_else_at_the_path_is_refused_and_left_alone(path: Path) -> None:
    """Neither a text file nor somebody else's database is taken over."""
    path.parent.mkdir()
    path.write_bytes(b"these are not records" * 100)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a store"):
        open_store(path)
    assert path.read_bytes() == before

    foreign = path.with_name("foreign.db")
    other = sqlite3.connect(foreign)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    with pytest.raises(StoreError, match="not a Paceline store"):
        open_store(foreign)


def test_an_empty_file_is_a_record_that_was_lost(path: Path) -> None:
    """We never leave one, so what was in it is gone: that is said, not taken for a fresh start."""
    path.parent.mkdir()
    path.touch()
    with pytest.raises(StoreError, match=r"is empty: what was on record is lost.*paceline gc"):
        open_store(path)
    assert path.read_bytes() == b""


def test_damage_is_reported_as_damage(path: Path) -> None:
    """Overwritten pages raise StoreError that says to keep the file, not nonsense records."""
    store = open_store(path)
    store.commit(expect={}, writes={f"k{n}": bytes(2000) for n in range(20)})
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    damaged = open_store(path)
    with pytest.raises(StoreError, match="damaged"):
        damaged.list("")
    damaged.close()


def test_a_directory_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    """A file where the state directory should be is named, with the way out."""
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(StoreError, match="PACELINE_STATE_DIR"):
        open_store(tmp_path / "state" / "store.db")
