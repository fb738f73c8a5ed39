"""A rollout engine of a run: model, receiver and routes in one process."""

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline import system
from paceline.core.clock import Clock
from paceline.core.errors import UsageError
from paceline.core.registry import load_entry
from paceline.refit.compose.control import load_credentials
from paceline.refit.compose.data import (
    DataPlane,
    data_plane,
    open_reader,
)
from paceline.refit.compose.following import open_control, replica_board_of
from paceline.refit.compose.supply import open_supply, with_run_tls
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import ControlUnavailableError
from paceline.refit.generators.protocol import (
    EngineConfig,
    EngineHealth,
    GeneratorEngineAdapter,
    RolloutEngine,
    held_of,
)
from paceline.refit.generators.registry import ENGINE_SERVERS, ROLLOUT_ENGINES

if TYPE_CHECKING:
    from paceline.refit.receiver.install import Installs
    from paceline.refit.receiver.loop import Receiver

RECEIVER_STOP_S = 25.0
"""Longer than the read of one chunk may take."""

UPDATES = ("immediate", "drain", "abort")
"""Values of receiver.policy.UpdatePolicy, known without importing it."""

SEED_BYTES = 7
"""So that a fresh seed fits into 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServiceConfig:
    """What one rollout engine of a run is started with."""

    engine: EngineConfig
    control: str
    """Address of the control service, ``host:port``; or the URL of a bucket to follow instead."""
    model_name: str
    run_id: str
    engine_name: str = "transformers"
    """A name of the registry of rollout engines."""
    role: str = "rollout"
    index: int = 0
    """Which of the role's processes this is; with run, role and a nonce it makes the worker id."""
    host: str = "127.0.0.1"
    port: int = 0
    worker_id: str = ""
    """Of this lifetime; empty: a fresh one."""
    server_args: tuple[str, ...] = ()
    """Further arguments for an engine that brings its own server."""
    credentials: Path | None = None
    """None: where PACELINE_CREDENTIALS points."""
    update: str = "immediate"
    """What becomes of requests in flight when a version goes in: immediate, drain or abort."""
    drain_s: float = 10.0
    """How long ``drain`` waits for them before it aborts the rest. Longer than a registration
    lasts, and the engine is taken for gone meanwhile."""
    max_staleness: int | None = None
    """Sequences behind the newest at which the engine refuses to serve; None is no limit."""
    data: DataPlane | None = None
    """What weights are read through; None: as the environment says."""
    allow_plaintext: bool = False
    control_call_s: float = 5.0
    """Of one call: the receiver asks again anyway, and must notice when it is to stop."""
    control_wait_s: float = 30.0
    """How long the service may take to come up."""
    grace_s: float = 20.0
    """How long requests in flight may finish when the engine is stopped."""

    def __post_init__(self) -> None:
        for name in ("grace_s", "drain_s"):
            if not 0 <= getattr(self, name) < math.inf:
                word = name.removesuffix("_s")
                raise UsageError(f"{word} must be a finite number of seconds, 0 or more")
        if self.update not in UPDATES:
            raise UsageError(f"update is {self.update!r}; it can be {', '.join(UPDATES)}")


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


class RunningEngine(Protocol):
    """A rollout engine that was started, in this process or in one of its own."""

    endpoint: str
    worker_id: str

    def crash(self) -> str:
        """Return why it stopped by itself; empty while it works."""
        ...

    def stop(self) -> None:
        """Drain within the grace, then stop everything. Idempotent."""
        ...


def start_any_engine(config: EngineServiceConfig) -> RunningEngine:
    """Start an engine by name: in this process, or as the server that it brings along.

    Raises:
        UsageError, PreflightError: bad options, taken port, no model, no credentials.
        ControlError, DeadlineExceededError: it did not come up; nothing is left running.
    """
    if config.engine_name in ENGINE_SERVERS:
        from paceline.refit.compose.engine_process import start_engine_process

        _refuse_asked(config)
        return start_engine_process(config)
    if config.engine_name not in ROLLOUT_ENGINES:
        known = ", ".join(sorted({*ROLLOUT_ENGINES, *ENGINE_SERVERS}))
        raise UsageError(f"unknown rollout engine {config.engine_name!r}; known: {known}")
    return start_engine(config)


