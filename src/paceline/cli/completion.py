"""``paceline completion``: the script that makes a shell complete verbs, options and runs."""

import click
from click.shell_completion import get_completion_class

from paceline.core.errors import PacelineError


def run_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the runs on record that begin so; a shell that completes is told of no error."""
    from paceline.runs import compose

    try:
        with compose.open_services() as services:
            found = [record.run_id for record in services.ledger.list()]
    except PacelineError:
        return []
    return [run_id for run_id in found if run_id.startswith(incomplete)]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL; evaluate it in the shell's start-up file."""
    from paceline.cli.main import cli

    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"click knows no completion for {shell}")
    click.echo(found(cli, {}, "paceline", "_PACELINE_COMPLETE").source())
