"""The composition root of refit: the only place that picks stores, clients and servers."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import system
from paceline.core.clock import Clock
from paceline.core.errors import PreflightError, UsageError
from paceline.core.registry import LazyEntry, load_entry
from paceline.refit.control import auth
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import ControlError, ControlUnavailableError
from paceline.refit.generators.protocol import EngineConfig, EngineHealth, RolloutEngine
from paceline.refit.generators.registry import ROLLOUT_ENGINES
from paceline.refit.model import Event, ObjectStorageSource, TrainerStagingMode, WeightPayloadFormat
from paceline.refit.trainers.registry import TRAINER_ENGINES
from paceline.refit.transports.registry import OBJECT_READERS, OBJECT_SERVERS
from paceline.store.protocol import Store

if TYPE_CHECKING:
    from paceline.refit.control.client import GrpcControlPlane
    from paceline.refit.control.tls import KeyPair, TlsFiles
    from paceline.refit.control.worker import ManifestServer
    from paceline.refit.publisher import Publisher
    from paceline.refit.receiver.loop import Receiver
    from paceline.refit.rollouts import RolloutClient

log = logging.getLogger(__name__)
_E = TypeVar("_E", bound=Enum)

UID_BYTES = 4
"""Eight hex digits, as the public protocol's service gives out."""

TOKEN_BYTES = 32

REDIS_SCHEMES = ("redis", "rediss", "unix")

RECEIVER_STOP_S = 25.0
"""Longer than the read of one chunk may take."""

SEED_BYTES = 7
"""So that a fresh seed fits into 63 bits."""


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
    from paceline.refit.control.address import join_address, split_address

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
) -> "GrpcControlPlane":
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
    from paceline.refit.control.address import require_loopback
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
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServiceConfig:
    """What one rollout engine of a run is started with."""

    engine: EngineConfig
    control: str
    """Address of the control service, ``host:port``."""
    model_name: str
    run_id: str
    engine_name: str = "transformers"
    """A name of the registry of rollout engines."""
    role: str = "rollout"
    index: int = 0
    """Which of the role's processes this is; with run, role and a nonce it makes the worker id."""
    host: str = "127.0.0.1"
    port: int = 0
    credentials: Path | None = None
    """None: where PACELINE_CREDENTIALS points."""
    max_staleness: int | None = None
    """Sequences behind the newest at which the engine refuses to serve; None is no limit."""
    transport: str = "http"
    allow_plaintext: bool = False
    control_call_s: float = 5.0
    """Of one call: the receiver asks again anyway, and must notice when it is to stop."""
    control_wait_s: float = 30.0
    """How long the service may take to come up."""
    grace_s: float = 20.0
    """How long requests in flight may finish when the engine is stopped."""


class EngineService:
    """A running rollout engine: model, receiver and routes."""

    def __init__(
        self, *, endpoint: str, worker_id: str, receiver: "Receiver", parts: ExitStack
    ) -> None:
        self.endpoint = endpoint
        self.worker_id = worker_id
        self._receiver = receiver
        self._parts = parts

    def health(self) -> EngineHealth:
        """Return what the engine says of itself."""
        return self._receiver.health()

    def crash(self) -> str:
        """Return why the receiver stopped by itself; empty while it works."""
        return self._receiver.crash

    def stop(self) -> None:
        """Drain within the grace, then stop everything. Idempotent.

        Raises:
            DeadlineExceededError: a part did not stop in time; the others did.
        """
        self._parts.close()


def start_engine(config: EngineServiceConfig) -> EngineService:
    """Serve a rollout engine that follows its run, in background threads, until ``stop``.

    Returns as soon as the routes answer; until the first version is in they say ``loading``.

    Raises:
        UsageError, PreflightError: bad options, taken port, no model, no credentials.
        ControlError: the control service did not answer in time, or refused the token. Like
            after every other error, nothing is left running.
    """
    from paceline.refit.serving.app import ServingParts, build_app
    from paceline.refit.serving.server import EngineServer

    clock, credentials = system.system_clock(), load_credentials(config.credentials)
    with ExitStack() as parts:
        # The port first: it is the cheapest thing that can be wrong.
        server = EngineServer(host=config.host, port=config.port, clock=clock)
        parts.callback(server.close, timeout_s=1)
        control = connect_control(
            config.control,
            token=credentials.control_token,
            timeout_s=config.control_call_s,
            allow_plaintext=config.allow_plaintext,
        )
        parts.callback(control.close)
        engine_class: Any = load_entry(ROLLOUT_ENGINES, config.engine_name, port="rollout engine")
        engine: RolloutEngine = engine_class(config.engine, clock=clock, new_seed=_new_seed)
        parts.callback(engine.close, timeout_s=10)
        receiver = _receiver_for(config, control, engine, parts, endpoint=server.endpoint)
        app = build_app(
            ServingParts(
                engine=engine,
                model_name=config.model_name,
                token=credentials.data_token,
                health=receiver.health,
                figures=receiver.figures,
                clock=clock,
                new_id=system.new_nonce,
            )
        )
        _register(receiver, clock=clock, timeout_s=config.control_wait_s)
        server.start(app, grace_s=config.grace_s)
        parts.callback(receiver.stop, timeout_s=RECEIVER_STOP_S)
        receiver.start()
        parts.callback(server.close, timeout_s=config.grace_s + 5)
        parts.callback(receiver.drain)
        return EngineService(
            endpoint=server.endpoint,
            worker_id=receiver.worker_id,
            receiver=receiver,
            parts=parts.pop_all(),
        )


