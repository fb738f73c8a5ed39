"""Notices: told to a command or a webhook, bounded, without secrets, never worth a run."""

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.runs import notices
from paceline.runs.journal import delay_text
from paceline.runs.model import NotifySpec
from paceline.runs.notices import Notifier
from paceline.system import system_clock


class Told:
    """A notifier and what it put on record."""

    def __init__(self, spec: NotifySpec) -> None:
        self.failed: list[Mapping[str, object]] = []
        self.notifier = Notifier(
            spec,
            run_id="job-1",
            clock=system_clock(),
            redact=lambda text: text.replace("s3cret", "[token]"),
            record=lambda name, fields: self.failed.append({"event": name, **fields}),
        )

    def tell(self, name: str = "budget.soft", **fields: object) -> None:
        self.notifier.tell(name, fields)


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[object]]]:
    got: list[object] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if "/broken" in self.path else 204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


def test_a_command_and_a_webhook_get_the_event(
    tmp_path: Path, webhook: tuple[str, list[object]]
) -> None:
    """One JSON object each, tokens taken out; what nobody needs to be woken for is not sent."""
    address, got = webhook
    told = Told(
        NotifySpec(command=f"cat >> {tmp_path}/got; echo >> {tmp_path}/got", webhook=address)
    )
    told.tell(spent_usd=5.0, note="has s3cret in it")
    told.tell("role.started", role="trainer")
    told.tell("run.finished", outcome="failed")
    told.notifier.close()
    lines = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["budget.soft", "run.finished"]
    assert lines == got
    assert (lines[0]["run_id"], lines[0]["note"]) == ("job-1", "has [token] in it")
    assert told.failed == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (NotifySpec(command="exit 3"), "exited with 3"),
        (NotifySpec(command="sleep 30"), "did not end within"),
        (NotifySpec(webhook="http://127.0.0.1:1/s3cret"), "notify.webhook: "),
    ],
)
def test_what_fails_is_put_on_record(
    spec: NotifySpec, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that fails, hangs or is not there costs a line, and no address is repeated."""
    monkeypatch.setattr(notices, "TIMEOUT_S", 0.3)
    told = Told(spec)
    told.tell()
    told.notifier.close()
    (failed,) = told.failed
    assert failed["event"] == "notify.failed"
    assert reason in str(failed["reason"])
    assert "s3cret" not in str(failed)


def test_a_hook_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Telling returns at once, the queue has a limit, closing too."""
    monkeypatch.setattr(notices, "CLOSE_S", 0.2)
    monkeypatch.setattr(notices, "TIMEOUT_S", 1.0)
    told = Told(NotifySpec(command="sleep 30"))
    begun_s = system_clock().monotonic()
    for _ in range(notices.QUEUE_MAX + 10):
        told.tell()
    told.notifier.close()
    assert system_clock().monotonic() - begun_s < 0.9
    assert any("notices wait" in str(failed["reason"]) for failed in told.failed)


def test_nobody_is_told_when_nobody_asked() -> None:
    """Without a hook there is no thread."""
    told = Told(NotifySpec())
    told.tell()
    assert told.notifier._thread is None
    told.notifier.close()


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        (
            "renting.waiting",
            {"wait_s": 12.0, "num_tried": 0, "backend": "lambda", "reason": "lambda: 429"},
            "task-0: trying again in 12 s: lambda: 429",
        ),
        (
            "renting.waiting",
            {"wait_s": 30.0},
            "task-0: nothing to be had yet; trying again in 30 s",
        ),
        (
            "attempt.failed",
            {"backend": "vast", "offer": "7", "reason": "sold out"},
            "task-0: vast 7 came to nothing: sold out",
        ),
        ("machine.running", {}, None),
    ],
)
def test_who_waits_is_told_why(name: str, fields: dict[str, object], said: str | None) -> None:
    """What makes renting take longer, and nothing else."""
    assert delay_text(name, {"role": "task", "index": 0, **fields}) == said
