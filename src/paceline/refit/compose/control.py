"""The control service and the way to it: stores, tokens, server, client."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import system
from paceline.core.clock import Clock
from paceline.core.errors import PreflightError, UsageError
from paceline.core.registry import LazyEntry, load_entry
from paceline.refit.compose.data import DataPlane
from paceline.refit.compose.manifests import ManifestReader
from paceline.refit.control import auth
from paceline.refit.control.protocol import ControlClient
from paceline.refit.manifest.parse import MANIFEST_BYTES_MAX
from paceline.refit.model import ObjectStorageSource
from paceline.store.protocol import Store

if TYPE_CHECKING:
    from paceline.refit.control.tls import KeyPair, TlsFiles
    from paceline.refit.control.worker import ManifestServer

log = logging.getLogger(__name__)
LEASE_VARIABLE = "PACELINE_LEASE"
"""Names the file that keeps a machine's dead-man switch from firing while it changes."""
UID_BYTES = 4
"""Eight hex digits, as the public protocol's service gives out."""

TOKEN_BYTES = 32

REDIS_SCHEMES = ("redis", "rediss", "unix")


def open_store(url: str, *, clock: Clock) -> Store:
    """Return the store that ``url`` names: ``memory``, ``sqlite:PATH`` or ``redis://...``.

    With Redis it is Redis's clock that decides expiry, and ``clock`` only carries it forward.

    Raises:
        MissingExtraError: Redis's client is not installed.
        UsageError: no such kind of store.
        StoreError: it cannot be used.
    """
    kind, _, rest = url.partition(":")
    if kind == "memory" and not rest:
        from paceline.store.memory import MemoryStore

        return MemoryStore(clock=clock)
    if kind == "sqlite" and rest:
        from paceline.store.sqlite import SqliteStore

        return SqliteStore(Path(rest), clock=clock)
    if kind in REDIS_SCHEMES and rest:
        redis_class: Any = load_entry(
            {kind: LazyEntry("paceline.store.redis", "RedisStore", extra="redis")},
            kind,
            port="store",
        )
        made: Store = redis_class(url, steady=clock)
        return made
    # Not the text itself: it may hold a password.
    raise UsageError(f"{kind!r} is no store; write memory, sqlite:PATH or redis://HOST:PORT/DB")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlService:
    """A running control service."""

    address: str
    """Where clients reach it, with the real port."""
    metrics_address: str
    """Where Prometheus scrapes it; empty if nowhere."""
    _stop: Callable[[float, float], None]

    def stop(self, grace_s: float = 2.0, *, drain_s: float = 0.0) -> None:
        """End it and close its store; idempotent.

        For ``drain_s`` it only says in its health check that it goes, so that balancers look
        elsewhere; then running calls get ``grace_s``.
        """
        self._stop(grace_s, drain_s)


def start_control_server(  # noqa: PLR0913 - options of their own, all but one with defaults
    *,
    token_file: Path,
    store: str = "memory",
    listen: str = "127.0.0.1:0",
    allow_plaintext: bool = False,
    clock: Clock | None = None,
    tls: "TlsFiles | None" = None,
    metrics_listen: str | None = None,
    collect: Callable[[ObjectStorageSource], None] | None = None,
) -> ControlService:
    """Serve the control plane in a background thread of this process until ``stop``.

    Args:
        token_file: tokens by role; read again when it is replaced.
        store: ``memory``, ``sqlite:PATH`` or ``redis://...``; the last is shared by replicas.
        listen: ``host:port``; port 0 takes a free one.
        allow_plaintext: admit an address that other machines reach, without TLS.
        clock: decides expiry; the computer's own by default, and Redis's with Redis.
        tls: certificate and key to serve with; read again when they are replaced.
        metrics_listen: ``host:port`` for Prometheus, in plain text; None for no metrics.
        collect: removes an object-storage version whose record is gone, and may be told of one
            twice; None leaves objects where they are.

    Raises:
        UsageError, PreflightError, StoreError: bad address, taken port, unreadable tokens or
            certificates, unusable store. Nothing is left running.
    """
    from paceline.refit.control.ledger import ControlLedger
    from paceline.refit.control.service import ControlServer, ServiceOptions

    tokens = auth.TokenFile(token_file)
    with ExitStack() as parts:
        ledger = ControlLedger(
            open_store(store, clock=clock or system.system_clock()),
            nonce=partial(system.new_nonce, UID_BYTES),
        )
        parts.callback(ledger.close)
        options = ServiceOptions(
            listen=listen, tls=tls, allow_plaintext=allow_plaintext, collect=collect
        )
        metrics_address = ""
        if metrics_listen is not None:
            metrics_address, observe = _serve_metrics(metrics_listen, parts)
            options = replace(options, observe=observe)
        server = ControlServer(ledger, tokens=tokens, options=options)
        address = server.start()
        running = parts.pop_all()

    def stop(grace_s: float, drain_s: float) -> None:
        server.stop(grace_s, drain_s=drain_s)
        running.close()

    return ControlService(address=address, metrics_address=metrics_address, _stop=stop)


