"""``paceline control serve`` and ``paceline versions`` as a person meets them."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import paceline
from paceline.cli.versions import versions
from paceline.core.errors import PreflightError, UsageError
from paceline.refit import compose
from paceline.refit.control.auth import write_private_json
from paceline.refit.control.protocol import ControlClient
from paceline.refit.errors import ControlUnavailableError, NotFoundError
from paceline.refit.model import Replica
from paceline.testing.contracts.control import (
    DESCRIPTION,
    FULL,
    GENERATOR,
    MODEL,
    REPORT,
    SEED,
    TRAINER,
    TTL_S,
    shard_of,
)

SOURCES = str(Path(paceline.__file__).parents[1])
SERVE = (
    f"import sys; sys.path.insert(0, {SOURCES!r}); "
    "from paceline.cli.control import control; control()"
)
TIMEOUT_S = 60


@dataclass
class Served:
    """A service in this process and what reaches it."""

    plane: ControlClient
    options: list[str]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    token_file = tmp_path / "tokens.json"
    compose.create_token_file(token_file)
    service = compose.start_control_server(token_file=token_file)
    plane = compose.connect_control(service.address, token_file=token_file)
    yield Served(plane, ["--control", service.address, "--token-file", str(token_file)])
    plane.close()
    service.stop()


def publish(plane: ControlClient) -> str:
    """Make a described READY version with a reader, and return its uid."""
    plane.register_worker(TRAINER, ttl_seconds=TTL_S)
    plane.register_worker(GENERATOR, ttl_seconds=TTL_S)
    uid = plane.create_version(FULL).uid
    plane.describe_version(uid, DESCRIPTION)
    for slot in FULL.expected_source_slots:
        plane.create_shard(shard_of(uid, slot))
    plane.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=10)
    return uid


def run(*args: str, status: int = 0) -> str:
    """Run a verb of ``paceline versions`` and return what it printed."""
    result = CliRunner(env={"COLUMNS": "20"}).invoke(
        versions, args, catch_exceptions=False, standalone_mode=False
    )
    assert (result.return_value or 0) == status, result.output
    return result.output


def test_ls_shows_versions_as_a_table_and_as_json(served: Served) -> None:
    """People see state and sequence; programs see every field."""
    uid = publish(served.plane)
    table = run("ls", "--model", MODEL, *served.options)
    assert uid in table
    assert "READY" in table
    assert DESCRIPTION.root_digest[:12] in table
    assert all(word in table for word in ("FULL_TENSOR", "root digest"))
    shown = json.loads(run("ls", "--model", MODEL, "--json", *served.options))
    assert [version["uid"] for version in shown["versions"]] == [uid]
    assert shown["versions"][0]["description"]["sequence"] == 3
    filtered = run("ls", "--model", MODEL, "--run", "other", "--json", *served.options)
    assert json.loads(filtered) == {"versions": []}


def test_show_has_shards_and_readers(served: Served) -> None:
    """One version with who offers it and who holds it."""
    uid = publish(served.plane)
    table = run("show", uid, *served.options)
    for expected in (uid, "rank-1", "t-0", "g-0", DESCRIPTION.root_digest):
        assert expected in table
    assert "WeightPayloadFormat" not in table
    shown = json.loads(run("show", uid, "--json", *served.options))
    assert shown["version"]["state"] == "READY"
    assert [shard["source_slot_id"] for shard in shown["shards"]] == ["rank-0", "rank-1"]
    assert [lease["worker_id"] for lease in shown["leases"]] == ["g-0"]


def test_verify_says_what_is_wrong_and_with_which_status(served: Served) -> None:
    """A version that nobody described is named; the exit status is that of refit failures."""
    served.plane.create_version(SEED)
    uid = served.plane.list_versions(MODEL)[0].uid
    shown = json.loads(run("verify", uid, "--json", *served.options, status=50))
    assert shown["ok"] is False
    assert "not described" in shown["problems"][0]
    assert "not described" in run("verify", uid, *served.options, status=50)
    described = replace(DESCRIPTION, parent_root=None)
    served.plane.describe_version(uid, described)
    assert "can be installed" in run("verify", uid, *served.options)


def test_explain_says_why_and_from_whom(served: Served) -> None:
    """The plan, the ways that were weighed and who has the bytes, as text and as JSON."""
    plane = served.plane
    plane.register_worker(TRAINER, ttl_seconds=TTL_S)
    uid = plane.create_version(FULL).uid
    for slot in FULL.expected_source_slots:
        plane.create_shard(shard_of(uid, slot))
    plane.describe_version(uid, replace(DESCRIPTION, parent_root=None))
    slot = FULL.expected_source_slots[0]
    for name, chunks in (("g-0", b"\x0f"), ("g-1", b"")):
        plane.register_worker(replace(GENERATOR, worker_id=name), ttl_seconds=60)
        plane.announce_replica(
            Replica(
                version_id=uid,
                source_slot_id=slot,
                worker_id=name,
                manifest_endpoint=f"http://{name}/v1/manifests/v/s",
                region="eu",
                chunks=chunks,
                is_complete=not chunks,
                rates=(("t-0", 2.5e6),),
            )
        )
    words = ("explain", "--model", MODEL, *served.options)
    shown = json.loads(run(*words, "--json"))
    assert (shown["kind"], shown["path"], shown["held"]) == ("full", [uid], None)
    assert shown["options"][0]["seconds"] is None
    fresh = run(*words)
    assert "nothing is installed; full version" in fresh
    plane.report_installed(replace(REPORT, version_id="", sequence=-1, root_digest=""))
    told = json.loads(run(*words, "--worker", "g-0", "--json"))
    assert told["options"][0]["seconds"] > 0
    lines = told["sources"][uid]
    assert [line["worker_id"] for line in lines] == ["g-1", "t-0", "t-0"]
    assert lines[0]["note"] == "near: asked first"
    assert lines[1]["bytes_per_s"] == 2.5e6
    plane.report_installed(replace(REPORT, sequence=DESCRIPTION.sequence))
    assert json.loads(run(*words, "--worker", "g-0", "--json"))["kind"] == "nothing"
    held = json.loads(run(*words, "--from", str(DESCRIPTION.sequence), "--json"))
    assert (held["kind"], held["path"]) == ("nothing", [])
    with pytest.raises(UsageError, match="no engine that has reported"):
        run(*words, "--worker", "g-9")


def test_errors_pass_to_the_one_place_that_prints_them(served: Served, tmp_path: Path) -> None:
    """Unknown versions, missing credentials and dead services are our errors with their status."""
    with pytest.raises(NotFoundError, match="no version 'nope'"):
        run("show", "nope", *served.options)
    with pytest.raises(PreflightError, match="cannot read"):
        run("ls", "--model", MODEL, *served.options[:2], "--credentials", str(tmp_path / "no"))


def test_a_role_looks_with_its_credentials(served: Served, tmp_path: Path) -> None:
    """A credentials file is enough to read."""
    tokens = json.loads(Path(served.options[3]).read_text())
    path = tmp_path / "credentials.json"
    fields = {"role": "rollout", "control_token": tokens["generator"], "data_token": "d"}
    write_private_json(path, fields)
    shown = run("ls", "--model", MODEL, "--json", *served.options[:2], "--credentials", str(path))
    assert json.loads(shown) == {"versions": []}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_runs_until_it_is_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    """It prints its address, answers, and ends with status 0 on SIGTERM and Ctrl-C."""
    token_file = tmp_path / "tokens.json"
    arguments = ["serve", "--listen", "127.0.0.1:0", "--token-file", str(token_file)]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *arguments, "--create-tokens", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            stop_and_watch(process, token_file=token_file, number=number)
        finally:
            process.kill()


def stop_and_watch(
    process: subprocess.Popen[str], *, token_file: Path, number: signal.Signals
) -> None:
    """Talk to the service, send the signal, and see it gone."""
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())["address"]
    plane = compose.connect_control(address, token_file=token_file)
    assert plane.list_versions(MODEL) == []
    process.send_signal(number)
    assert process.wait(timeout=TIMEOUT_S) == 0
    plane.close()
    gone = compose.connect_control(address, token_file=token_file, timeout_s=0.5)
    with pytest.raises(ControlUnavailableError):
        gone.list_versions(MODEL)
    gone.close()


def test_pins(served: Served) -> None:
    """Engines are pinned by pattern, listed with what they serve, and let go again."""
    uid = publish(served.plane)
    runner = CliRunner()

    def run(*words: str) -> dict[str, object]:
        done = runner.invoke(versions, [*words, *served.options, "--json"])
        assert done.exit_code == 0, done.output
        (found,) = json.loads(done.output)["pins"] or [{}]
        return dict(found)

    plan = run("pin", uid, "--workers", "g-*", "--dry-run")
    assert plan["version_id"] == uid
    assert run("pins", "--model", MODEL) == {}
    run("pin", uid, "--workers", "g-*")
    found = run("pins", "--model", MODEL)
    assert (found["workers"], found["version_id"]) == ("g-*", uid)
    table = runner.invoke(versions, ["pins", "--model", MODEL, *served.options])
    assert "g-*" in table.output
    run("unpin", "--model", MODEL, "--workers", "g-*")
    assert run("pins", "--model", MODEL) == {}
    wrong = runner.invoke(versions, ["unpin", "--model", MODEL, "--workers", "x", *served.options])
    assert isinstance(wrong.exception, NotFoundError)
