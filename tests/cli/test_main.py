"""The table of verbs, what help costs, and how errors are told."""

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paceline.cli.main import VERBS, cli, explain, run
from paceline.core.errors import ExitStatus, PreflightError

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


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_loads(name: str) -> None:
    """What the table names exists and is a command with a help text."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.get_short_help_str()


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


def test_exit_statuses_are_documented() -> None:
    """docs/cli.md lists every exit status by number and name, and no other."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", text, flags=re.MULTILINE)
    assert listed == [(str(int(status)), status.name) for status in ExitStatus]


def test_verbs_are_documented() -> None:
    """docs/cli.md lists every verb, in the order of the table."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)", text, flags=re.MULTILINE)
    assert listed == list(VERBS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    """Each shell gets a script that calls us."""
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert "_PACELINE_COMPLETE" in result.output


def test_backends_are_listed() -> None:
    """The local backend is always there and can list its machines."""
    result = CliRunner().invoke(cli, ["backends", "ls", "--json"])
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert rows["local"]["lists_machines"] is True