def _serve_metrics(listen: str, parts: ExitStack) -> tuple[str, Callable[[str, str, float], None]]:
    """Answer scrapes until ``parts`` are closed; return where, and what to tell of each call."""
    from paceline.core.address import join_address, split_address

    metrics_class: Any = load_entry(
        {"prometheus": LazyEntry("paceline.telemetry.metrics", "ControlMetrics", extra="serve")},
        "prometheus",
        port="metrics",
    )
    metrics = metrics_class()
    host, port = split_address(listen)
    try:
        port, stop = metrics.serve(host, port)
    except OSError as exc:
        raise PreflightError(
            f"cannot serve metrics on {listen}: {exc.strerror}; choose another port"
        ) from exc
    parts.callback(stop)
    return join_address(host, port), metrics.observe


def connect_control(
    address: str,
    *,
    token: str | None = None,
    token_file: Path | None = None,
    timeout_s: float = 30.0,
    allow_plaintext: bool = False,
    trusted_file: Path | None = None,
) -> ControlClient:
    """Return the control plane at ``address``; the first call connects.

    Args:
        address: ``host:port``.
        token: this process's control token.
        token_file: the service's own token file instead, for whoever may read it: its operator.
        timeout_s: of one call, retries included.
        allow_plaintext: admit an address on another machine, without TLS.
        trusted_file: PEM certificate of the authority that the service's certificate is from;
            by default the file that PACELINE_CONTROL_CA names. Without either, plain text.

    Raises:
        UsageError: not exactly one of ``token`` and ``token_file``, or no address.
        PreflightError: the token would leave this computer in plain text, or the trusted file
            is unfit.
    """
    from paceline.core.address import require_loopback
    from paceline.refit.control.client import GrpcControlPlane
    from paceline.refit.control.tls import CA_VARIABLE, read_trusted

    named = system.environ().get(CA_VARIABLE)
    trusted_file = trusted_file or (Path(named) if named else None)
    if trusted_file is None and not allow_plaintext:
        require_loopback(address, why="the token would travel")
    return GrpcControlPlane(
        address,
        token=_token_source(token, token_file),
        clock=system.system_clock(),
        chance=system.chance,
        timeout_s=timeout_s,
        trusted=None if trusted_file is None else read_trusted(trusted_file),
        on_registered=_lease_keeper(),
    )


def _lease_keeper() -> Callable[[], None]:
    """Return what keeps this machine's dead-man switch from firing, where there is one.

    A role whose control service answers is not forgotten, whoever else sleeps.
    """
    named = system.environ().get(LEASE_VARIABLE)
    if not named:
        return lambda: None
    lease = Path(named)

    def renew() -> None:
        try:
            lease.write_text(system.new_nonce() + "\n", encoding="ascii")
        except OSError as exc:
            log.warning("the lease %s was not renewed: %s", lease, exc)

    return renew


def new_control_certificates(name: str, hosts: Sequence[str]) -> "tuple[KeyPair, KeyPair]":
    """Return a fresh authority for a run, and a certificate of it for its control service.

    Args:
        name: the run's, shown to people.
        hosts: names and addresses by which clients reach the service.
    """
    from datetime import UTC, datetime

    from paceline.refit.control.tls import issue, new_authority

    now = datetime.fromtimestamp(system.system_clock().time(), UTC)
    authority = new_authority(name, now=now)
    return authority, issue(authority, hosts, now=now)


