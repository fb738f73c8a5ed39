"""``paceline events``: what happened to a run on the operator's side, also while it happens."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import click

from paceline.cli.completion import run_ids
from paceline.core.errors import UsageError
from paceline.core.text import printable
from paceline.runs import compose
from paceline.runs.care import JOURNAL
from paceline.runs.owner import owner_of

POLL_S = 0.3
LINE_MAX = 64 * 1024


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.option("-f", "--follow", is_flag=True, help="Go on while somebody drives the run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def events(*, run_id: str, follow: bool, as_json: bool) -> None:
    """Show what happened to RUN: machines, roles, money, checkpoints, its end."""
    with compose.open_services() as services:
        record = services.ledger.get(run_id)
        path = Path(record.out) / JOURNAL
        run_dir, clock = services.run_dir(run_id), services.clock
    if not path.is_file():
        raise UsageError(f"run {run_id} has no events in {path}; was its folder moved?")
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            # Asked before reading: what a driver writes last is read after it is gone.
            is_driven = follow and owner_of(run_dir, clock=clock) is not None
            for line in _whole_lines(file):
                _show(line, as_json=as_json)
            if not is_driven:
                return
            clock.sleep(POLL_S)


def _whole_lines(file: TextIO) -> Iterator[str]:
    """Read on to the end; a line that is still being written is left for the next time."""
    place = file.tell()
    while line := file.readline(LINE_MAX):
        if not line.endswith("\n") and len(line) < LINE_MAX:
            file.seek(place)
            return
        place = file.tell()
        yield line


def _show(line: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(line.rstrip("\n"))
        return
    try:
        found = json.loads(line)
        moment = datetime.fromtimestamp(found.pop("at"), tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
        name = found.pop("event")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        click.echo(printable(line.rstrip("\n")))  # nothing of ours, and still to be seen
        return
    who = "-".join(str(found.pop(key)) for key in ("role", "index") if key in found)
    rest = ", ".join(f"{key} {value}" for key, value in found.items() if value != "")
    click.echo(printable("  ".join(filter(None, (moment, name, who, rest)))))
