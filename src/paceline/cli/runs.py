"""The verbs that look at runs and end them: ls, status, down, gc, cost."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from paceline.cli.completion import run_ids
from paceline.core.errors import UsageError
from paceline.core.text import printable
from paceline.rental import NotProvenGoneError, backend_names
from paceline.rental.costs import By, CostRow
from paceline.rental.drivers.ending import Proof
from paceline.rental.records import Machine
from paceline.runs import compose
from paceline.runs.compose import Services
from paceline.runs.ledger import RunRecord
from paceline.runs.links import read_links
from paceline.runs.live import LIVE_NAME, read_live
from paceline.runs.owner import owner_of
from paceline.runs.upkeep import (
    MIN_AGE_S,
    NUM_ENDED_MAX,
    Ended,
    EndRule,
    Found,
    LeftOver,
    close_ended,
    end_left_overs,
    end_run,
    find_left_overs,
)

WATCH_EVERY_S = 2.0
ROLE_COLUMNS = (
    "role",
    "index",
    "phase",
    "restarts",
    "machines_lost",
    "last_cause",
    "checkpoint",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@_json_option
def ls(*, as_json: bool) -> None:
    """List machines that are on record and not proven gone."""
    with compose.open_services() as services:
        rows = [_machine_json(machine) for machine in services.rental.machines()]
    if as_json:
        click.echo(json.dumps(rows))
        return
    _table(rows, ("run_id", "role", "index", "backend", "state", "dph", "label"), "no machines")


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.option("--watch", is_flag=True, help="Show it again and again while somebody drives it.")
@_json_option
def status(*, run_id: str, watch: bool, as_json: bool) -> None:
    """Show one run: how it stands, its roles, machines and links, what its report says."""
    with compose.open_services() as services:
        while True:
            found = _status(services, run_id)
            _show_status(found, as_json=as_json)
            if not watch or found["driver"] is None:
                return
            services.clock.sleep(WATCH_EVERY_S)
            click.echo("" if as_json else "-" * 40)


def _status(services: Services, run_id: str) -> dict[str, Any]:
    run_dir = services.run_dir(run_id)
    found = _run_json(services, services.ledger.get(run_id))
    is_driven = found["driver"] is not None
    return {
        **found,
        "live": read_live(run_dir / LIVE_NAME) if is_driven else None,
        "machines": [_machine_json(machine) for machine in services.rental.machines(run_id)],
        "links": read_links(run_dir),
    }


def _show_status(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found))
        return
    for key, value in found.items():
        if key not in {"machines", "links", "summary", "live"} and value is not None:
            told = f"{value:.4f}" if isinstance(value, float) else value
            click.echo(printable(f"{key:<12} {told}"))
    if found["live"] is not None:
        _table(found["live"]["roles"], ROLE_COLUMNS, "no roles")
    columns = ("role", "index", "backend", "state", "dph", "label", "net")
    _table(found["machines"], columns, "no machines")
    if found["links"]:
        _table(found["links"], ("source", "target", "mode", "why"), "")


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.option("--dry-run", is_flag=True, help="Say what would be ended, and stop.")
@_json_option
def down(*, run_id: str, dry_run: bool, as_json: bool) -> None:
    """End RUN and all its machines; returns when they have been seen gone."""
    with compose.open_services() as services:
        if dry_run:
            services.ledger.get(run_id)
            rows = [_machine_json(machine) for machine in services.rental.machines(run_id)]
            _show_doomed(run_id, rows, as_json=as_json)
            return
        proofs = end_run(services, run_id, clock=services.clock)
    if as_json:
        found = {"run_id": run_id, "ended": True, "proofs": [asdict(proof) for proof in proofs]}
        click.echo(json.dumps(found))
        return
    _tell_proofs(proofs)
    click.echo(f"{run_id} is over and its machines are gone")


def _show_doomed(run_id: str, rows: list[dict[str, object]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"run_id": run_id, "ended": False, "machines": rows}))
    else:
        _table(rows, ("role", "index", "backend", "state", "dph", "label"), "no machines")


@click.command()
@click.option("--yes", is_flag=True, help="End what is found.")
@click.option("--strays", is_flag=True, help="With --yes: also what is on no record here.")
@click.option(
    "--min-age",
    type=click.FloatRange(0),
    default=MIN_AGE_S / 60,
    show_default=True,
    help="Minutes; a younger stray is left alone.",
)
@click.option(
    "--max-kill",
    type=click.IntRange(1),
    default=NUM_ENDED_MAX,
    show_default=True,
    help="End nothing where it would be more than so many.",
)
@_json_option
def gc(*, yes: bool, strays: bool, min_age: float, max_kill: int, as_json: bool) -> None:
    """Find machines of runs that nobody drives, on every backend; with --yes end them.

    Machines with our label that are on no record of this computer are shown as unknown, and ended
    only with --strays: another computer may be driving them. Machines without a label of ours are
    counted and never ended.
    """
    rule = EndRule(with_unknown=strays, min_age_s=min_age * 60, num_max=max_kill)
    with compose.open_services() as services:
        found = find_left_overs(services, backend_names())
        result = end_left_overs(services, found, rule) if yes else Ended(proofs=(), failures=())
        if not found.machines:
            close_ended(services)
    if as_json:
        click.echo(json.dumps(_gc_json(found, result, is_ended=yes)))
    else:
        _tell_gc(found, result, yes=yes)
    if result.failures:
        raise NotProvenGoneError("; ".join(str(failure) for failure in result.failures))


def _gc_json(found: Found, result: Ended, *, is_ended: bool) -> dict[str, object]:
    return {
        "machines": [_left_over_json(machine) for machine in found.machines],
        "ended": is_ended and not result.failures,
        "proofs": [asdict(proof) for proof in result.proofs],
        "foreign": dict(found.num_foreign),
        "problems": found.problems,
    }


def _tell_gc(found: Found, result: Ended, *, yes: bool) -> None:
    rows = [_left_over_json(machine) for machine in found.machines]
    columns = ("whose", "run_id", "backend", "state", "dph", "label")
    _table(rows, columns, "nothing is left behind")
    for name, count in found.num_foreign.items():
        click.echo(f"{name}: {count} machines that are not ours are left alone", err=True)
    for problem in found.problems:
        click.echo(printable(problem), err=True)
    _tell_proofs(result.proofs)
    if any(machine.is_ours for machine in found.machines) and not yes:
        click.echo("end what is ours with: paceline gc --yes", err=True)
    if not all(machine.is_ours for machine in found.machines):
        click.echo(
            "what is unknown may be another computer's; if it is not: paceline gc --yes --strays",
            err=True,
        )


def _tell_proofs(proofs: Sequence[Proof]) -> None:
    for proof in proofs:
        click.echo(printable(f"gone: {proof}"), err=True)


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=run_ids, required=False)
@click.option("--by", type=click.Choice([by.value for by in By]), help="Add up over this.")
@click.option("--actual", is_flag=True, help="Also ask the providers what they have billed.")
@_json_option
def cost(*, run_id: str | None, by: str | None, actual: bool, as_json: bool) -> None:
    """Show what RUN has cost so far, at most; without RUN what all runs have."""
    if actual and run_id is None:
        raise UsageError("--actual asks about every machine of one run; name the RUN")
    group = By(by) if by else (By.RUN if run_id is None else By.ROLE)
    with compose.open_services() as services:
        if run_id is not None:
            services.ledger.get(run_id)
        rows = services.rental.cost_rows(group, run_id)
        billed = services.rental.billed(run_id) if actual and run_id is not None else []
    usd = sum(row.usd for row in rows)
    if as_json:
        found = {"cost_usd": usd, "by": group.value, "rows": [asdict(row) for row in rows]}
        bills = [asdict(one) | {"difference_usd": one.difference_usd} for one in billed]
        click.echo(json.dumps({"run_id": run_id, **found, "billed": bills}))
        return
    if by or run_id is None:
        cells = [_cost_cells(row) for row in rows]
        _table(cells, (group.value, "machines", "hours", "usd"), "nothing was rented")
    click.echo(f"{usd:.4f} USD")
    for one in billed:
        theirs = "-" if one.theirs_usd is None else f"{one.theirs_usd:.4f}"
        more = "" if one.difference_usd is None else f", {one.difference_usd:+.4f}"
        note = f" ({one.note})" if one.note else ""
        line = f"{one.label}: ours {one.ours_usd:.4f}, billed {theirs}{more}{note}"
        click.echo(printable(line))


def _cost_cells(row: CostRow) -> dict[str, object]:
    return {
        **{by.value: row.name for by in By},
        "machines": row.num_machines,
        "hours": f"{row.hours:.2f}",
        "usd": f"{row.usd:.4f}",
    }


def _machine_json(machine: Machine) -> dict[str, object]:
    return {
        "run_id": machine.run_id,
        "role": machine.role,
        "index": machine.index,
        "backend": machine.backend,
        "instance_id": machine.instance.instance_id if machine.instance else None,
        "state": machine.state.value,
        "dph": machine.offer.dph,
        "label": machine.label,
        "since": machine.intended_at,
        "net": machine.net,
    }


def _left_over_json(machine: LeftOver) -> dict[str, object]:
    return asdict(machine) | {"is_ours": machine.is_ours}


def _run_json(services: Services, record: RunRecord) -> dict[str, object]:
    owner = owner_of(services.run_dir(record.run_id), clock=services.clock)
    state = record.outcome.value if record.outcome else ("running" if owner else "left behind")
    return {
        "run_id": record.run_id,
        "state": state,
        "driver_pid": owner.pid if owner and owner.is_here else None,
        "driver": str(owner) if owner else None,
        "reason": record.reason or None,
        "out": record.out,
        "report": record.report,
        "cost_usd": services.rental.cost_usd(record.run_id),
        "summary": _summary(record),
    }


def _summary(record: RunRecord) -> object:
    """Return what the report says; it is the user's file, who may have moved or changed it."""
    if record.report is None or not Path(record.report).is_file():
        return None
    try:
        return json.loads(Path(record.report).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        click.echo(printable(f"{record.report} is not a report any more: {exc}"), err=True)
        return None


def _table(rows: list[dict[str, object]], columns: tuple[str, ...], nothing: str) -> None:
    if not rows:
        click.echo(nothing)
        return
    cells = [[_cell(row, column) for column in columns] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(columns)]
    for line in (list(columns), *cells):
        click.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))


def _cell(row: Mapping[str, object], column: str) -> str:
    value = row[column]
    return "-" if value is None else str(value)
