"""``paceline completion``: the script that makes a shell complete our verbs and options."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL; evaluate it in the shell's start-up file."""
    from paceline.cli.main import cli

    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"click knows no completion for {shell}")
    click.echo(found(cli, {}, "paceline", "_PACELINE_COMPLETE").source())
