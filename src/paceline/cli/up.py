"""``paceline up`` and ``paceline run``: one run, from a job file or from one command."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paceline.cli.completion import run_ids
from paceline.cli.progress import is_interactive, watcher_for
from paceline.cli.streams import ReaderGoneError
from paceline.core.errors import ExitStatus, PreflightError, UsageError
from paceline.core.text import printable, told_by
from paceline.rental import NoOffersError, backend_names
from paceline.rental.compose import check_credentials
from paceline.runs import compose
from paceline.runs.adopt import JobSource
from paceline.runs.charts import bytes_text
from paceline.runs.cleaning import CleanUp
from paceline.runs.compose import Order, Services
from paceline.runs.model import FREE_BACKENDS, JobSpec
from paceline.runs.offers import PlanRow, patient_rows, total_dph, worst_of
from paceline.runs.outcome import RunResult

NOTE_WIDTH_MAX = 120
CHECK_TIMEOUT_S = 20.0


def _duration(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Read ``2h``; what a job file takes as a duration."""
    from paceline.runs.sections import duration_s

    try:
        found = None if text is None else duration_s(float(text) if text.isdigit() else text)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc
    return float(found) if isinstance(found, int | float) else None


_retry_option = click.option(
    "--retry-until-up",
    metavar="DURATION",
    callback=_duration,
    help="Where nothing can be had, look again for so long, such as 30m or 8h.",
)


@click.command()
@click.argument("job", type=click.Path(path_type=Path), required=False)
@click.option("--resume", metavar="RUN", help="Take up a run whose driver is gone; without JOB.")
@click.option("--yes", is_flag=True, help="Rent without a question.")
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
@click.option("--run-id", help="Name of this run; otherwise one is made.")
@click.option("--out", type=click.Path(path_type=Path), help="Directory for logs and the report.")
@click.option("--verbose", is_flag=True, help="Tell also what Paceline's own parts log.")
@_retry_option
def up(  # noqa: PLR0913 - one parameter per option
    *,
    job: Path | None,
    resume: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    run_id: str | None,
    out: Path | None,
    verbose: bool,
    retry_until_up: float | None,
) -> int:
    """Run the job file JOB to its end: rent, set up, train, roll out, report, tear down."""
    if verbose:
        _show_logs()
    if (job is None) == (resume is None):
        raise UsageError("give a job file, or --resume RUN for a run that is there already")
    if resume is not None:
        return _resume(resume, as_json=as_json)
    spec, source = compose.read_job(Path(str(job)))
    with compose.open_services() as services:
        _say_who_is_asked(spec)
        if dry_run:
            _show_plan(_planned(services, spec, retry_for_s=None), as_json=as_json)
            return ExitStatus.OK
        with _cleaning_up(services, spec) as heard:
            plan = _planned(services, spec, retry_for_s=retry_until_up)
            _show_plan(plan, as_json=False)
            _agree(plan, yes=yes)
            order = _order(spec, source, run_id=run_id, out=out, retry_for_s=retry_until_up)
            return _execute(services, replace(order, heard=heard), as_json=as_json)


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
def attach(*, run_id: str, as_json: bool) -> int:
    """Take up RUN, whose driver is gone, and drive it to its end, as `up --resume RUN`."""
    return _resume(run_id, as_json=as_json)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--backend",
    "backends",
    multiple=True,
    help="Where; may be repeated. Without it every backend that lets you in is asked.",
)
@click.option("--gpu", required=True, help="What, such as h100-1x or cpu-1x.")
@click.option("--workdir", type=click.Path(path_type=Path), help="Directory to copy there.")
@click.option("--setup", help="Command to run before.")
@click.option("--budget-usd", type=float, help="Hard cap; needed where machines cost money.")
@click.option("--yes", is_flag=True, help="Rent without a question.")
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
@click.option("--run-id", help="Name of this run; otherwise one is made.")
@click.option("--out", type=click.Path(path_type=Path), help="Directory for logs and the report.")
@click.option("--spot", is_flag=True, help="A machine that may be taken back, and is cheap for it.")
@_retry_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(  # noqa: PLR0913 - one parameter per option
    *,
    backends: tuple[str, ...],
    gpu: str,
    workdir: Path | None,
    setup: str | None,
    budget_usd: float | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    run_id: str | None,
    out: Path | None,
    spot: bool,
    retry_until_up: float | None,
    command: tuple[str, ...],
) -> int:
    """Rent one machine, run COMMAND there, bring back what it leaves in out/, tear down.

    One argument is a line for the shell there, several are a program and its arguments.
    """
    names = backends or _usable(budget_usd)
    line = command[0] if len(command) == 1 else shlex.join(command)
    role: dict[str, object] = {"backend": list(names), "gpu": gpu, "run": line}
    # Whoever waits for one command sees how fast it is; measuring would take longer than some do.
    role |= {"net_floor_mbps": 0}
    role |= {"workdir": str(workdir.resolve())} if workdir else {}
    role |= {"setup": setup} if setup else {}
    role |= {"spot": True} if spot else {}
    spec, source = compose.job_of_command(role, budget_usd=budget_usd)
    with compose.open_services() as services:
        _say_who_is_asked(spec)
        if dry_run:
            _show_plan(_planned(services, spec, retry_for_s=None), as_json=as_json)
            return ExitStatus.OK
        with _cleaning_up(services, spec) as heard:
            _agree(_planned(services, spec, retry_for_s=retry_until_up, explain=False), yes=yes)
            order = _order(spec, source, run_id=run_id, out=out, retry_for_s=retry_until_up)
            order = replace(order, stream=not as_json, heard=heard)
            return _execute(services, order, as_json=as_json)


