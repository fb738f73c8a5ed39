"""What remains of a run when everything is torn down: its verdict, its report, its result."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import ExitStatus, PreflightError
from paceline.runs.files import tail_of, write_atomic
from paceline.runs.model import Outcome
from paceline.runs.plan import Finish
from paceline.runs.queries import RunView
from paceline.runs.report import RunFacts, render_html, report_of, summary_of

LINE_MAX = 200
"""Characters of one log line in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    status: ExitStatus
    outcome: Outcome
    message: str
    """One paragraph; what failed, with the last lines of its log."""
    summary: dict[str, object]


def judged(finish: Finish, view: RunView) -> Finish:
    """Return the finish, a failure if engines served other weights than they said."""
    if finish.outcome is not Outcome.SUCCEEDED or not view.mismatches:
        return finish
    return replace(
        finish,
        outcome=Outcome.FAILED,
        status=ExitStatus.REFIT_FAILED,
        reason=f"{finish.reason}, and {view.mismatches} installs have another root digest than "
        "the trainer's; the report shows which",
    )


def conclude(
    finish: Finish, view: RunView, facts: RunFacts, *, out: Path, redact: Callable[[str], str]
) -> RunResult:
    """Write both reports below ``out`` and return the result.

    A report that cannot be written is part of the message, and of the status of a success: the
    result itself is not lost with it.
    """
    paths = {"report": str(out / "report.json"), "html": str(out / "report.html")}
    message, status = _message(finish, out, redact), finish.status
    try:
        report = {**report_of(view, facts), **paths}
        write_atomic(out / "report.json", json.dumps(report, indent=1) + "\n")
        write_atomic(out / "report.html", render_html(view, facts))
    except PreflightError as exc:
        message = f"{message}; {exc}"
        status = exc.exit_status if status is ExitStatus.OK else status
    return RunResult(
        status=status,
        outcome=finish.outcome,
        message=redact(message),
        summary={**summary_of(view, facts), **paths},
    )


def _message(finish: Finish, out: Path, redact: Callable[[str], str]) -> str:
    if finish.slot is None:
        return finish.reason
    log = out / "logs" / f"{finish.slot}.log"
    tail = tail_of(log)
    if not tail:
        return f"{finish.reason}; its log is empty or could not be pulled"
    shown = "\n".join(f"  {_cut(redact(line))}" for line in tail)
    return f"{finish.reason}; the last lines of {log}:\n{shown}"


def _cut(line: str) -> str:
    """Shorten; only what is redacted already may be cut, or half a secret would stay."""
    return line if len(line) <= LINE_MAX else line[: LINE_MAX - 3] + "..."
