"""``paceline backends``: who rents machines."""

import json

import click

from paceline.rental import SupportsListing, backend_names, load_backend


@click.group()
def backends() -> None:
    """Who rents machines."""


@backends.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def backends_ls(*, as_json: bool) -> None:
    """List every backend, and whether it can say which machines it runs for you."""
    rows = []
    for name in backend_names():
        adapter = load_backend(name)()
        rows.append({"name": name, "lists_machines": isinstance(adapter, SupportsListing)})
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        listing = "can list its machines" if row["lists_machines"] else "cannot list its machines"
        click.echo(f"{row['name']:<14} {listing}")