def _usable(budget_usd: float | None) -> list[str]:
    """Return the backends that let us in; without a budget only those that cost nothing."""
    names = backend_names()
    if budget_usd is None:
        names = tuple(name for name in names if name in FREE_BACKENDS)
        click.echo(f"without --budget-usd only {', '.join(names)} are asked", err=True)
    reports = check_credentials(names, timeout_s=CHECK_TIMEOUT_S)
    found = [name for name, report in reports if report.is_valid]
    if not found:
        said = "".join(f"\n  {told_by(name, ' '.join(r.advice.split()))}" for name, r in reports)
        raise PreflightError(f"none of {', '.join(names)} lets you in:{said}")
    return found


def _order(
    spec: JobSpec,
    source: JobSource,
    *,
    run_id: str | None,
    out: Path | None,
    retry_for_s: float | None,
) -> Order:
    run_id = run_id or compose.new_run_id(spec.name)
    where = out or compose.default_out(run_id)
    return Order(job=spec, run_id=run_id, out=where, source=source, retry_for_s=retry_for_s)


def _planned(
    services: Services, spec: JobSpec, *, retry_for_s: float | None, explain: bool = True
) -> list[PlanRow]:
    """Return the plan, waiting for one that can be had where that is asked for."""

    def tell(problem: NoOffersError, wait_s: float) -> None:
        click.echo(printable(f"{problem}\nlooking again in {wait_s:.0f} s"), err=True)

    return patient_rows(
        services, spec, clock=services.clock, retry_for_s=retry_for_s, tell=tell, explain=explain
    )


def _say_who_is_asked(spec: JobSpec) -> None:
    """Say what is waited for before it is: their pace, or a dead network, can make it last."""
    asked = sorted({name for role in spec.roles for name in role.backends} - FREE_BACKENDS)
    if asked:
        click.echo(f"asking {', '.join(asked)} what there is to rent", err=True)


def _execute(services: Services, order: Order, *, as_json: bool) -> int:
    watcher = watcher_for(order.run_id, is_plain=order.stream)
    watcher.note(f"run {order.run_id}")
    try:
        result = compose.execute(services, order, watcher=watcher)
    finally:
        watcher.close()
    return _told(result, as_json=as_json, is_short=order.stream)


def _resume(run_id: str, *, as_json: bool) -> int:
    watcher = watcher_for(run_id, is_plain=False)
    try:
        with compose.open_services() as services:
            result = compose.resume(services, run_id, watcher=watcher)
    finally:
        watcher.close()
    return _told(result, as_json=as_json, is_short=False)


