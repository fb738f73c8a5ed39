"""Whole runs through the real command line on the local backend: every way in and every way out."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from e2e.operating import WAIT_S, Operator

pytestmark = pytest.mark.e2e


def role(run: str, **more: object) -> str:
    fields = {"backend": "local", "gpu": "cpu-1x", "disk_gb": 1, "run": run, **more}
    return json.dumps(fields)  # JSON is YAML


FOREVER = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.1; done"


def test_a_job_of_plain_commands_succeeds(operator: Operator) -> None:
    """The trainer's success ends the run; rollouts end in order; logs and out/ are brought back."""
    (operator.home / "code").mkdir()
    (operator.home / "code" / "train.sh").write_text("cat data; echo done > $PACELINE_OUT/model\n")
    trainer = role(
        "sh train.sh; mkdir -p ckpt; echo 1 > ckpt/a", workdir="code", setup="echo 7 > data"
    )
    operator.job(
        f"name: plain\nroles:\n  trainer: {trainer}\n  rollout: {role(FOREVER, count=2)}\n"
        "artifacts: {pull: [ckpt/]}\n"
    )
    status, found = operator.type_json("up", "job.yaml", "--yes", "--out", "out")
    assert (status, found["outcome"], found["exit_status"]) == (0, "succeeded", 0)
    assert found["cost_usd"] == 0
    out = operator.home / "out"
    assert (out / "logs" / "trainer-0.log").read_text() == "7\n"
    assert (out / "logs" / "rollout-1.log").read_text().endswith("bye\n")
    assert (out / "artifacts" / "trainer-0" / "model").read_text() == "done\n"
    assert (out / "artifacts" / "trainer-0" / "ckpt" / "a").read_text() == "1\n"
    assert json.loads((out / "report.json").read_text())["run_id"] == found["run_id"]
    operator.assert_nothing_left()
    assert operator.type_json("status", found["run_id"])[1]["state"] == "succeeded"
    assert operator.type("logs", found["run_id"], "--role", "trainer")[1] == "7\n"
    assert operator.type_json("cost", found["run_id"])[1]["cost_usd"] == 0


def test_a_role_that_fails_fails_the_run(operator: Operator) -> None:
    """The error names the role, its status and its last 20 lines; everything is torn down."""
    trainer = role("for i in $(seq 30); do echo line $i; done; exit 3")
    operator.job(f"name: bad\nroles:\n  trainer: {trainer}\n  rollout: {role(FOREVER)}\n")
    status, out, err = operator.type("up", "job.yaml", "--yes", "--json")
    error = json.loads(out)["error"]
    assert (status, error in err) == (1, True)
    assert error.startswith("trainer-0 exited with status 3; the last lines of")
    assert [line.strip() for line in error.splitlines()[1:]] == [f"line {i}" for i in range(11, 31)]
    operator.assert_nothing_left()


def test_a_setup_that_fails_is_told_apart(operator: Operator) -> None:
    """A failed setup has a status of its own and shows what setup said."""
    operator.job(f"name: bad\nroles:\n  task: {role('true', setup='echo no such thing; exit 7')}\n")
    status, found = operator.type_json("up", "job.yaml", "--yes")
    assert status == 40
    assert "exited with status 7" in found["error"]
    assert "no such thing" in found["error"]
    operator.assert_nothing_left()


def test_a_rollout_that_is_killed_is_started_again(operator: Operator) -> None:
    """SIGKILL of a rollout's process costs that rollout a restart and the run nothing."""
    rollout = role(
        "echo start >> $PACELINE_OUT/starts; test -f here && exec sleep 60; touch here; kill -9 $$"
    )
    trainer = role("sleep 3")
    operator.job(f"name: again\nroles:\n  trainer: {trainer}\n  rollout: {rollout}\n")
    status, _, err = operator.type("up", "job.yaml", "--yes", "--out", "out")
    assert status == 0, err
    assert re.search(r"rollout-0: ended by signal 9; starting it again in 1\.\d s \(1 of 3\)", err)
    starts = operator.home / "out" / "artifacts" / "rollout-0" / "starts"
    assert starts.read_text() == "start\nstart\n"
    operator.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_tears_everything_down(operator: Operator, number: signal.Signals) -> None:
    """A signal ends the run with status 130 and nothing left; more signals do not cut it short."""
    operator.job(f"name: stop\nroles:\n  trainer: {role(FOREVER)}\n  rollout: {role(FOREVER)}\n")
    process = operator.start("up", "job.yaml", "--yes", "--json", "--out", "out")
    operator.wait_for(lambda: len(operator.processes()) >= 4)
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert json.loads(out)["outcome"] == "interrupted"
    assert "Traceback" not in err
    operator.assert_nothing_left()