def _refuse_asked(config: EngineServiceConfig) -> None:
    """Refuse what only the engine in this process can be asked for. Raises UsageError."""
    asked = {
        "--weights": config.engine.weights != "auto",
        "--lora": config.engine.lora,
        "--draft-model": config.engine.draft_dir is not None,
        "--quantised": bool(config.engine.quantised),
    }
    if options := [option for option, is_asked in asked.items() if is_asked]:
        raise UsageError(f"engine {config.engine_name!r} does not know {', '.join(options)}")


def start_engine(config: EngineServiceConfig) -> EngineService:
    """Serve a rollout engine that follows its run, in background threads, until ``stop``.

    Returns as soon as the routes answer; until the first version is in they say ``loading``.

    Raises:
        UsageError, PreflightError: bad options, taken port, no model, no credentials.
        ControlError: the control service did not answer in time, or refused the token. Like
            after every other error, nothing is left running.
    """
    from paceline.refit.receiver.policy import UpdatePolicy
    from paceline.refit.receiver.updating import UpdateGate
    from paceline.refit.serving.app import ServingParts, build_app
    from paceline.refit.serving.server import EngineServer

    if config.server_args:
        raise UsageError(f"engine {config.engine_name!r} takes no arguments of a server")
    clock, credentials = system.system_clock(), load_credentials(config.credentials)
    with ExitStack() as parts:
        # The port first: it is the cheapest thing that can be wrong.
        server = EngineServer(host=config.host, port=config.port, clock=clock)
        parts.callback(server.close, timeout_s=1)
        control = control_of(config, credentials.control_token)
        parts.callback(control.close)
        engine_class: Any = load_entry(ROLLOUT_ENGINES, config.engine_name, port="rollout engine")
        settings = replace(config.engine, memory_bytes=system.memory_available())
        inner: RolloutEngine = engine_class(settings, clock=clock, new_seed=_new_seed)
        if not held_of(inner):
            _refuse_asked(config)
        engine = UpdateGate(
            inner, policy=UpdatePolicy(config.update), drain_s=config.drain_s, clock=clock
        )
        parts.callback(engine.close, timeout_s=10)
        receiver = receiver_for(config, control, engine, parts, endpoint=server.endpoint)
        app = build_app(
            ServingParts(
                engine=engine,
                model_name=config.model_name,
                token=credentials.data_token,
                health=receiver.health,
                figures=receiver.figures,
                newest=lambda: receiver.newest,
                clock=clock,
                new_id=system.new_nonce,
            )
        )
        register_patiently(receiver, clock=clock, timeout_s=config.control_wait_s)
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


def control_of(config: EngineServiceConfig, token: str) -> ControlPlane:
    """Return the service that the engine follows, or the bucket. Raises as connect_control."""
    return open_control(
        config.control,
        token=token,
        run_id=config.run_id,
        data=config.data,
        timeout_s=config.control_call_s,
        allow_plaintext=config.allow_plaintext,
    )


def receiver_for(
    config: EngineServiceConfig,
    control: ControlPlane,
    engine: GeneratorEngineAdapter,
    parts: ExitStack,
    *,
    endpoint: str,
    installer: "Installs | None" = None,
) -> "Receiver":
    """Return the receiver of an engine; what it needs beside is closed with ``parts``."""
    from paceline.refit.receiver.loop import Receiver, ReceiverConfig
    from paceline.refit.receiver.standing import StalenessBound

    clock, credentials = system.system_clock(), load_credentials(config.credentials)
    name = config.worker_id or new_worker_id(config)
    plane = config.data or data_plane(system.environ(), run_id=config.run_id)
    plane = with_run_tls(plane, credentials, parts)
    reader = open_reader(plane, token=lambda: credentials.data_token, name=f"{name}-sink")
    parts.callback(reader.close)
    supply = None
    if installer is None:  # else the bytes come to other processes, which are supplied there
        supply = open_supply(
            credentials,
            plane,
            board=replica_board_of(config.control, control),
            worker_id=name,
            parts=parts,
        )
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
        supply=supply,
        installer=installer,
    )


def new_worker_id(config: EngineServiceConfig) -> str:
    """Return a name for one lifetime of an engine."""
    return f"{config.run_id}-{config.role}-{config.index}-{system.new_nonce()}"


def register_patiently(receiver: "Receiver", *, clock: Clock, timeout_s: float) -> None:
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
