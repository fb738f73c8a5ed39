"""Reaching into a run's machine behind a real sshd: logs, exec, sync, plain ssh, our package."""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from e2e.namespaces import write_hosts
from e2e.operating import Operator
from paceline.testing.fakes.machine import FakeMachine, has_sshd, make_key_pair

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server"),
]


@pytest.fixture
def machine(operator: Operator, tmp_path: Path) -> Iterator[FakeMachine]:
    """A host that has the Python of these tests."""
    public = make_key_pair(tmp_path / "key")
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    one = FakeMachine(tmp_path / "host", authorized_keys=[public], path=path)
    one.start()
    write_hosts(tmp_path / "config", {"box": one}, key=tmp_path / "key")
    operator.env["PACELINE_CONFIG_DIR"] = str(tmp_path / "config")
    yield one
    one.stop()


COUNT = "i=0; while [ ! -e stop ]; do echo line $i; i=$((i+1)); sleep 0.05; done; echo last"


def assert_json(operator: Operator) -> None:
    """What a program is told of a command and of copies."""
    where = {"run_id": "in", "role": "task", "index": 0, "backend": "ssh"}
    status, out, err = operator.type("exec", "in", "--json", "--", "cat sub/file; exit 9")
    assert (status, err) == (9, "there and back")
    assert where.items() <= (told := json.loads(out)).items()
    assert told["exit_code"] == 9
    for _ in range(2):  # what is there already is not counted again
        told = operator.type_json("sync", "in", ":sub", "back")[1]
        assert where.items() <= told.items()
        (operator.home / "back" / "file").write_text("else", encoding="utf-8")
        assert (told["num_files"], told["num_bytes"]) == (1, 14)
    operator.type("sync", "in", ":sub", "back")
    assert operator.type_json("sync", "in", ":sub", "back")[1]["num_files"] == 0
    told = operator.type_json("sync", "in", "back", ":more", "--dry-run")[1]
    assert (told["copied"], told["num_files"]) == (False, 1)


def assert_present(operator: Operator) -> None:
    """Without -f the log is shown as it is now, while its role goes on."""
    operator.wait_for(lambda: operator.type("logs", "in")[1].startswith("line 0\n"))
    first = operator.type("logs", "in", "--json")[1].splitlines()[0]
    assert json.loads(first)["text"] == "line 0"


def assert_whole(operator: Operator, pulled: str) -> None:
    """No line of the log is lost or doubled, whoever shows it."""
    num_lines = pulled.count("\n")
    assert pulled == "".join(f"line {i}\n" for i in range(num_lines - 1)) + "last\n"
    assert operator.type("logs", "in")[1] == pulled, "a switch's log is no role's"
    lines = [json.loads(line) for line in operator.type("logs", "in", "--json")[1].splitlines()]
    assert "".join(f"{line['text']}\n" for line in lines) == pulled
    assert lines[1] == {"role": "task", "index": 0, "offset": 7, "text": "line 1"}