def test_kill_nine_leaves_what_gc_ends(operator: Operator) -> None:
    """After kill -9 the machines are on record, gc shows them, gc --yes ends them."""
    operator.job(f"name: nine\nroles:\n  task: {role('exec sleep 300')}\n")
    process = operator.start("up", "job.yaml", "--yes", "--run-id", "nine")
    operator.wait_for(operator.sleeping)
    process.kill()
    process.communicate()
    assert operator.type_json("status", "nine")[1]["state"] == "left behind"
    assert operator.sleeping()
    shown = operator.type_json("gc")[1]
    assert [(m["run_id"], m["is_ours"]) for m in shown["machines"]] == [("nine", True)]
    assert operator.processes(), "gc without --yes ends nothing"
    assert operator.type_json("gc", "--yes")[1]["ended"] is True
    operator.assert_nothing_left()
    assert operator.type_json("status", "nine")[1]["state"] == "abandoned"


def test_the_next_up_ends_what_was_left_and_leaves_the_living_alone(operator: Operator) -> None:
    """Up cleans up after the dead and does not touch a run whose driver lives."""
    operator.job(f"name: long\nroles:\n  task: {role('exec sleep 300')}\n", "long.yaml")
    operator.job(f"name: short\nroles:\n  task: {role('true')}\n", "short.yaml")
    dead = operator.start("up", "long.yaml", "--yes", "--run-id", "dead")
    operator.wait_for(operator.sleeping)
    dead.kill()
    dead.communicate()
    before = operator.sleeping()
    living = operator.start("up", "long.yaml", "--yes", "--run-id", "living")
    operator.wait_for(lambda: operator.sleeping() - before)
    assert operator.type("up", "short.yaml", "--yes")[0] == 0
    machines = operator.type_json("ls")[1]
    assert {machine["run_id"] for machine in machines} == {"living"}
    assert operator.type("gc", "--yes")[0] == 0
    assert living.poll() is None
    assert operator.type("up", "long.yaml", "--yes", "--run-id", "living")[0] in {2, 10}
    status, ended = operator.type_json("down", "living")
    assert (status, ended["ended"]) == (0, True)
    living.communicate(timeout=WAIT_S)
    assert living.returncode == 130
    operator.assert_nothing_left()


SHELL_LINE = "echo to stdout; echo kept > $PACELINE_OUT/file; exit 4"


@pytest.mark.parametrize("command", [("sh", "-c", SHELL_LINE), (SHELL_LINE,)])
def test_one_command_on_one_machine(operator: Operator, command: tuple[str, ...]) -> None:
    """``run`` passes output through, brings back out/, and tells how the command ended."""
    words = [
        "run",
        "--backend",
        "local",
        "--gpu",
        "cpu-1x",
        "--out",
        "out",
        "--",
        *command,
    ]
    status, out, err = operator.type(*words)
    assert (status, out) == (1, "to stdout\n")
    assert "exited with status 4" in err
    assert (operator.home / "out" / "artifacts" / "task-0" / "file").read_text() == "kept\n"
    operator.assert_nothing_left()


