"""``python -m paceline.testing.fakes vast --port N``: a provider on loopback, until interrupted."""

import sys
import tempfile
from pathlib import Path

import click

from paceline.system import system_clock
from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.machine import has_sshd
from paceline.testing.fakes.machines import SshMachines
from paceline.testing.fakes.registry import FAKES, serve_fake

_CHANCE = 0.2


@click.command()
@click.argument("provider", type=click.Choice(sorted(FAKES)))
@click.option("--port", type=int, default=0, help="Where to listen; 0 takes a free one.")
@click.option("--key", default="fake-key", show_default=True, help="The key that is accepted.")
@click.option("--seed", type=int, default=0, help="Of offers and of chance.")
@click.option("--boot-s", type=float, default=3.0, help="Seconds until a machine runs.")
@click.option("--ssh-port", type=int, help="Where the sshds listen; lambda and nebius need it.")
@click.option("--no-ssh", is_flag=True, help="Machines without an sshd behind them.")
@click.option(
    "--faults", default="", help="NAME[:CHANCE],...: what goes wrong, by chance 0.2 unless said."
)
def main(  # noqa: PLR0913 - the options
    *,
    provider: str,
    port: int,
    key: str,
    seed: int,
    boot_s: float,
    ssh_port: int | None,
    no_ssh: bool,
    faults: str,
) -> None:
    """Serve a fake PROVIDER and print how to use it."""
    with tempfile.TemporaryDirectory(prefix=f"paceline-fake-{provider}-") as root:
        machines = None if no_ssh or not has_sshd() else SshMachines(Path(root), port=ssh_port)
        fake = FAKES[provider]()(
            clock=system_clock(), key=key, seed=seed, machines=machines, boot_s=boot_s
        )
        _set_faults(fake, faults)
        try:
            with serve_fake(fake, port=port) as environ:
                for name, value in environ.items():
                    click.echo(f"export {name}={value}")
                sys.stdout.flush()
                _wait_for_interrupt()
        finally:
            fake.close()


def _set_faults(fake: FakeCloud, faults: str) -> None:
    for word in filter(None, faults.split(",")):
        name, _, chance = word.partition(":")
        try:
            fake.faults.set_chance(name, float(chance or _CHANCE))
        except ValueError as exc:
            raise click.BadParameter(str(exc), param_hint="--faults") from exc


def _wait_for_interrupt() -> None:
    clock = system_clock()
    try:
        while True:
            clock.sleep(3600)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
