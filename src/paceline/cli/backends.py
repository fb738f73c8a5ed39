"""``paceline backends``: who rents machines."""

import json

import click

from paceline.core.errors import MissingExtraError
from paceline.rental import SupportsListing, backend_names, load_backend


@click.group()
def backends() -> None:
    """Who rents machines."""


@backends.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def backends_ls(*, as_json: bool) -> None:
    """List every backend, and whether it can say which machines it runs for you."""
    rows: list[dict[str, object]] = []
    for name in backend_names():
        try:
            listing = issubclass(load_backend(name), SupportsListing)
        except MissingExtraError as exc:
            rows.append({"name": name, "lists_machines": None, "needs": str(exc)})
        else:
            rows.append({"name": name, "lists_machines": listing, "needs": None})
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        can = "can list its machines" if row["lists_machines"] else "cannot list its machines"
        click.echo(f"{row['name']:<14} {row['needs'] or can}")
