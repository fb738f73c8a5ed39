"""The table of verbs, what help costs, and how errors are told."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paceline.cli.main import VERBS, cli, explain, run
from paceline.core.errors import ExitStatus, PreflightError
from paceline.runs import compose
from paceline.runs.ledger import RunRecord
from paceline.system import environ

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "grpc", "pydantic", "rich", "httpx", "numpy", "yaml", "google")


def test_help_imports_nothing_heavy() -> None:
    """Listing the verbs imports none of them: help must come back at once."""
    code = (
        "import sys; from paceline.cli.main import run; run(['--help']); "
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )
    assert done.stderr.strip() == "[]"
    assert all(name in done.stdout for name in VERBS)


def test_a_typo_in_a_verb_is_met_with_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """What was meant is said where there is something near."""
    assert run(["statsu"]) == ExitStatus.USAGE
    assert "did you mean 'status'?" in capsys.readouterr().err
    assert run(["zzz"]) == ExitStatus.USAGE
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_loads(name: str) -> None:
    """What the table names exists and is a command with a help text."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.get_short_help_str()


NO_JSON = {
    "ssh": "a shell for a person",
    "completion": "a script for a shell",
    "serve": "what it prints is a JSON object already",
}


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command that does something, by what is typed."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, f"{path} {name}".strip())
    else:
        yield path, command


def test_every_command_has_json() -> None:
    """Whoever drives us with a program never has to read tables; what has none is named here."""
    without = {
        path
        for path, command in commands(cli, "")
        if not any("--json" in option.opts for option in command.params)
    }
    assert without == set(NO_JSON)


def test_an_unknown_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong verb says so in one paragraph and where help is."""
    assert run(["frobnicate"]) == ExitStatus.USAGE
    said = capsys.readouterr().err
    assert "frobnicate" in said
    assert "paceline --help" in said
    assert "Traceback" not in said


def test_errors_are_json_when_json_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With --json whoever parses stdout gets an object also when nothing worked."""
    assert run(["up", str(tmp_path / "none.yaml"), "--json"]) == ExitStatus.USAGE
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "USAGE"
    assert error["exit_status"] == 2
    assert "none.yaml" in error["message"]


def test_json_after_a_double_dash_is_the_commands_own(capsys: pytest.CaptureFixture[str]) -> None:
    """``run -- prog --json`` asks prog for JSON, not us."""
    assert run(["frobnicate", "--", "--json"]) == ExitStatus.USAGE
    assert capsys.readouterr().out == ""


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not ours is told as a bug, with the traceback that a report needs."""
    message, status = explain(ZeroDivisionError("oops"))
    assert (status, "this is a bug in paceline" in message) == (ExitStatus.FAILED, True)
    assert "ZeroDivisionError: oops" in capsys.readouterr().err


def test_an_error_of_ours_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """What we raise on purpose is one paragraph with its own status."""
    assert explain(PreflightError("no disk")) == ("no disk", ExitStatus.PREFLIGHT)
    assert capsys.readouterr().err == ""


def test_ctrl_c_has_its_status() -> None:
    """A stop before anything was rented is told as a stop."""
    assert explain(KeyboardInterrupt())[1] is ExitStatus.INTERRUPTED


EARLY = """
import signal
import paceline.__main__ as entry
import paceline.cli.main as command_line

signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
handlers = []
command_line.guard_streams = lambda: handlers.append(signal.getsignal(signal.SIGINT))
command_line.run = lambda _argv: handlers.append(signal.getsignal(signal.SIGINT)) or 0
try:
    entry.main()
except SystemExit:
    print(handlers == [signal.SIG_DFL, signal.default_int_handler])
"""


def test_ctrl_c_while_it_is_loaded_is_quiet() -> None:
    """Until errors can be told it just ends; from then on it unwinds."""
    done = subprocess.run(
        [sys.executable, "-c", EARLY],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )
    assert done.stdout.strip() == "True"


def test_exit_statuses_are_documented() -> None:
    """docs/cli.md lists every exit status by number and name, and no other."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", text, flags=re.MULTILINE)
    assert listed == [(str(int(status)), status.name) for status in ExitStatus]


def test_verbs_are_documented() -> None:
    """docs/cli.md lists every verb, in the order of the table."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w-]+)", text, flags=re.MULTILINE)
    assert listed == list(VERBS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    """Each shell gets a script that calls us."""
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert "_PACELINE_COMPLETE" in result.output


def test_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever types a verb and TAB is offered the runs there are; a broken record offers none."""
    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path))
    with compose.open_services() as services:
        for run_id in ("night-1", "night-2", "day-1"):
            record = RunRecord(run_id=run_id, name="x", created_at_ms=0, pid=1, out="out")
            services.ledger.create(record)
    words = {"_PACELINE_COMPLETE": "bash_complete", "COMP_WORDS": "paceline down n"}
    done = CliRunner().invoke(cli, env={**words, "COMP_CWORD": "2"}, prog_name="paceline")
    assert done.output.split() == ["plain,night-1", "plain,night-2"]
    (tmp_path / "paceline.sqlite").write_bytes(b"")
    done = CliRunner().invoke(cli, env={**words, "COMP_CWORD": "2"}, prog_name="paceline")
    assert done.output.split() == []


def test_backends_are_listed() -> None:
    """The local backend is always there and can list its machines."""
    result = CliRunner().invoke(cli, ["backends", "ls", "--json"])
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert rows["local"]["lists_machines"] is True


def paceline(*words: str, home: Path, **streams: object) -> "subprocess.CompletedProcess[str]":
    """Run the real program, since streams and signals are the process's own."""
    env = {
        "PATH": environ()["PATH"],
        "PYTHONPATH": str(ROOT / "src"),
        "PACELINE_STATE_DIR": str(home / "state"),
    }
    how: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    argv = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(argv, text=True, check=False, env=env, cwd=home, **how)  # type: ignore[call-overload,no-any-return]


def test_output_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A full disk under standard output is an error of ours, in one paragraph."""
    with Path("/dev/full").open("w") as full:
        done = paceline("ls", "--json", home=tmp_path, stdout=full)
        again = paceline("ls", home=tmp_path, stdout=full)
    assert done.returncode == again.returncode == ExitStatus.PREFLIGHT
    assert done.stderr.startswith("paceline: cannot write to standard output: No space left")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("ls", "--json"), ExitStatus.OK),
        (("--help",), ExitStatus.OK),
        (("ls", "--nope", "--json"), ExitStatus.USAGE),
    ],
)
def test_a_reader_that_has_seen_enough_is_no_error(
    tmp_path: Path, words: tuple[str, ...], status: ExitStatus
) -> None:
    """What is written to a closed pipe is nobody's loss: no traceback, and the status it had."""
    read, write = os.pipe()
    os.close(read)
    done = paceline(*words, home=tmp_path, stdout=write)
    os.close(write)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode == status


@pytest.mark.parametrize("name", ["../../evil", "a b", "-", "UP", "x" * 60, "$(id)"])
def test_an_id_that_cannot_name_a_run_makes_nothing(tmp_path: Path, name: str) -> None:
    """It is refused before it becomes a path: also nothing outside the state directory is made."""
    words = ("--backend", "local", "--gpu", "cpu-1x", f"--run-id={name}", "--", "true")
    done = paceline("run", *words, home=tmp_path)
    assert done.returncode == ExitStatus.USAGE
    assert "cannot name a run" in done.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == ["state"]