def create_certificate_files(
    directory: Path, *, name: str, hosts: Sequence[str]
) -> "tuple[TlsFiles, Path]":
    """Write a fresh authority's certificate, and a service's certificate and key.

    The authority's own key is not kept: whoever needs another certificate makes another
    authority.

    Returns:
        What a service takes, and the file that its clients trust.

    Raises:
        PreflightError: they cannot be written.
    """
    from paceline.refit.control.tls import TlsFiles

    authority, issued = new_control_certificates(name, hosts)
    files = TlsFiles(certificate=directory / "control.crt", key=directory / "control.key")
    trusted = directory / "control-ca.crt"
    auth.write_private(files.key, issued.key)
    auth.write_private(files.certificate, issued.certificate)
    auth.write_private(trusted, authority.certificate)
    return files, trusted


MANIFEST_TIMEOUT_S = 10.0


def verify_version(
    plane: ControlClient, uid: str, *, credentials: auth.Credentials | None
) -> Sequence[str]:
    """Return what stands in the way of installing a version from nothing; empty if nothing does.

    Args:
        plane: of the caller.
        uid: the version.
        credentials: reads the manifests of all sources and compares their digests, and their
            signatures if they hold a key; None looks at the records only.

    Raises:
        NotFoundError: the version, or one that it stands on, is gone.
    """
    from paceline.refit.compose.supply import check_of, with_run_tls
    from paceline.refit.control.verify import check_chain, check_manifests

    chain = plane.get_chain(uid)
    shards = {version.uid: plane.list_shards(version.uid) for version in chain}
    problems = list(check_chain(chain, shards))
    if credentials is None:
        return problems
    with ExitStack() as parts:
        data = with_run_tls(DataPlane(), credentials, parts)
        token = credentials.data_token
        reader = ManifestReader(data, token=lambda: token)
        parts.callback(reader.close)
        read = partial(reader.read, size_max=MANIFEST_BYTES_MAX, timeout_s=MANIFEST_TIMEOUT_S)
        for version in chain:
            check = check_of(version, credentials)
            problems += check_manifests(shards[version.uid], read, check=check)
    return problems


def start_manifest_server(
    *, listen: str = "127.0.0.1:0", allow_plaintext: bool = False
) -> "ManifestServer":
    """Serve RefitWorkerService from this process until closed; see control.worker."""
    from paceline.refit.control.worker import ManifestServer

    return ManifestServer(listen=listen, allow_plaintext=allow_plaintext)


def _token_source(token: str | None, token_file: Path | None) -> Callable[[], str]:
    if token is not None and token_file is None:
        return lambda: token
    if token_file is not None and token is None:
        return partial(_operator_token, token_file)
    raise UsageError("the control service wants a token: give either a token or a token file")


def _operator_token(path: Path) -> str:
    # Read each time: a restarted service may have new tokens.
    tokens = auth.read_tokens(path)
    if auth.TokenRole.OPERATOR not in tokens:
        raise PreflightError(f"{path} holds no operator token; use a credentials file instead")
    return tokens[auth.TokenRole.OPERATOR]


def create_token_file(path: Path) -> dict[str, str]:
    """Write fresh tokens for all roles into ``path`` (mode 0600) and return them by role."""
    tokens = auth.new_tokens(partial(system.new_nonce, TOKEN_BYTES))
    texts = {role.value: token for role, token in tokens.items()}
    auth.write_private_json(path, texts)
    return texts


def load_credentials(path: Path | None = None) -> auth.Credentials:
    """Return this process's credentials, from ``path`` or where PACELINE_CREDENTIALS points.

    Raises:
        PreflightError: neither is given, or the file is unfit.
    """
    named = system.environ().get(auth.CREDENTIALS_VARIABLE)
    if path is None and not named:
        raise PreflightError(
            f"no credentials: set {auth.CREDENTIALS_VARIABLE} to the file that the run wrote for "
            f"this process, or name one"
        )
    return auth.load_credentials(path or Path(named or ""))
