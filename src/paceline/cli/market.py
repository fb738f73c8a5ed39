"""``paceline offers`` and ``paceline check``: what there is to rent, and who lets us in."""

import json

import click

from paceline.core.errors import ExitStatus, UsageError
from paceline.core.text import told_by
from paceline.rental import Offer, OfferConstraints, backend_names
from paceline.rental.compose import check_credentials, survey_offers
from paceline.rental.market import NUM_OFFERS_MAX, Survey

TIMEOUT_S = 30.0


@click.command()
@click.option("--gpu", required=True, help="What, such as h100-1x or cpu-1x.")
@click.option("--backend", "backends", multiple=True, help="Where; a list with commas; else all.")
@click.option("--max-dph", type=float, help="Highest price, US dollars per hour and machine.")
@click.option("--disk-gb", type=click.IntRange(0), default=20, show_default=True, help="Disk.")
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=TIMEOUT_S,
    show_default=True,
    help="Seconds that a backend has for its answer.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, NUM_OFFERS_MAX),
    default=30,
    show_default=True,
    help="How many to show; --json shows all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def offers(  # noqa: PLR0913 - one parameter per option
    *,
    gpu: str,
    backends: tuple[str, ...],
    max_dph: float | None,
    disk_gb: int,
    timeout: float,
    limit: int,
    as_json: bool,
) -> int:
    """Ask all backends at once what they have; prices are for the machine with its disk."""
    constraints = OfferConstraints(gpu, min_disk_gb=disk_gb, max_dph=max_dph)
    found = survey_offers(_names(backends), constraints, timeout_s=timeout)
    for note in found.notes:
        word = "warning: " if note.is_failure else ""
        click.echo(word + told_by(note.backend, _one_line(note.message)), err=True)
    if as_json:
        click.echo(json.dumps(_as_json(found)))
    else:
        _show(found.offers, limit=limit)
    return _status_of(found, gpu)


@click.command()
@click.option("--backend", "backends", multiple=True, help="Which; a list with commas; else all.")
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=TIMEOUT_S,
    show_default=True,
    help="Seconds that a backend has for its answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def check(*, backends: tuple[str, ...], timeout: float, as_json: bool) -> int:
    """Show for every backend whether it lets you in, with what, and what to do if not.

    Exits with 0 when at least one of the backends can be used, and, where some are named, all.
    """
    reports = check_credentials(_names(backends), timeout_s=timeout)
    rows: list[dict[str, object]] = [
        {
            "backend": name,
            "is_valid": report.is_valid,
            "found_in": report.found_in,
            "account": report.account,
            "balance_usd": report.balance_usd,
            "advice": report.advice,
        }
        for name, report in reports
    ]
    if as_json:
        click.echo(json.dumps(rows))
    else:
        for row in rows:
            click.echo(_told(row))
    valid = [report.is_valid for _, report in reports]
    return ExitStatus.OK if (all(valid) if backends else any(valid)) else ExitStatus.PREFLIGHT


def _names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the backends that are meant, each once. Raises UsageError for an unknown one."""
    known = backend_names()
    asked = [name for text in given for name in text.split(",") if name]
    for name in asked:
        if name not in known:
            raise UsageError(f"unknown backend {name!r}; known: {', '.join(known)}")
    return tuple(dict.fromkeys(asked)) or known


def _status_of(found: Survey, gpu: str) -> ExitStatus:
    """Say, where there is nothing, whether that is what the backends answered."""
    if found.offers:
        return ExitStatus.OK
    if all(note.is_failure for note in found.notes):
        click.echo(f"no backend said what there is of {gpu}; see paceline check", err=True)
        return ExitStatus.PREFLIGHT
    click.echo(f"nothing on offer fits {gpu}", err=True)
    return ExitStatus.PROVISION


def _as_json(found: Survey) -> dict[str, object]:
    return {
        "offers": [_row(offer) for offer in found.offers],
        "notes": [
            {
                "backend": note.backend,
                "message": note.message,
                "is_failure": note.is_failure,
                "silence": note.silence,
            }
            for note in found.notes
        ],
        "wall_s": {name: round(wall_s, 3) for name, wall_s in found.wall_s.items()},
    }


def _row(offer: Offer) -> dict[str, object]:
    return {
        "backend": offer.backend,
        "id": offer.id,
        "gpu": offer.gpu_name,
        "num_gpus": offer.num_gpus,
        "gpu_total_ram_gb": offer.gpu_total_ram_gb,
        "dph": offer.dph,
        "disk_space_gb": round(offer.disk_space_gb, 1),
        "inet_down_mbps": offer.inet_down_mbps,
        "reliability": offer.reliability,
        "geolocation": offer.geolocation,
    }


def _show(found: tuple[Offer, ...], *, limit: int) -> None:
    from rich.console import Console
    from rich.table import Table

    if not found:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("$/h", "backend", "offer", "gpu", "RAM GB", "disk GB", "where"):
        table.add_column(name, justify="right" if name in ("$/h", "RAM GB", "disk GB") else "left")
    for offer in found[:limit]:
        table.add_row(
            f"{offer.dph:.3f}",
            offer.backend,
            offer.id,
            f"{offer.num_gpus}x {offer.gpu_name}",
            str(offer.gpu_total_ram_gb),
            f"{offer.disk_space_gb:.0f}",
            offer.geolocation,
        )
    Console(width=120, highlight=False, markup=False).print(table)
    if len(found) > limit:
        click.echo(f"and {len(found) - limit} more; --limit shows them", err=True)


def _told(row: dict[str, object]) -> str:
    word = "ok" if row["is_valid"] else "no"
    money = row["balance_usd"]
    facts = [row["found_in"], row["account"]]
    facts += [f"balance {money:.2f} USD"] if isinstance(money, float | int) else []
    facts += [_one_line(str(row["advice"]))]
    return f"{row['backend']!s:<14} {word:<3} {'; '.join(str(fact) for fact in facts if fact)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
