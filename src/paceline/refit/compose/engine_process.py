"""A rollout engine that brings its own server, as a process that this one watches."""

import http.client
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from paceline import system
from paceline.core.address import join_address, told_as
from paceline.core.clock import Clock
from paceline.core.errors import PreflightError
from paceline.core.registry import load_entry
from paceline.core.waiting import wait_until
from paceline.refit.compose.control import load_credentials
from paceline.refit.compose.engine import EngineServiceConfig, new_worker_id
from paceline.refit.compose.vllm_server import (
    DRAIN_PATH,
    ServerSettings,
    server_environment,
)
from paceline.refit.generators.registry import ENGINE_SERVERS

START_TIMEOUT_S: Final = 900.0
"""Large models take minutes to build, even without weights."""
KILL_AFTER_S: Final = 15.0
CALL_S: Final = 5.0


class EngineProcess:
    """A running server, with the same face as compose.engine.EngineService."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        *,
        endpoint: str,
        worker_id: str,
        data_token: str,
        grace_s: float,
    ) -> None:
        self.endpoint = endpoint
        self.worker_id = worker_id
        self._process = process
        self._token = data_token
        self._grace_s = grace_s

    def crash(self) -> str:
        """Return why the server ended by itself; empty while it runs."""
        status = self._process.poll()
        return "" if status is None else f"the engine's server ended with status {status}"

    def stop(self) -> None:
        """Drain within the grace, then end the process. Idempotent."""
        if self._process.poll() is not None:
            return
        with suppress(OSError, http.client.HTTPException):
            self.ask("POST", DRAIN_PATH)
        self._process.terminate()
        try:
            self._process.wait(self._grace_s + KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_AFTER_S)

    def ask(self, method: str, path: str) -> int:
        """Return the status of one call. Raises OSError or HTTPException."""
        at = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=CALL_S)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {self._token}"})
            return connection.getresponse().status
        finally:
            connection.close()


def start_engine_process(config: EngineServiceConfig) -> EngineProcess:
    """Start an engine's own server; returns when its routes answer.

    Raises:
        PreflightError: it ended before that, see its output.
        DeadlineExceededError: it did not come up. Like after every error, nothing is left.
    """
    clock = system.system_clock()
    worker_id = config.worker_id or new_worker_id(config)
    config = replace(config, worker_id=worker_id, port=config.port or _free_port(config.host))
    endpoint = f"http://{join_address(told_as(config.host), config.port)}"
    command: Any = load_entry(ENGINE_SERVERS, config.engine_name, port="engine with a server")
    settings = ServerSettings(service=config, endpoint=endpoint, parent=os.getpid())
    process = subprocess.Popen(  # noqa: S603 - our own interpreter
        command(
            config.engine,
            host=config.host,
            port=config.port,
            model_name=config.model_name,
            grace_s=config.grace_s,
            extra=config.server_args,
        ),
        env={**system.environ(), **server_environment(settings)},
        stdout=sys.stderr,
        start_new_session=True,
    )
    started = EngineProcess(
        process,
        endpoint=endpoint,
        worker_id=worker_id,
        data_token=load_credentials(config.credentials).data_token,
        grace_s=config.grace_s,
    )
    try:
        _await_routes(started, clock)
    except BaseException:
        process.kill()
        process.wait(KILL_AFTER_S)
        raise
    return started


def _await_routes(started: EngineProcess, clock: Clock) -> None:
    def answers() -> bool:
        if started.crash():
            raise PreflightError(f"{started.crash()} before it answered; its output says why")
        try:
            return started.ask("GET", "/health") in {200, 503}
        except (OSError, http.client.HTTPException):
            return False

    wait_until(
        answers,
        what=f"the engine at {started.endpoint}",
        clock=clock,
        timeout_s=START_TIMEOUT_S,
        interval_s=0.25,
    )


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as exc:
            raise PreflightError(f"cannot listen on {host}: {exc}") from exc
        port: int = probe.getsockname()[1]
    return port
