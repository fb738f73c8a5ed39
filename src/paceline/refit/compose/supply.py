"""What a run's keys mean for moving bytes: TLS of its own, signatures, and the swarm."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paceline import system
from paceline.core.address import is_loopback, told_as
from paceline.core.errors import PreflightError, UsageError
from paceline.refit.compose.data import DataPlane, open_source
from paceline.refit.compose.keys import DATA_NAME
from paceline.refit.control import auth
from paceline.refit.control.protocol import ReplicaBoard
from paceline.refit.manifest.signature import (
    Statement,
    parse_signed,
    sign_manifest,
    signing_key,
    trust_in,
    verify_key,
)
from paceline.refit.model import WeightVersion

if TYPE_CHECKING:
    from paceline.refit.receiver.install import Supply

REGION_VARIABLE = "PACELINE_REGION"
"""Environment variable that says which machines reach each other cheaply."""

RELAY_PORT_VARIABLE = "PACELINE_RELAY_PORT"
"""Environment variable that says where to serve on, on machines that open few ports."""
PORT_MAX = 65535

ALONE = frozenset({"", "local"})
"""Regions that are this computer."""


def with_run_tls(plane: DataPlane, credentials: auth.Credentials, parts: ExitStack) -> DataPlane:
    """Return the data plane with this run's certificate, if it has one and no other is named.

    Its files are private and go with ``parts``. Raises PreflightError.
    """
    if not credentials.data_certificate or plane.certificate or plane.trusted:
        return plane
    folder = Path(parts.enter_context(TemporaryDirectory(prefix="paceline-data-")))
    certificate, key = folder / "data.crt", folder / "data.key"
    auth.write_private(certificate, credentials.data_certificate.encode("ascii"))
    auth.write_private(key, credentials.data_key.encode("ascii"))
    return replace(
        plane, certificate=certificate, key=key, trusted=certificate, server_name=DATA_NAME
    )


def signer(credentials: auth.Credentials) -> Callable[[bytes, Statement], bytes] | None:
    """Return what signs manifests, None without a key. Raises PreflightError."""
    if not credentials.signing_key:
        return None
    try:
        key = signing_key(credentials.signing_key)
    except ValueError as exc:
        raise PreflightError(f"the credentials hold an unfit signing_key: {exc}") from exc
    return lambda data, statement: sign_manifest(data, statement, key=key)


def check_of(version: WeightVersion, credentials: auth.Credentials) -> Callable[[bytes], None]:
    """Return what refuses a manifest that the run did not sign for a version. VerifyError."""

    def check(data: bytes) -> None:
        if credentials.verify_key:
            trust_in(version, verify_key(credentials.verify_key)).check(parse_signed(data))

    return check


def relay_port(environ: Mapping[str, str]) -> int:
    """Return where this engine serves on what it fetched; 0 is any port. Raises UsageError."""
    text = environ.get(RELAY_PORT_VARIABLE, "0")
    if not text.isdecimal() or int(text) > PORT_MAX:
        raise UsageError(f"{RELAY_PORT_VARIABLE} is {text!r}; write a port, or 0 for any")
    return int(text)


def may_serve_on(plane: DataPlane, region: str) -> bool:
    """Say whether it pays to serve on: over HTTP, where others can reach this host.

    Loopback is one computer only; with RDMA or a bucket before HTTP no uplink is narrow.
    """
    is_http = plane.transports[0] == "http"
    return is_http and (region in ALONE or not is_loopback(told_as(plane.host)))


def open_supply(
    credentials: auth.Credentials,
    plane: DataPlane,
    *,
    board: ReplicaBoard | None,
    worker_id: str,
    parts: ExitStack,
) -> "Supply":
    """Return from whom an engine takes its weights besides the trainer, and whom it believes.

    Args:
        credentials: this engine's.
        plane: with this run's TLS; if nobody can read from its host, nothing is served on and
            nobody else is asked.
        board: where receivers tell each other what they have; None: there is no such place.
        worker_id: this engine's.
        parts: what is opened is closed with them.

    Raises:
        PreflightError: it cannot listen, or the credentials are unfit.
        UsageError: the port in the environment is none.
    """
    from paceline.refit.receiver.install import Supply
    from paceline.refit.receiver.spread import Spread
    from paceline.refit.receiver.swarm import Swarm, SwarmOptions

    try:
        key = verify_key(credentials.verify_key) if credentials.verify_key else None
    except ValueError as exc:
        raise PreflightError(f"the credentials hold an unfit verify_key: {exc}") from exc
    region = system.environ().get(REGION_VARIABLE, "")
    if board is None or not may_serve_on(plane, region):
        return Supply(verify_key=key)
    server = open_source(
        replace(plane, transports=("http",), port=relay_port(system.environ())),
        token=lambda: credentials.data_token,
        name=f"{worker_id}-relay",
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