def _told(result: RunResult, *, as_json: bool, is_short: bool) -> int:
    with suppress(ReaderGoneError):  # the status is the run's, whoever reads what it says
        _show_result(result, as_json=as_json, is_short=is_short)
    return result.status


@contextmanager
def _cleaning_up(services: Services, spec: JobSpec) -> Iterator[Callable[[str], None]]:
    """End what runs left behind whose driver is gone; yield who is to hear of what is rented."""
    cleaning = CleanUp(
        services,
        (name for role in spec.roles for name in role.backends),
        tell=lambda text: click.echo(printable(text), err=True),
    )
    cleaning.begin()
    is_stopped = False
    try:
        yield cleaning.heard
    except (KeyboardInterrupt, click.Abort):
        is_stopped = True
        raise
    finally:
        cleaning.finish(is_stopped=is_stopped)


def _agree(rows: list[PlanRow], *, yes: bool) -> None:
    """Ask before money is spent; what costs nothing is not asked about."""
    dph = total_dph(rows)
    if yes or dph == 0:
        return
    if not is_interactive():
        raise UsageError(f"this costs {dph:.2f} USD an hour and nobody can be asked; add --yes")
    click.confirm(f"Rent for {dph:.2f} USD an hour?", abort=True, err=True)


def _show_plan(rows: list[PlanRow], *, as_json: bool) -> None:
    if as_json:
        plan = [row.as_json() for row in rows]
        worst = asdict(worst_of(rows))
        click.echo(json.dumps({"plan": plan, "dph": total_dph(rows), "worst_case": worst}))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("role", "machines", "backend", "offer", "gpu"):
        table.add_column(name)
    table.add_column("$/h", justify="right")
    for row in rows:
        dph = f"{row.planned.best_dph:.2f}"
        gpu = f"{row.gpu} spot" if row.spot else row.gpu
        table.add_row(row.role, str(row.count), row.backend, row.offer_id, gpu, dph)
    table.add_row("total", "", "", "", "", f"{total_dph(rows):.2f}")
    Console(stderr=True, width=NOTE_WIDTH_MAX).print(table)
    for row in rows:
        for line in reasons_of(row):
            click.echo(printable(f"  {row.role}: {line}"), err=True)
    most = worst_of(rows)
    if most.hourly_usd > 0:
        hourly, startup = f"{most.hourly_usd:.2f} USD an hour", f"{most.startup_usd:.2f} USD"
        click.echo(f"at worst {hourly}, and {startup} until all machines run", err=True)


def reasons_of(row: PlanRow) -> list[str]:
    """Return what else there is for a role, line by line."""
    lines = [f"passed over: {one}" for one in row.passed_over]
    lines += [f"to be had: {one}" for one in row.relaxations]
    if row.alternatives:
        told = ", ".join(f"{one.backend} {one.offer_id} {one.dph:.3f}" for one in row.alternatives)
        lines.append(f"otherwise: {told} $/h")
    return lines


def _show_result(result: RunResult, *, as_json: bool, is_short: bool) -> None:
    if result.status is not ExitStatus.OK:
        click.echo(printable(f"paceline: {result.message}"), err=True)
    if as_json:
        error = {} if result.status is ExitStatus.OK else {"error": result.message}
        click.echo(json.dumps({**result.summary, "exit_status": int(result.status), **error}))
        return
    found = result.summary
    if found["versions_published"]:
        click.echo(weights_line(found))
    where = f"report {found['html']}"
    click.echo(f"{found['outcome']} after {found['wall_s']} s; {where}", err=is_short)


def weights_line(found: Mapping[str, Any]) -> str:
    """Return what became of the weights as one line."""
    parts = [
        f"{found['versions_published']} versions on {len(found['engines'])} engines",
        f"{found['mismatches']} digest mismatches",
    ]
    if found["full_bytes"]:
        share = found["delta_bytes"] / found["full_bytes"]
        parts.append(f"deltas {bytes_text(found['delta_bytes'])}, {share:.1%} of full weights")
    if found["reward_first5"] is not None:
        rewards = f"{found['reward_first5']:.3f} to {found['reward_last5']:.3f}"
        parts.append(f"mean reward from {rewards} (first and last 5 steps)")
    return "; ".join(parts)


def _show_logs() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
