"""``paceline control``: run the control service by itself."""

import json
import signal
import threading
from pathlib import Path
from types import FrameType

import click

from paceline.core.errors import ExitStatus


@click.group()
def control() -> None:
    """The service that knows which weight versions there are and who reads them."""


@control.command()
@click.option(
    "--listen", default="127.0.0.1:8001", show_default=True, help="HOST:PORT; port 0: any."
)
@click.option(
    "--store",
    default="memory",
    show_default=True,
    help="memory; sqlite:PATH to outlive restarts; redis://HOST:PORT/DB to share.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    required=True,
    help="JSON object of tokens by role, mode 0600.",
)
@click.option(
    "--create-tokens", is_flag=True, help="Write fresh tokens if the file does not exist."
)
@click.option(
    "--insecure-plaintext", is_flag=True, help="Admit an address that other machines reach."
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON object.")
def serve(
    *,
    listen: str,
    store: str,
    token_file: Path,
    create_tokens: bool,
    insecure_plaintext: bool,
    as_json: bool,
) -> int:
    """Serve until SIGTERM or Ctrl-C; print the address once it answers."""
    from paceline.refit import compose

    if create_tokens and not token_file.exists():
        compose.create_token_file(token_file)
    stopping = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    service = compose.start_control_server(
        token_file=token_file, store=store, listen=listen, allow_plaintext=insecure_plaintext
    )
    try:
        shown = {"address": service.address}
        click.echo(json.dumps(shown) if as_json else f"control service at {service.address}")
        stopping.wait()
    finally:
        service.stop()
    return int(ExitStatus.OK)
