"""What is shown of a run while it lasts."""

import io

import pytest
from rich.console import Console

from paceline.cli.progress import LiveWatcher, PlainWatcher
from paceline.cli.up import weights_line
from paceline.refit.model import Event
from paceline.runs.model import RestartMode, RoleKind, Slot
from paceline.runs.plan import Phase, SlotView
from paceline.runs.queries import RunView, view_of

SLOTS = (
    SlotView(
        slot=Slot(role="rollout", index=0),
        kind=RoleKind.ROLLOUT,
        restart=RestartMode.ON_FAILURE,
        max_restarts=3,
        phase=Phase.RUNNING,
        restarts=1,
    ),
)


def event(name: str, worker: str, fields: dict[str, object]) -> Event:
    return Event(worker_id=worker, name=name, at_unix_ms=0, fields=fields)


def events(step: int, *engines: str) -> list[Event]:
    version: dict[str, object] = {
        "version_id": f"v{step}",
        "sequence": step,
        "root_digest": f"r{step}",
    }
    sizes = {"payload_bytes": 50_000, "full_bytes": 1_000_000}
    counts = {"changed_elements": 5, "total_elements": 100}
    return [
        event("train.step", "t", {"step": step, "reward": 0.5, "staleness": 0.25}),
        event("version.published", "t", {**version, "step": step, **sizes, **counts}),
        *(event("version.installed", one, {**version, "refit_ms": 41.6}) for one in engines),
    ]


def shown(capsys: pytest.CaptureFixture[str], watcher: PlainWatcher, view: RunView) -> list[str]:
    watcher.progress(view, SLOTS)
    return capsys.readouterr().err.splitlines()


def test_a_step_is_one_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of a step is on its line, and the line comes once."""
    watcher = PlainWatcher("run")
    view = view_of(events(1, "run-rollout-0-ab"))
    (line,) = shown(capsys, watcher, view)
    assert line.startswith("step 1  reward 0.500  version 1  staleness 0.25  changed 5.00%  ")
    assert line.endswith("bytes 50 kB of 1 MB  refit ms per engine rollout-0-ab 42")
    assert shown(capsys, watcher, view) == []


def test_a_step_waits_for_its_installs_but_not_for_ever(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It comes when all engines have the version, with the next step, or at the end."""
    watcher = PlainWatcher("run")
    first = events(1, "a", "b")
    assert len(shown(capsys, watcher, view_of(first))) == 1
    second = first + events(2, "a")
    assert shown(capsys, watcher, view_of(second)) == []
    assert len(shown(capsys, watcher, view_of(second + events(3)))) == 1
    watcher.close()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_long_work_is_told_once_per_report(capsys: pytest.CaptureFixture[str]) -> None:
    """What a role says of its progress becomes one line each, without its nonce."""
    watcher = PlainWatcher("run")
    told = [
        event(
            "role.progress",
            "run-trainer-0-ab12",
            {"phase": "warm start", "done": done, "total": 250, "note": "0.31 right"},
        )
        for done in (0, 50)
    ]
    assert shown(capsys, watcher, view_of(told[:1])) == [
        "trainer-0: warm start 0 of 250, 0.31 right"
    ]
    assert shown(capsys, watcher, view_of(told)) == ["trainer-0: warm start 50 of 250, 0.31 right"]


def test_a_terminal_shows_long_work_until_there_are_steps() -> None:
    """Nobody looks at an empty table while a role prepares."""
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    watcher = LiveWatcher("run", console)
    told = [event("role.progress", "run-trainer-0-ab12", {"phase": "warm start", "done": 7})]
    watcher.progress(view_of(told), SLOTS)
    watcher.close()
    assert isinstance(console.file, io.StringIO)
    assert "trainer-0: warm start 7" in console.file.getvalue()


def test_a_terminal_gets_a_table() -> None:
    """On a terminal the latest steps, the machines and the totals are drawn in place."""
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    watcher = LiveWatcher("run", console)
    watcher.note("something happened")
    watcher.progress(view_of(events(1, "run-rollout-0-ab")), SLOTS)
    watcher.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("something happened", "rollout-0-ab 42", "(1 restarts)", "0 digest mismatches"):
        assert part in text


def test_the_end_of_a_run_says_what_became_of_the_weights() -> None:
    """One line has versions, engines, mismatches, bytes and reward; without steps no reward."""
    found = {
        "versions_published": 29,
        "engines": [{}, {}],
        "mismatches": 0,
        "delta_bytes": 50,
        "full_bytes": 1000,
        "reward_first5": 0.2,
        "reward_last5": 0.65,
    }
    assert weights_line(found) == (
        "29 versions on 2 engines; 0 digest mismatches; deltas 50 B, 5.0% of full weights; "
        "mean reward from 0.200 to 0.650 (first and last 5 steps)"
    )
    assert "reward" not in weights_line(found | {"reward_first5": None})
