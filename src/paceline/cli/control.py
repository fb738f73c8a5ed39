"""``paceline control``: run the control service by itself."""

import json
from pathlib import Path
from typing import TypedDict, Unpack

import click

from paceline.cli.stopping import stop_signals
from paceline.core.errors import ExitStatus, UsageError


class _ServeOptions(TypedDict):
    listen: str
    store: str
    token_file: Path
    tls_cert: Path | None
    tls_key: Path | None
    insecure_plaintext: bool
    metrics_listen: str | None


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
    "--tls-cert", type=click.Path(path_type=Path), help="PEM certificate chain to serve with."
)
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its PEM private key.")
@click.option(
    "--insecure-plaintext", is_flag=True, help="Admit an address that other machines reach."
)
@click.option("--metrics-listen", help="HOST:PORT for Prometheus; default: no metrics.")
@click.option(
    "--drain-s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="How long to say NOT_SERVING before ending, for balancers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON object.")
def serve(
    *, create_tokens: bool, drain_s: float, as_json: bool, **options: Unpack[_ServeOptions]
) -> int:
    """Serve until SIGTERM or Ctrl-C; print the address once it answers. Logs are JSON lines."""
    from paceline.refit import compose
    from paceline.refit.control.tls import TlsFiles
    from paceline.telemetry.log import log_as_json

    certificate, key = options["tls_cert"], options["tls_key"]
    if (certificate is None) is not (key is None):
        raise UsageError("--tls-cert and --tls-key go together")
    if create_tokens and not options["token_file"].exists():
        compose.create_token_file(options["token_file"])
    with stop_signals() as stopping:
        log_as_json()
        service = compose.start_control_server(
            token_file=options["token_file"],
            store=options["store"],
            listen=options["listen"],
            allow_plaintext=options["insecure_plaintext"],
            tls=TlsFiles(certificate=certificate, key=key) if certificate and key else None,
            metrics_listen=options["metrics_listen"],
        )
        try:
            shown = {"address": service.address, "metrics": service.metrics_address}
            click.echo(json.dumps(shown) if as_json else f"control service at {service.address}")
            stopping.wait()
        finally:
            service.stop(drain_s=drain_s)
    return int(ExitStatus.OK)