def _receiver_for(
    config: EngineServiceConfig,
    control: ControlPlane,
    engine: RolloutEngine,
    parts: ExitStack,
    *,
    endpoint: str,
) -> "Receiver":
    from paceline.refit.receiver.loop import Receiver, ReceiverConfig
    from paceline.refit.receiver.standing import StalenessBound

    clock, credentials = system.system_clock(), load_credentials(config.credentials)
    reader_class: Any = load_entry(OBJECT_READERS, config.transport, port="transport")
    reader = reader_class(token=lambda: credentials.data_token, clock=clock, chance=system.chance)
    parts.callback(reader.close)
    name = f"{config.run_id}-{config.role}-{config.index}-{system.new_nonce()}"
    return Receiver(
        ReceiverConfig(
            worker_id=name,
            model_name=config.model_name,
            run_id=config.run_id,
            endpoint=endpoint,
            bound=StalenessBound(versions=config.max_staleness),
        ),
        control=control,
        engine=engine,
        reader=reader,
        clock=clock,
        chance=system.chance,
    )


def _register(receiver: "Receiver", *, clock: Clock, timeout_s: float) -> None:
    """Register, waiting for a service that is not up yet; a refused token is final."""
    deadline = clock.monotonic() + timeout_s
    while True:
        try:
            receiver.register()
        except ControlUnavailableError:
            if clock.monotonic() >= deadline:
                raise
            clock.sleep(0.5)
        else:
            return


def _new_seed() -> int:
    return int(system.new_nonce(SEED_BYTES), 16)


