"""What trainers and engines share in moving bytes: TLS of the data plane, signatures, the swarm."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from paceline import system
from paceline.core.errors import PreflightError
from paceline.core.registry import LazyEntry, load_entry
from paceline.refit.compose.keys import DATA_NAME
from paceline.refit.control import auth
from paceline.refit.control.address import is_loopback
from paceline.refit.control.protocol import ReplicaBoard
from paceline.refit.manifest.signature import Statement, sign_manifest, signing_key, verify_key
from paceline.refit.transports.registry import OBJECT_SERVERS

if TYPE_CHECKING:
    from paceline.refit.receiver.install import Supply

REGION_VARIABLE = "PACELINE_REGION"
"""Environment variable that says which machines reach each other cheaply."""

ALONE = frozenset({"", "local"})
"""Regions that are this computer."""

_OPTIONS = {
    "server": LazyEntry("paceline.refit.transports.http.server", "HttpServerOptions"),
    "tls": LazyEntry("paceline.refit.transports.http.server", "HttpTlsFiles"),
    "reader": LazyEntry("paceline.refit.transports.http.reader", "HttpReaderOptions"),
}


def http_server_options(credentials: auth.Credentials, parts: ExitStack) -> Any:
    """Return options that serve over TLS if the credentials have a certificate.

    Its files are private and go with ``parts``. Raises PreflightError.
    """
    made: Any = load_entry(_OPTIONS, "server", port="http option")
    if not credentials.data_certificate:
        return made()
    tls: Any = load_entry(_OPTIONS, "tls", port="http option")
    folder = Path(parts.enter_context(TemporaryDirectory(prefix="paceline-data-")))
    certificate, key = folder / "data.crt", folder / "data.key"
    auth.write_private(certificate, credentials.data_certificate.encode("ascii"))
    auth.write_private(key, credentials.data_key.encode("ascii"))
    return made(tls=tls(certificate=certificate, key=key))


def http_reader_options(credentials: auth.Credentials) -> Any:
    """Return options that believe this run's own servers, and nobody else over TLS."""
    made: Any = load_entry(_OPTIONS, "reader", port="http option")
    if not credentials.data_certificate:
        return made()
    trusted = credentials.data_certificate.encode("ascii")
    return made(trusted=trusted, server_name=DATA_NAME)


def signer(credentials: auth.Credentials) -> Callable[[bytes, Statement], bytes] | None:
    """Return what signs manifests, None without a key. Raises PreflightError."""
    if not credentials.signing_key:
        return None
    try:
        key = signing_key(credentials.signing_key)
    except ValueError as exc:
        raise PreflightError(f"the credentials hold an unfit signing_key: {exc}") from exc
    return lambda data, statement: sign_manifest(data, statement, key=key)


def may_serve_on(host: str, region: str) -> bool:
    """Say whether others can reach a server on ``host``: loopback is one computer only."""
    return region in ALONE or not is_loopback(host)


def open_supply(
    credentials: auth.Credentials,
    *,
    board: ReplicaBoard,
    worker_id: str,
    host: str,
    parts: ExitStack,
) -> "Supply":
    """Return from whom an engine takes its weights besides the trainer, and whom it believes.

    Args:
        credentials: this engine's.
        board: where receivers tell each other what they have.
        worker_id: this engine's.
        host: where to serve on what was fetched; if nobody can reach that, it is not served,
            and nobody else is asked.
        parts: what is opened is closed with them.

    Raises:
        PreflightError: it cannot listen, or the credentials are unfit.
    """
    from paceline.refit.receiver.install import Supply
    from paceline.refit.receiver.spread import Spread
    from paceline.refit.receiver.swarm import Swarm, SwarmOptions

    try:
        key = verify_key(credentials.verify_key) if credentials.verify_key else None
    except ValueError as exc:
        raise PreflightError(f"the credentials hold an unfit verify_key: {exc}") from exc
    region = system.environ().get(REGION_VARIABLE, "")
    if not may_serve_on(host, region):
        return Supply(verify_key=key)
    server_class: Any = load_entry(OBJECT_SERVERS, "http", port="transport")
    server = server_class(
        token=lambda: credentials.data_token,
        host=host,
        options=http_server_options(credentials, parts),
    )
    parts.callback(server.close)
    swarm = Swarm(
        board=board,
        server=server,
        worker_id=worker_id,
        clock=system.system_clock(),
        options=SwarmOptions(region=region),
    )
    return Supply(verify_key=key, spread=Spread(swarm))
