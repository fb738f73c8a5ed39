"""The verbs that look at runs and end them: ls, status, logs, down, gc, cost."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from paceline.core.errors import ExitStatus, UsageError
from paceline.core.text import printable
from paceline.rental import InstanceState, NotProvenGoneError, backend_names
from paceline.rental.costs import By, CostRow
from paceline.rental.drivers.ending import Proof
from paceline.rental.records import Machine
from paceline.runs import compose
from paceline.runs.bootstrap import Guest
from paceline.runs.compose import Services
from paceline.runs.ledger import RunRecord
from paceline.runs.model import Slot
from paceline.runs.owner import owner_pid
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
@click.argument("run_id", metavar="RUN")
@_json_option
def status(*, run_id: str, as_json: bool) -> None:
    """Show one run: how it stands, its machines, what its report says."""
    with compose.open_services() as services:
        record = services.ledger.get(run_id)
        machines = [_machine_json(machine) for machine in services.rental.machines(run_id)]
        found = _run_json(services, record) | {"machines": machines}
    if as_json:
        click.echo(json.dumps(found))
        return
    for key, value in found.items():
        if key not in {"machines", "summary"} and value is not None:
            click.echo(printable(f"{key:<12} {value}"))
    _table(machines, ("role", "index", "backend", "state", "dph", "label"), "no machines")


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--role", help="Which role; may be left away when there is one.")
@click.option("--index", default=0, show_default=True, help="Which of the role's machines.")
@click.option("-f", "--follow", is_flag=True, help="Go on while the role runs.")
def logs(*, run_id: str, role: str | None, index: int, follow: bool) -> int:
    """Show the log of a role, from its machine or, after the run, from what was pulled."""
    with compose.open_services() as services:
        record = services.ledger.get(run_id)
        machines = services.rental.machines(run_id)
        names = sorted({m.role for m in machines} | _pulled_roles(record))
        slot = Slot(role=role or _only(names, run_id), index=index)
        machine = next((m for m in machines if (m.role, m.index) == (slot.role, index)), None)
        if machine is not None and _is_running(services, machine):
            return _stream_log(services, machine, Guest(run_id=run_id, slot=slot), follow=follow)
    path = Path(record.out) / "logs" / f"{slot}.log"
    if not path.is_file():
        raise UsageError(f"no log of {slot} in {path.parent}; roles: {', '.join(names) or 'none'}")
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            click.echo(line, nl=False)
    return ExitStatus.OK


@click.command()
@click.argument("run_id", metavar="RUN")
def down(*, run_id: str) -> None:
    """End RUN and all its machines; returns when they have been seen gone."""
    with compose.open_services() as services:
        proofs = end_run(services, run_id, clock=services.clock)
    _tell_proofs(proofs)
    click.echo(f"{run_id} is over and its machines are gone")


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
@click.argument("run_id", metavar="RUN", required=False)
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
    }


def _left_over_json(machine: LeftOver) -> dict[str, object]:
    return asdict(machine) | {"is_ours": machine.is_ours}


def _run_json(services: Services, record: RunRecord) -> dict[str, object]:
    pid = owner_pid(services.run_dir(record.run_id))
    state = record.outcome.value if record.outcome else ("running" if pid else "left behind")
    return {
        "run_id": record.run_id,
        "state": state,
        "driver_pid": pid,
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


def _pulled_roles(record: RunRecord) -> set[str]:
    found = (Path(record.out) / "logs").glob("*-*.log")
    return {path.stem.rpartition("-")[0] for path in found}


def _only(names: list[str], run_id: str) -> str:
    if len(names) != 1:
        raise UsageError(
            f"run {run_id} has the roles {', '.join(names) or 'none'}; name one: --role"
        )
    return names[0]


def _is_running(services: Services, machine: Machine) -> bool:
    if machine.instance is None:
        return False
    state = services.backend_of(machine.backend).status(machine.instance).state
    return state == InstanceState.RUNNING


def _stream_log(services: Services, machine: Machine, guest: Guest, *, follow: bool) -> int:
    log = guest.path("logs", f"{guest.slot}.log")
    command = f"exec tail -n +1 {'-F' if follow else ''} {log}"
    backend = services.backend_of(machine.backend)
    backend.run_remote(machine.handle, command, stream=True)
    return ExitStatus.OK


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