def connect_rollouts(
    control: ControlPlane,
    *,
    model_name: str,
    run_id: str,
    max_staleness: int,
    credentials: Path | None = None,
) -> "RolloutClient":
    """Return a client of the run's rollout engines, as the control service knows them.

    Args:
        control: of the caller, who closes it after the client.
        model_name: what the engines serve.
        run_id: whose versions count.
        max_staleness: how many sequences behind the newest an engine may be.
        credentials: None: where PACELINE_CREDENTIALS points.

    Raises:
        PreflightError: no credentials.
    """
    from paceline.refit.rollouts import RolloutClient, RolloutConfig, fleet_of

    config = RolloutConfig(
        max_staleness=max_staleness,
        token=load_credentials(credentials).data_token,
        model_name=model_name,
    )
    return RolloutClient(
        config,
        fleet=fleet_of(control, model_name=model_name, run_id=run_id),
        clock=system.system_clock(),
        chance=system.chance,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a role process of a run is told through its environment."""

    run_id: str
    model_name: str
    control: str
    """Address of the control service, ``host:port``."""
    role: str = "trainer"
    index: int = 0
    payload_format: WeightPayloadFormat = WeightPayloadFormat.XOR_DELTA
    staging_mode: TrainerStagingMode = TrainerStagingMode.COPY_TO_HOST
    anchor_every: int = 8
    max_staleness: int = 2
    host: str = "127.0.0.1"
    """Where this process listens, and how others reach it."""
    out: Path = Path("out")
    """What is written there is pulled when the run ends."""


def run_settings(environ: Mapping[str, str]) -> RunSettings:
    """Read the PACELINE_ variables of a role process.

    Raises:
        PreflightError: one that is needed is missing.
        UsageError: one says something that it cannot say.
    """
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise PreflightError(
            f"this process is not part of a run: {', '.join(missing)} not set; start it from a job "
            "file with `paceline up`, or set what docs/guides/refit-alone.md lists"
        )
    given = {
        field: convert(environ[name])
        for name, (field, convert) in _VARIABLES.items()
        if environ.get(name)
    }
    return RunSettings(**given)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as exc:
        raise UsageError(f"{text!r} in a PACELINE_ variable is no whole number") from exc


def _payload(text: str) -> WeightPayloadFormat:
    return _member(WeightPayloadFormat, text)


def _staging(text: str) -> TrainerStagingMode:
    return _member(TrainerStagingMode, text)


def _member(enum: type[_E], text: str) -> _E:
    try:
        return enum(text)
    except ValueError as exc:
        known = ", ".join(str(each.value) for each in enum)
        raise UsageError(f"{text!r} in a PACELINE_ variable is none of {known}") from exc


_NEEDED = ("PACELINE_RUN_ID", "PACELINE_MODEL", "PACELINE_CONTROL")
_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "PACELINE_RUN_ID": ("run_id", str),
    "PACELINE_MODEL": ("model_name", str),
    "PACELINE_CONTROL": ("control", str),
    "PACELINE_ROLE": ("role", str),
    "PACELINE_INDEX": ("index", _number),
    "PACELINE_PAYLOAD": ("payload_format", _payload),
    "PACELINE_STAGING": ("staging_mode", _staging),
    "PACELINE_ANCHOR_EVERY": ("anchor_every", _number),
    "PACELINE_MAX_STALENESS": ("max_staleness", _number),
    "PACELINE_HOST": ("host", str),
    "PACELINE_OUT": ("out", Path),
}


class TrainerConnection:
    """A trainer process's ways into its run: publish weights, get rollouts, tell what happens."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        control: ControlPlane,
        credentials: auth.Credentials,
        parts: ExitStack,
    ) -> None:
        self.settings = settings
        self.worker_id = f"{settings.run_id}-{settings.role}-{settings.index}-{system.new_nonce()}"
        self._control = control
        self._credentials = credentials
        self._parts = parts
        self._clock = system.system_clock()

    @property
    def out(self) -> Path:
        """Where artifacts go; made on first use."""
        self.settings.out.mkdir(parents=True, exist_ok=True)
        return self.settings.out

    def publisher(
        self, tensors: object, *, wire_dtypes: Mapping[str, str] | None = None
    ) -> "Publisher":
        """Return a publisher of ``tensors`` that is not started yet: enter it, or call start().

        Args:
            tensors: a ``torch.nn.Module`` or a mapping name -> tensor.
            wire_dtypes: glob over names -> dtype word, e.g. ``{"*": "BF16"}`` for fp32 masters
                behind bf16 engines. Nothing is cast that is not named here.

        Raises:
            MissingExtraError: torch is not installed.
            PreflightError: the port cannot be listened on.
            ValueError: the tensors or the policy do not fit.
        """
        from paceline.refit.publisher import Publisher, PublisherOptions

        trainer_class: Any = load_entry(TRAINER_ENGINES, "torch", port="trainer engine")
        trainer = trainer_class(clock=self._clock, wire_dtypes=wire_dtypes)
        trainer.bind_tensors(tensors)
        server_class: Any = load_entry(OBJECT_SERVERS, "http", port="transport")
        server = server_class(token=lambda: self._credentials.data_token, host=self.settings.host)
        self._parts.callback(server.close)
        return Publisher(
            control=self._control,
            trainer=trainer,
            source=server,
            clock=self._clock,
            options=PublisherOptions(
                model_name=self.settings.model_name,
                run_id=self.settings.run_id,
                worker_id=self.worker_id,
                staging_mode=self.settings.staging_mode,
                payload_format=self.settings.payload_format,
                anchor_every=self.settings.anchor_every,
            ),
            notify=self.notify,
        )

    def rollouts(self) -> "RolloutClient":
        """Return a client of the run's rollout engines; closed with the connection."""
        from paceline.refit.rollouts import RolloutClient, RolloutConfig, fleet_of

        client = RolloutClient(
            RolloutConfig(
                max_staleness=self.settings.max_staleness,
                token=self._credentials.data_token,
                model_name=self.settings.model_name,
            ),
            fleet=fleet_of(
                self._control, model_name=self.settings.model_name, run_id=self.settings.run_id
            ),
            clock=self._clock,
            chance=system.chance,
        )
        self._parts.callback(client.close)
        return client

    def notify(self, name: str, fields: Mapping[str, object]) -> None:
        """Tell the run of an event, see telemetry/events.py; a lost one is logged, no more."""
        event = Event(
            worker_id=self.worker_id,
            name=name,
            at_unix_ms=int(self._clock.time() * 1000),
            fields=dict(fields),
        )
        try:
            self._control.record_event(event)
        except ControlError as exc:
            log.warning("event %s was not recorded: %s", name, exc)


@contextmanager
def join_run(settings: RunSettings | None = None) -> Iterator[TrainerConnection]:
    """Connect this trainer process to its run, as the environment names it.

    Raises:
        PreflightError: not part of a run, or no credentials.
        UsageError: a variable or address is malformed.
    """
    settings = settings or run_settings(system.environ())
    credentials = load_credentials()
    with ExitStack() as parts:
        control = connect_control(settings.control, token=credentials.control_token)
        parts.callback(control.close)
        yield TrainerConnection(settings, control=control, credentials=credentials, parts=parts)