def test_into_a_machine_and_out_again(operator: Operator, machine: FakeMachine) -> None:
    """A log is read live by another terminal, also over lost connections and without a driver."""
    operator.job(f"name: in\nroles:\n  task: {{backend: ssh, gpu: cpu-1x, run: '{COUNT}'}}\n")
    up = operator.start("up", "job.yaml", "--yes", "--run-id", "in", "--out", "out")
    operator.wait_for(lambda: list(machine.home.rglob("logs/task-0.log")))
    follower = operator.start("logs", "in", "-f")
    assert_present(operator)
    (operator.home / "file").write_text("there and back")
    assert operator.type("sync", "in", "file", ":sub/file")[0] == 0
    status, out, _ = operator.type("exec", "in", "--", "cat sub/file; exit 9")
    assert (status, out) == (9, "there and back")
    assert_json(operator)
    assert [operator.type("ssh-config", "install")[0] for _ in range(2)] == [0, 0]
    user_file = operator.home / ".ssh" / "config"
    assert user_file.read_text().count("Include") == 1
    for name in ("paceline-in-task", "paceline-in-task-0"):
        words = ["ssh", "-F", str(user_file), "-o", "BatchMode=yes", name, "echo plain ssh"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        assert done.stdout == "plain ssh\n", done.stderr
    up.kill()
    up.communicate()
    machine.drop_connections()
    again = operator.start("attach", "in", "--json")
    machine.drop_connections()
    assert operator.type("exec", "in", "touch stop")[0] == 0
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert json.loads(out)["outcome"] == "succeeded"
    followed, err = follower.communicate(timeout=60)
    assert follower.returncode == 0, err
    pulled = (operator.home / "out" / "logs" / "task-0.log").read_text()
    assert followed == pulled
    assert_whole(operator, pulled)
    assert "has no machine now" in operator.type("exec", "in", "true")[2]
    assert operator.type_json("ssh-config")[1]["names"] == []
    assert operator.type("ssh-config", "remove")[0] == 0
    assert "Include" not in user_file.read_text()


def test_a_second_driver_is_refused_while_the_first_lives(operator: Operator) -> None:
    """Two operators on one run: the second is told who drives it, and changes nothing."""
    operator.job("name: two\nroles:\n  task: {backend: local, gpu: cpu-1x, run: exec sleep 300}\n")
    first = operator.start("up", "job.yaml", "--yes", "--run-id", "two", "--out", "out")
    operator.wait_for(operator.sleeping)
    status, _, err = operator.type("up", "--resume", "two")
    assert (status, f"process {first.pid}" in err) == (10, True)
    told = operator.type_json("down", "two", "--dry-run")[1]
    assert (told["ended"], [one["role"] for one in told["machines"]]) == (False, ["task"])
    assert operator.sleeping()
    assert [operator.type("down", "two")[0] for _ in range(2)] == [0, 0]
    first.communicate(timeout=30)
    status, _, err = operator.type("attach", "two")
    assert (status, "is over" in err) == (2, True)
    operator.assert_nothing_left()


def test_a_machine_gets_the_paceline_that_drives_it(
    operator: Operator, machine: FakeMachine
) -> None:
    """Into a fresh environment, from the running source; the role's own setup may add to it."""
    run = "python -c 'import paceline, sys; print(paceline.__file__); sys.exit(0)'"
    env = json.dumps({"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"})
    role = f'{{backend: ssh, gpu: cpu-1x, setup: "command -v pip", run: "{run}", env: {env}}}'
    operator.job(f"name: bring\nrefit: {{model: m}}\nroles:\n  trainer: {role}\n")
    status, _, err = operator.type("up", "job.yaml", "--yes", "--out", "out", timeout_s=90)
    assert status == 0, err
    setup, said = (operator.home / "out" / "logs" / "trainer-0.log").read_text().splitlines()[-2:]
    assert "/venv/bin/pip" in setup
    assert "/venv/lib/" in said
    assert str(machine.home) in said


@pytest.mark.slow
def test_a_locked_record_is_told_and_loses_nothing(operator: Operator) -> None:
    """Another program that holds the state file: a clear error in time, and all is there after."""
    operator.job("name: held\nroles:\n  task: {backend: local, gpu: cpu-1x, run: exec sleep 300}\n")
    up = operator.start("up", "job.yaml", "--yes", "--run-id", "held", "--out", "out")
    operator.wait_for(operator.sleeping)
    holder = sqlite3.connect(operator.state / "paceline.sqlite", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    status, _, err = operator.type("up", "job.yaml", "--yes", "--run-id", "other", timeout_s=90)
    assert status == 10, err
    assert "paceline.sqlite" in err
    assert up.poll() is None
    assert operator.sleeping()
    holder.execute("ROLLBACK")
    holder.close()
    assert operator.type("down", "held")[0] == 0
    up.communicate(timeout=30)
    operator.assert_nothing_left()


def _fill(directory: Path) -> Path:
    """Write until nothing fits any more; return the file."""
    fd, name = tempfile.mkstemp(dir=directory)
    with os.fdopen(fd, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(directory).f_bavail == 0
    return Path(name)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_under_the_record_loses_nothing(
    operator: Operator, machine: FakeMachine
) -> None:
    """The machine goes all the same, each error says what to free, and the record can be mended."""
    operator.state.mkdir()
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(operator.state)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this computer does not let us mount")
    try:
        operator.job("name: f\nroles:\n  task: {backend: ssh, gpu: cpu-1x, run: exec sleep 300}\n")
        up = operator.start("up", "job.yaml", "--yes", "--run-id", "full", "--out", "out")
        events = operator.home / "out" / "events.jsonl"
        operator.wait_for(lambda: events.exists() and "role.started" in events.read_text())
        ballast = _fill(operator.state)
        up.terminate()
        _, err = up.communicate(timeout=30)
        assert "is gone, but that is not on record" in err
        assert "free some space" in err
        assert machine.num_processes() == 0
        again = _fill(operator.state)  # what the driver gave back when it ended
        status, _, err = operator.type("down", "full")
        assert (status, "full" in err) == (10, True)
        ballast.unlink()
        again.unlink()
        assert operator.type("gc", "--yes")[0] == 0
        assert operator.machines() == []
    finally:
        subprocess.run(["/bin/umount", "-l", str(operator.state)], check=True)
