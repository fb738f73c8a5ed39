"""``paceline hosts`` and ``paceline why``: what is remembered, and why a machine was taken."""

import json
from typing import Any

import click

from paceline.cli.completion import run_ids
from paceline.core.errors import UsageError
from paceline.core.text import printable
from paceline.rental.failover import Block, FailureKind, Scope
from paceline.rental.hosts import HostRecord
from paceline.runs import compose

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def hosts() -> None:
    """What is remembered of hosts, and what is passed over."""


@hosts.command("ls")
@_json_option
def hosts_ls(*, as_json: bool) -> None:
    """List what became of machines, by host, and what is passed over until when."""
    with compose.open_services() as services:
        now_s = services.clock.time()
        known = services.rental.memory.hosts()
        blocks = services.rental.memory.blocks(now_s=now_s)
    rows = [_host_json(known[key], now_s) for key in sorted(known)]
    passed_over = [_block_json(block, now_s) for block in blocks]
    if as_json:
        click.echo(json.dumps({"hosts": rows, "passed_over": passed_over}))
        return
    for row in rows:
        boot = "-" if row["boot_s"] is None else f"{row['boot_s']:.0f} s"
        told = f"{row['backend']} {row['host']}: {row['num_used']} used, {row['num_failed']} failed"
        click.echo(printable(f"{told}, boot {boot}{row['last'] and '; ' + row['last']}"))
    for row in passed_over:
        what = f"{row['scope']} {row['name']}".strip()
        hours = row["left_s"] / 3600
        line = f"passed over for {hours:.1f} h: {row['backend']} {what}: {row['kind']}: "
        click.echo(printable(line + row["reason"]))
    if not rows and not passed_over:
        click.echo("nothing is remembered")


@hosts.command("block")
@click.argument("backend")
@click.argument("host")
@click.option("--days", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True)
@click.option("--reason", default="by hand", show_default=True)
@_json_option
def hosts_block(*, backend: str, host: str, days: float, reason: str, as_json: bool) -> None:
    """Pass over HOST of BACKEND, as `hosts ls` and `offers --json` name it."""
    with compose.open_services() as services:
        services.backend_of(backend)
        block = Block(
            scope=Scope.HOST,
            backend=backend,
            name=host,
            place="",
            kind=FailureKind.REJECTED,
            reason=reason,
            until_s=services.clock.time() + days * 86_400,
        )
        services.rental.memory.block(block)
        told = _block_json(block, services.clock.time())
    text = f"{backend} {host} is passed over for {days:g} days"
    click.echo(json.dumps(told) if as_json else text)


@hosts.command("forget")
@click.argument("backend", required=False)
@click.argument("host", required=False)
@click.option("--all", "is_all", is_flag=True, help="Everything.")
@_json_option
def hosts_forget(*, backend: str | None, host: str | None, is_all: bool, as_json: bool) -> None:
    """Forget HOST of BACKEND, or all of BACKEND, and pass nothing over for it any more."""
    if (backend is None) != is_all:
        raise UsageError("name a BACKEND and perhaps a HOST, or say --all")
    with compose.open_services() as services:
        count = services.rental.memory.forget(backend=backend, host=host)
    text = f"{count} records are forgotten"
    click.echo(json.dumps({"num_forgotten": count}) if as_json else text)


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@_json_option
def why(*, run_id: str, as_json: bool) -> None:
    """Show the plan from which each machine of RUN was taken, and what was passed over."""
    with compose.open_services() as services:
        services.ledger.get(run_id)
        found: list[Any] = services.rental.why(run_id)
    if as_json:
        click.echo(json.dumps(found))
        return
    for plan in found:
        click.echo(printable(f"{plan['slot']}: {plan['gpu']}{' spot' if plan['spot'] else ''}"))
        for offer in plan["attempts"]:
            click.echo(printable(f"  {_offer(offer)}"))
        for left in plan["passed_over"]:
            click.echo(printable(f"  passed over: {_offer(left)}: {', '.join(left['reasons'])}"))
        for one in plan["relaxations"]:
            click.echo(printable(f"  to be had: {one}"))
    if not found:
        click.echo("nothing was planned")


def _offer(found: Any) -> str:
    if found["offer"] is None:
        return str(found["backend"])
    return f"{found['backend']} {found['offer']} at {found['dph']:.3f} $/h"


def _host_json(record: HostRecord, now_s: float) -> dict[str, Any]:
    outcomes = record.recent(now_s)
    failures = [one for one in outcomes if one.failure is not None]
    last = failures[-1] if failures else None
    return {
        "backend": record.backend,
        "host": record.host,
        "num_used": len(outcomes) - len(failures),
        "num_failed": len(failures),
        "boot_s": record.boot_s(now_s),
        "last": "" if last is None else f"{last.failure}: {last.reason}",
    }


def _block_json(block: Block, now_s: float) -> dict[str, Any]:
    return {
        "scope": block.scope.value,
        "backend": block.backend,
        "name": block.name,
        "kind": block.kind.value,
        "reason": block.reason,
        "left_s": block.until_s - now_s,
    }