def test_a_taken_port_is_told_before_anything_is_rented(operator: Operator) -> None:
    """A control service that cannot listen costs nothing and says which address it was."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refit = f"refit: {{model: m, listen: '127.0.0.1:{port}'}}"
        operator.job(f"name: port\n{refit}\nroles:\n  trainer: {role('true')}\n")
        status, out, _ = operator.type("up", "job.yaml", "--yes", "--json")
    assert status == 10
    assert str(port) in json.loads(out)["error"]["message"]
    assert operator.type_json("ls")[1] == []


def test_a_wrong_job_file_starts_nothing(operator: Operator) -> None:
    """All that is wrong is told, the status says usage, no state is made."""
    operator.job("name: x\nrols: {}\n")
    status, _, err = operator.type("up", "job.yaml", "--yes")
    assert status == 2
    assert "job.yaml:2: rols: unknown key; did you mean 'roles'?" in err
    assert not operator.state.exists()


def test_a_dry_run_rents_nothing(operator: Operator) -> None:
    """The plan is shown and that is all."""
    operator.job(f"name: dry\nroles:\n  task: {role('true', count=3)}\n")
    status, plan = operator.type_json("up", "job.yaml", "--dry-run")
    assert status == 0
    assert [(row["role"], row["count"], row["dph"]) for row in plan["plan"]] == [("task", 3, 0.0)]
    assert not (operator.state / "local").exists()


def test_too_much_disk_is_told_with_what_to_do(operator: Operator) -> None:
    """What no offer fits is a provisioning error that names the constraint."""
    operator.job(f"name: big\nroles:\n  task: {role('true', disk_gb=900000)}\n")
    status, _, err = operator.type("up", "job.yaml", "--yes")
    assert status == 20
    assert "task" in err
    assert "disk" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_loses_no_machine_and_no_result(operator: Operator) -> None:
    """When the report cannot be written the run is torn down and the result still printed."""
    small = operator.home / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode != 0:
        pytest.skip("this computer does not let us mount")
    try:
        operator.job(
            f"name: full\nroles:\n  task: {role('head -c 200000 /dev/zero > $PACELINE_OUT/big')}\n"
        )
        status, found = operator.type_json("up", "job.yaml", "--yes", "--out", "small/out")
        assert status == 10
        assert found["outcome"] == "succeeded"
        operator.assert_nothing_left()
    finally:
        subprocess.run(["/bin/umount", str(small)], check=True)


WORKER = """
import sys, time
from paceline.refit.compose import connect_control, load_credentials
from paceline.refit.model import Event
import os
import re
mine = load_credentials()
control = connect_control(os.environ["PACELINE_CONTROL"], token=mine.control_token)
root = "a" * 64
for step in range(3):
    control.record_event(Event(worker_id="trainer-0", name="version.published", at_unix_ms=step,
        fields=dict(version_id=f"v{step}", sequence=step, step=step, root_digest=root,
        payload_format="XOR_DELTA", payload_bytes=5, full_bytes=100, changed_elements=1,
        total_elements=50, publish_ms=1.0)))
    control.record_event(Event(worker_id="rollout-0", name="version.installed", at_unix_ms=step,
        fields=dict(version_id=f"v{step}", sequence=step, fetched_bytes=5,
        root_digest="b" * 64 if step == 1 and "differ" in sys.argv else root,
        refit_ms=2.0, pause_ms=1.0)))
    control.record_event(Event(worker_id="trainer-0", name="train.step", at_unix_ms=step,
        fields=dict(step=step, reward=step / 2, loss=0.0, staleness=0, step_s=1.0)))
print("role", mine.role)
print("leak", mine.control_token)
sys.exit(5 if "fail" in sys.argv else 0)
"""


def test_what_workers_tell_the_control_service_is_in_the_result(operator: Operator) -> None:
    """Events told over gRPC with the machine's own token are in progress, JSON and report."""
    (operator.home / "code").mkdir()
    (operator.home / "code" / "worker.py").write_text(WORKER)
    trainer = role("python worker.py", workdir="code")
    operator.job(f"name: told\nrefit: {{model: m}}\nroles:\n  trainer: {trainer}\n")
    status, out, err = operator.type("up", "job.yaml", "--yes", "--json", "--out", "out")
    found = json.loads(out)
    assert status == 0, err
    assert found["versions_published"] == 3
    assert (found["delta_bytes"], found["full_bytes"], found["mismatches"]) == (15, 300, 0)
    assert found["trainer"] == {"version_id": "v2", "root_digest": "a" * 64}
    assert "step 2  reward 1.000  version 2" in err
    log = (operator.home / "out" / "logs" / "trainer-0.log").read_text()
    assert log.startswith("role trainer\n")


