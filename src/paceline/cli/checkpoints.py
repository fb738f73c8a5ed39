"""``paceline checkpoints``: what was kept of a run, and the way to an object store and back."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from paceline.cli.completion import run_ids
from paceline.core.registry import LazyEntry, load_entry
from paceline.core.text import printable
from paceline.runs import compose
from paceline.runs.charts import bytes_text
from paceline.runs.pulling import CHECKPOINTS
from paceline.runs.shelf import Shelf, listed_here

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_run_option = click.option("--run", "run_id", required=True, help="Whose checkpoints.")
_slot_option = click.option("--slot", required=True, help="Of which machine, such as trainer-0.")


@click.group()
def checkpoints() -> None:
    """Look at the checkpoints of a run; send them to an object store, fetch them from one."""


@checkpoints.command()
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@_json_option
def ls(*, run_id: str, as_json: bool) -> None:
    """List the checkpoints of RUN that were pulled here while it lasted."""
    with compose.open_services() as services:
        out = Path(services.ledger.get(run_id).out)
    rows: list[dict[str, Any]] = [
        {
            "slot": folder.name,
            "checkpoint": key,
            "num_files": len(one.files),
            "num_bytes": one.num_bytes,
            "path": str(folder / key),
        }
        for folder in sorted((out / CHECKPOINTS).glob("*"))
        for key, one in sorted(Shelf(folder).kept().items())
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        size = bytes_text(int(row["num_bytes"]))
        click.echo(printable(f"{row['slot']}  {size:>10}  {row['path']}"))
    if not rows:
        click.echo("no checkpoints")


@checkpoints.command()
@click.argument("url")
@_run_option
@_slot_option
@click.option("--keep", type=click.IntRange(1), default=4, show_default=True)
@click.argument("roots", nargs=-1, required=True)
@_json_option
def push(
    *, url: str, run_id: str, slot: str, keep: int, roots: tuple[str, ...], as_json: bool
) -> None:
    """Send what is new below ROOTS, in the run's folder on this machine, to URL."""
    base = Path(run_id)
    found = listed_here(base, roots, now_s=compose.now_s())
    pushed = _store(url, run_id, slot).push(found, base=base, keep=keep)
    if as_json:
        click.echo(json.dumps({"url": url, "run_id": run_id, "slot": slot} | asdict(pushed)))
        return
    said = f"{len(pushed.sent)} checkpoints sent, {len(pushed.skipped)} skipped"
    click.echo(f"{said}, {len(pushed.pruned)} pruned")


@checkpoints.command()
@click.argument("url")
@_run_option
@_slot_option
@click.option("--into", type=click.Path(path_type=Path), required=True, help="Folder to fill.")
@_json_option
def fetch(*, url: str, run_id: str, slot: str, into: Path, as_json: bool) -> None:
    """Fetch the newest checkpoints of a slot from URL; each appears whole or not at all."""
    store = _store(url, run_id, slot)
    fetched = store.fetch_newest(into)
    if as_json:
        older = sorted(set(store.kept()) - set(fetched))
        found = {"url": url, "run_id": run_id, "slot": slot, "into": str(into)}
        click.echo(json.dumps(found | {"fetched": fetched, "skipped": older}))
        return
    click.echo(f"{len(fetched)} fetched")


def _store(url: str, run_id: str, slot: str) -> Any:
    entry = LazyEntry("paceline.runs.objects", "CheckpointStore", extra="objectstore")
    store: Any = load_entry({"objectstore": entry}, "objectstore", port="checkpoint store")
    return store(url, run_id=run_id, slot=slot)
