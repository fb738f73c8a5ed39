"""Lines of authorized_keys that outlived their run: they go, whole, and nothing else does."""

import subprocess
from pathlib import Path

import pytest

from paceline.rental.remote.admitted import DOOR, LABEL_PREFIX, RESTRICTED, SWEEP, command_option

PERSON = "ssh-ed25519 AAAA me@home"


def line(folder: Path, run: str) -> str:
    door = command_option(str(folder), "trainer-0")
    return f'{RESTRICTED},permitopen="127.0.0.1:1",{door} ssh-ed25519 BBBB {LABEL_PREFIX}{run}'


def sweep(keys: Path, *, limit: str = "") -> None:
    script = f'{limit}{SWEEP}sweep "$1"'
    subprocess.run(["/bin/sh", "-c", script, "sweep", str(keys)], check=False, timeout=20)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Keys of a person, of a run that lives, of two that do not, and what only looks like one."""
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / DOOR).write_text("")
    keys = tmp_path / "authorized_keys"
    lines = [
        PERSON,
        line(tmp_path / "gone", "a-trainer-0"),
        line(tmp_path / "live", "b-trainer-0"),
        f'command="sh {tmp_path}/gone/{DOOR} x" ssh-ed25519 CCCC paceline-of-mine',
        f'{RESTRICTED},command="sh {tmp_path}/gone/{DOOR} x" ssh-ed25519 DDDD theirs',
        line(tmp_path / "gone too", "c-trainer-0"),
    ]
    keys.write_text("\n".join(lines))  # no newline at the end, as people leave it
    keys.chmod(0o640)
    return keys


def test_only_lines_of_ours_without_a_door_are_removed(keys: Path) -> None:
    """A person's keys, another run's, and lines of others that resemble ours stay as they are."""
    before = keys.read_text().splitlines()
    sweep(keys)
    assert keys.read_text().splitlines() == [before[0], *before[2:5]]
    assert keys.stat().st_mode & 0o777 == 0o640
    once = keys.stat()
    sweep(keys)
    assert keys.stat().st_mtime_ns == once.st_mtime_ns, "nothing to remove, nothing written"
    assert [path.name for path in keys.parent.iterdir() if path != keys] == ["live"]


def test_the_last_line_can_go(keys: Path) -> None:
    """A file in which nothing is left is empty, not untouched."""
    keys.write_text(line(keys.parent / "gone", "a") + "\n")
    sweep(keys)
    assert keys.read_text() == ""


def test_a_disk_that_is_full_locks_nobody_out(keys: Path) -> None:
    """What cannot be written whole is not written: the keys are those that were there."""
    before = keys.read_text()
    sweep(keys, limit="ulimit -f 0\ntrap '' XFSZ\n")
    assert keys.read_text() == before
    assert [path.name for path in keys.parent.iterdir() if path != keys] == ["live"]


def test_a_link_stays_a_link(keys: Path) -> None:
    """Where the file is somewhere else, it is changed there."""
    link = keys.with_name("link")
    link.symlink_to(keys)
    sweep(link)
    assert link.is_symlink()
    assert len(keys.read_text().splitlines()) == 4
