"""Inside vLLM's own server: the receiver that drives its workers, and the routes of a run.

``RunMiddleware`` is named by ``--middleware``. It answers ``/health``, ``/metrics``, ``/v1/models``
and ``/v1/completions`` as every rollout engine does, with the versions behind each token. All other
routes stay vLLM's; they are let through while a version is served, and say which in headers.
"""

import asyncio
import hmac
import json
import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline import system
from paceline.core.errors import PreflightError
from paceline.core.registry import load_entry
from paceline.refit.compose.control import load_credentials
from paceline.refit.compose.engine import (
    RECEIVER_STOP_S,
    EngineServiceConfig,
    control_of,
    receiver_for,
    register_patiently,
)
from paceline.refit.generators.protocol import EngineConfig, EngineState
from paceline.refit.generators.registry import VLLM_PARTS
from paceline.refit.generators.workers import LinkConfig, WorkersEngine
from paceline.refit.receiver.fleet import WorkersInstaller
from paceline.refit.receiver.loop import Receiver
from paceline.refit.receiver.policy import UpdatePolicy
from paceline.refit.receiver.updating import UpdateGate
from paceline.refit.serving.app import ServingParts, build_app
from paceline.refit.serving.response import render_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

VARIABLE: Final = "PACELINE_VLLM"
"""Of the environment: what ``server_environment`` wrote."""

OWN_PATHS: Final = frozenset({"/health", "/metrics", "/v1/models", "/v1/completions"})
DRAIN_PATH: Final = "/paceline/drain"
VLLM_METRICS_PATH: Final = "/vllm/metrics"
"""Where vLLM's own figures are, since ``/metrics`` are the engine's."""

CLOSED_PATHS: Final = frozenset(
    {
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_checker",
        "/collective_rpc",
        "/pause",
        "/resume",
        "/sleep",
        "/wake_up",
        "/release_kv_cache_memory",
    }
)
"""Routes of vLLM's development mode that would change the weights behind the receiver's back."""

PARENT_LOOK_S: Final = 1.0
STAGE_TIMEOUT_S: Final = 3600.0
CALL_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What the middleware is told by whoever starts vLLM's server."""

    service: EngineServiceConfig
    endpoint: str
    """Where clients reach the server."""
    parent: int = 0
    """Process whose end ends the server; 0: none."""


def server_environment(settings: ServerSettings) -> dict[str, str]:
    """Return what the server's process must find in its environment. No secret is in it."""
    service = asdict(settings.service)
    service["engine"]["model_dir"] = str(settings.service.engine.model_dir)
    service["credentials"] = str(settings.service.credentials or "")
    rest = {name: getattr(settings, name) for name in ("endpoint", "parent")}
    return {VARIABLE: json.dumps({"service": service, **rest})}


def read_settings(text: str | None) -> ServerSettings:
    """Read what ``server_environment`` wrote. Raises PreflightError."""
    if not text:
        raise PreflightError(f"{VARIABLE} is not set; start this with `paceline serve`")
    said = json.loads(text)
    engine = said["service"].pop("engine")
    engine["model_dir"] = Path(engine["model_dir"])
    service = said["service"]
    service["credentials"] = Path(service["credentials"]) if service["credentials"] else None
    service["server_args"] = tuple(service["server_args"])
    config = EngineServiceConfig(engine=EngineConfig(**engine), **service)
    return ServerSettings(**{**said, "service": config})


