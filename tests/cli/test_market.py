"""``offers`` and ``check`` as a user calls them, over the backends of this computer."""

import json
from pathlib import Path

import pytest

from paceline.cli.main import run
from paceline.core.errors import ExitStatus


@pytest.fixture(autouse=True)
def _directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PACELINE_CONFIG_DIR", str(tmp_path / "config"))


def test_offers_are_a_table_and_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """What there is on stdout, who has nothing on stderr, one line each."""
    assert run(["offers", "--gpu", "cpu-1x", "--backend", "local,ssh", "--disk-gb", "0"]) == 0
    seen = capsys.readouterr()
    assert "cpu-0" in seen.out
    assert seen.err.startswith("ssh: ")
    assert "hosts.toml" in seen.err


def test_offers_as_json_are_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """With the price of the machine, and how long each backend took."""
    argv = ["offers", "--gpu", "cpu-1x", "--backend", "local", "--disk-gb", "0", "--json"]
    assert run(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert {offer["backend"] for offer in found["offers"]} == {"local"}
    assert found["offers"][0]["dph"] == 0.0
    assert found["notes"] == []
    assert set(found["wall_s"]) == {"local"}


def test_no_offer_at_all_is_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A script can tell that nothing is to be had."""
    argv = ["offers", "--gpu", "h100-1x", "--backend", "local"]
    assert run(argv) == ExitStatus.PROVISION
    assert "local" in capsys.readouterr().err


def test_a_backend_that_lets_nobody_in_is_not_one_that_has_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a key the status is that of credentials, and a program reads which and why."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    argv = ["offers", "--gpu", "h100-1x", "--backend", "lambda", "--json"]
    assert run(argv) == ExitStatus.PREFLIGHT
    [note] = json.loads(capsys.readouterr().out)["notes"]
    assert (note["backend"], note["silence"]) == ("lambda", "refused")
    job = tmp_path / "job.yaml"
    role = "{backend: lambda, gpu: h100-1x, run: 'true'}"
    job.write_text(
        f"name: j\nbudget: {{soft_usd: 4, hard_usd: 5}}\nroles:\n  a: {role}\n  b: {role}\n"
    )
    assert run(["up", str(job), "--yes", "--json"]) == ExitStatus.PREFLIGHT
    seen = capsys.readouterr()
    error = json.loads(seen.out)["error"]
    assert "every backend refuses us" in error["message"]
    [silent] = error["backends"]
    assert (silent["backend"], silent["silence"]) == ("lambda", "refused")
    assert seen.err.startswith("asking lambda what there is to rent\n")
    run_it = ["run", "--backend", "lambda", "--gpu", "h100-1x", "--budget-usd", "5", "--yes"]
    assert run([*run_it, "--json", "--", "true"]) == ExitStatus.PREFLIGHT


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["offers", "--gpu", "h100"], "h100-1x"),
        (["offers", "--gpu", "cpu-1x", "--backend", "azure"], "azure"),
        (["check", "--backend", "local,azure"], "azure"),
    ],
)
def test_a_wrong_word_is_a_usage_error(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is asked, and the message says what would be right."""
    assert run(argv) == ExitStatus.USAGE
    assert said in capsys.readouterr().err


def test_a_command_can_be_planned_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """With --dry-run nothing is made, not even a folder for the run."""
    argv = ["run", "--backend", "local", "--gpu", "cpu-1x", "--dry-run", "--json", "--", "true"]
    assert run(argv) == ExitStatus.OK
    assert json.loads(capsys.readouterr().out)["dph"] == 0.0
    assert run(["ls", "--json"]) == ExitStatus.OK
    assert json.loads(capsys.readouterr().out) == []
    assert run(["cost", "--json"]) == ExitStatus.OK
    assert json.loads(capsys.readouterr().out)["rows"] == []


def test_check_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """One backend that works is enough, unless that one was named which does not."""
    assert run(["check", "--backend", "local,ssh", "--json"]) == ExitStatus.PREFLIGHT
    rows = {row["backend"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["local"]["is_valid"]
    assert "hosts.toml" in rows["ssh"]["advice"]
    assert run(["check", "--backend", "local"]) == ExitStatus.OK
    assert "ok" in capsys.readouterr().out
