"""The control service and the way to it: stores, tokens, server, client."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline import system
from paceline.core.clock import Clock
from paceline.core.errors import PreflightError, UsageError
from paceline.refit.control import auth
from paceline.refit.control.protocol import ControlPlane
from paceline.store.protocol import Store

UID_BYTES = 4
"""Eight hex digits, as the public protocol's service gives out."""

TOKEN_BYTES = 32


def open_store(url: str, *, clock: Clock) -> Store:
    """Return the store that ``url`` names: ``memory`` or ``sqlite:PATH``.

    Raises:
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
    raise UsageError(f"{url!r} is no store; write memory or sqlite:PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlService:
    """A running control service."""

    address: str
    """Where clients reach it, with the real port."""
    _stop: Callable[[float], None]

    def stop(self, grace_s: float = 2.0) -> None:
        """End it and close its store; idempotent."""
        self._stop(grace_s)


def start_control_server(
    *,
    token_file: Path,
    store: str = "memory",
    listen: str = "127.0.0.1:0",
    allow_plaintext: bool = False,
    clock: Clock | None = None,
) -> ControlService:
    """Serve the control plane in a background thread of this process until ``stop``.

    Args:
        token_file: tokens by role; read again when it is replaced.
        store: ``memory`` or ``sqlite:PATH``; with the latter a restart loses nothing.
        listen: ``host:port``; port 0 takes a free one.
        allow_plaintext: admit an address that other machines reach, without TLS.
        clock: decides expiry; the computer's own by default.

    Raises:
        UsageError, PreflightError, StoreError: bad address, taken port, unreadable tokens,
            unusable store. Nothing is left running.
    """
    from paceline.refit.control.ledger import ControlLedger
    from paceline.refit.control.service import ControlServer

    tokens = auth.TokenFile(token_file)
    ledger = ControlLedger(
        open_store(store, clock=clock or system.system_clock()),
        nonce=partial(system.new_nonce, UID_BYTES),
    )
    with ExitStack() as undo:
        undo.callback(ledger.close)
        server = ControlServer(
            ledger, tokens=tokens, listen=listen, allow_plaintext=allow_plaintext
        )
        address = server.start()
        undo.pop_all()

    def stop(grace_s: float) -> None:
        server.stop(grace_s)
        ledger.close()

    return ControlService(address=address, _stop=stop)


def connect_control(
    address: str,
    *,
    token: str | None = None,
    token_file: Path | None = None,
    timeout_s: float = 30.0,
    allow_plaintext: bool = False,
) -> ControlPlane:
    """Return the control plane at ``address``; the first call connects.

    Args:
        address: ``host:port``.
        token: this process's control token.
        token_file: the service's own token file instead, for whoever may read it: its operator.
        timeout_s: of one call, retries included.
        allow_plaintext: admit an address on another machine, without TLS.

    Raises:
        UsageError: not exactly one of ``token`` and ``token_file``, or no address.
        PreflightError: the token would leave this computer in plain text.
    """
    from paceline.refit.control.address import require_loopback
    from paceline.refit.control.client import GrpcControlPlane

    if not allow_plaintext:
        require_loopback(address, why="the token would travel")
    return GrpcControlPlane(
        address,
        token=_token_source(token, token_file),
        clock=system.system_clock(),
        chance=system.chance,
        timeout_s=timeout_s,
    )


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