def test_an_engine_that_served_other_weights_fails_the_run(operator: Operator) -> None:
    """A digest mismatch is told by status, count and report, though every command succeeded."""
    (operator.home / "code").mkdir()
    (operator.home / "code" / "worker.py").write_text(WORKER)
    trainer = role("python worker.py differ", workdir="code")
    operator.job(f"name: other\nrefit: {{model: m}}\nroles:\n  trainer: {trainer}\n")
    status, found = operator.type_json("up", "job.yaml", "--yes", "--out", "out")
    assert (status, found["mismatches"], found["outcome"]) == (50, 1, "failed")
    assert "1 installs have another root digest" in found["error"]
    assert "different" in (operator.home / "out" / "report.html").read_text()


def test_no_token_is_shown_or_kept(operator: Operator) -> None:
    """A role that prints its token does not get it into our error; our own files do not hold it."""
    (operator.home / "code").mkdir()
    (operator.home / "code" / "worker.py").write_text(WORKER)
    trainer = role("python worker.py fail", workdir="code")
    operator.job(f"name: leak\nrefit: {{model: m}}\nroles:\n  trainer: {trainer}\n")
    status, out, err = operator.type("up", "job.yaml", "--yes", "--json", "--out", "out")
    assert status == 1
    log = (operator.home / "out" / "logs" / "trainer-0.log").read_text()
    token = log.rpartition("leak ")[2].strip()
    assert len(token) >= 32
    assert "leak [token]" in json.loads(out)["error"]
    assert token not in out + err
    kept = [path for path in operator.state.rglob("*") if path.is_file()]
    kept += [
        operator.home / "out" / name for name in ("report.json", "report.html", "events.jsonl")
    ]
    assert all(token.encode() not in path.read_bytes() for path in kept)


def test_a_terminal_that_closes_leaves_nothing_behind(operator: Operator) -> None:
    """With nobody to read what is told the run still ends as asked, with its status and result."""
    operator.job(f"name: gone\nroles:\n  trainer: {role(FOREVER)}\n")
    process = operator.start("up", "job.yaml", "--yes", "--json", "--out", "out")
    operator.wait_for(lambda: len(operator.processes()) >= 2)
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert json.loads(out)["outcome"] == "interrupted"
    operator.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_anything_is_rented_is_told(
    operator: Operator, number: signal.Signals
) -> None:
    """Also while the job file is read a signal means status 130 and an error that can be parsed."""
    os.mkfifo(operator.home / "job.yaml")
    process = operator.start("up", "job.yaml", "--yes", "--json")
    with (operator.home / "job.yaml").open("w"):  # returns when paceline reads
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "INTERRUPTED"
    assert err.strip() == "paceline: stopped"


def test_secrets_of_a_killed_driver_go_with_its_machines(operator: Operator) -> None:
    """Tokens, and copies on the way to a machine, do not outlive the clean-up after kill -9."""
    setup = role("true", setup="exec sleep 300")
    operator.job(f"name: nine\nrefit: {{model: m}}\nroles:\n  trainer: {setup}\n")
    process = operator.start("up", "job.yaml", "--yes", "--run-id", "nine")
    operator.wait_for(operator.sleeping)
    run_dir = operator.state / "runs" / "nine"
    (run_dir / "kit-x" / "secrets").mkdir(parents=True)  # killed while it was copied
    (run_dir / "order.json.new").write_text("killed while it was written")
    process.kill()
    process.communicate()
    assert {"tokens.json", "control.key"} <= {path.name for path in (run_dir / "control").iterdir()}
    assert operator.type("gc", "--yes")[0] == 0
    left = {path.name for path in run_dir.iterdir() if not path.name.startswith("control.sqlite")}
    assert left == {"owner.lock", "links.json"}
    operator.assert_nothing_left()


def test_a_report_that_was_changed_hides_no_status(operator: Operator) -> None:
    """A report belongs to the user: what became of it is said, and the record is shown."""
    operator.job(f"name: short\nroles:\n  task: {role('true')}\n")
    assert operator.type("up", "job.yaml", "--yes", "--run-id", "short", "--out", "out")[0] == 0
    (operator.home / "out" / "report.json").write_bytes(b"{\xff")
    status, out, err = operator.type("status", "short", "--json")
    assert (status, json.loads(out)["state"], json.loads(out)["summary"]) == (0, "succeeded", None)
    assert "is not a report any more" in err