class RunMiddleware:
    """Wraps vLLM's application; starts and stops with it."""

    def __init__(self, app: "ASGIApp") -> None:
        """Take vLLM's application, as Starlette does it."""
        self._app = app
        self._service: _Service | None = None

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer one scope of ASGI."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "http" and self._service is not None:
            await self._service.answer(self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        async def started(message: "Message") -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    await self._start(scope["app"].state.engine_client)
                except Exception as exc:  # noqa: BLE001 - ends the server, which says so
                    message = {"type": "lifespan.startup.failed", "message": str(exc)}
            await send(message)

        async def stopping() -> "Message":
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self._service is not None:
                await asyncio.to_thread(self._service.close)
            return message

        await self._app(scope, stopping, started)

    async def _start(self, client: Any) -> None:
        settings = read_settings(system.environ().get(VARIABLE))
        loop = asyncio.get_running_loop()
        # In a thread: it talks to the control service, and to the engine over this loop.
        self._service = await asyncio.to_thread(_start_service, settings, client, loop)
        if settings.parent:
            watch = partial(_end_with, settings.parent)
            threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _end_with(parent: int) -> None:
    """Stop this server when whoever started it was killed: nobody else would."""
    clock = system.system_clock()
    while os.getppid() == parent:
        clock.sleep(PARENT_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)


class _Service:
    """The receiver and the routes, while the server runs."""

    def __init__(
        self, app: "ASGIApp", *, receiver: Receiver, data_token: str, parts: ExitStack
    ) -> None:
        self._own = app
        self._receiver = receiver
        self._expected = f"Bearer {data_token}".encode()
        self._parts = parts

    async def answer(
        self, theirs: "ASGIApp", scope: "Scope", receive: "Receive", send: "Send"
    ) -> None:
        """Answer one request: by our own routes, or by theirs while a version is served."""
        path = scope["path"]
        if path in OWN_PATHS:
            await self._own(scope, receive, send)
        elif not hmac.compare_digest(_authorization(scope), self._expected):
            await _refuse(send, 401, "authentication_error", "the token is missing or wrong")
        elif path == DRAIN_PATH:
            self._receiver.drain()
            await _refuse(send, 202, "draining", "the engine takes nothing new")
        elif path in CLOSED_PATHS:
            await _refuse(send, 403, "permission_error", "weights come from the run alone")
        elif path == VLLM_METRICS_PATH:
            await theirs({**scope, "path": "/metrics", "raw_path": b"/metrics"}, receive, send)
        else:
            await self._pass_on(theirs, scope, receive, send)

    def close(self) -> None:
        """Stop following the run."""
        self._parts.close()

    async def _pass_on(
        self, theirs: "ASGIApp", scope: "Scope", receive: "Receive", send: "Send"
    ) -> None:
        health = self._receiver.health()
        installed = health.installed
        if health.state is not EngineState.READY or installed is None:
            reason = f"the engine is {health.state.value}: {health.reason}"
            await _refuse(send, 503, "unavailable_error", reason)
            return
        said = [
            (b"x-paceline-version-id", installed.version_id.encode()),
            (b"x-paceline-sequence", str(installed.sequence).encode()),
            (b"x-paceline-root-digest", installed.root_digest.encode()),
        ]

        async def with_version(message: "Message") -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *said]}
            await send(message)

        await theirs(scope, receive, with_version)


def _start_service(
    settings: ServerSettings, client: Any, loop: asyncio.AbstractEventLoop
) -> _Service:
    config, clock = settings.service, system.system_clock()
    credentials = load_credentials(config.credentials)
    driver_class: Any = load_entry(VLLM_PARTS, "online", port="part for vLLM")
    engine_class: Any = load_entry(VLLM_PARTS, "engine", port="part for vLLM")
    driver = driver_class(
        client, loop, update=config.update, drain_s=config.drain_s, timeout_s=CALL_TIMEOUT_S
    )
    inner = engine_class(
        client,
        loop,
        workers=WorkersEngine(driver, clock=clock),
        max_waiting=config.engine.max_waiting,
        new_id=system.new_nonce,
    )
    engine = UpdateGate(
        inner, policy=UpdatePolicy(config.update), drain_s=config.drain_s, clock=clock
    )
    with ExitStack() as parts:
        control = control_of(config, credentials.control_token)
        parts.callback(control.close)
        installer = WorkersInstaller(
            driver, engine=engine, clock=clock, stage_timeout_s=STAGE_TIMEOUT_S
        )
        receiver = receiver_for(
            config, control, engine, parts, endpoint=settings.endpoint, installer=installer
        )
        register_patiently(receiver, clock=clock, timeout_s=config.control_wait_s)
        driver.init(link_config(config, receiver.worker_id))
        receiver.start()
        parts.callback(receiver.stop, timeout_s=RECEIVER_STOP_S)
        parts.callback(driver.close)
        parts.callback(receiver.drain)
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
        return _Service(
            app, receiver=receiver, data_token=credentials.data_token, parts=parts.pop_all()
        )


def link_config(config: EngineServiceConfig, worker_id: str) -> LinkConfig:
    """Return how the workers of an engine reach the engine's run."""
    return LinkConfig(
        control=config.control,
        model_name=config.model_name,
        run_id=config.run_id,
        worker_id=worker_id,
        credentials=str(config.credentials or ""),
        allow_plaintext=config.allow_plaintext,
    )


def _authorization(scope: "Scope") -> bytes:
    found: dict[bytes, bytes] = dict(scope["headers"])
    return found.get(b"authorization", b"")


async def _refuse(send: "Send", status: int, kind: str, message: str) -> None:
    body = json.dumps(render_error(message, kind=kind)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status in {429, 503}:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
