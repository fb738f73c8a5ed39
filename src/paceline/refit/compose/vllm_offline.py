"""A run's weights for vLLM's ``LLM`` class, brought up to date between two calls of generate."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from paceline import system
from paceline.core.errors import DeadlineExceededError
from paceline.core.registry import load_entry
from paceline.refit.compose.control import load_credentials
from paceline.refit.compose.engine import (
    EngineServiceConfig,
    control_of,
    new_worker_id,
    receiver_for,
    register_patiently,
)
from paceline.refit.compose.vllm_server import STAGE_TIMEOUT_S, link_config
from paceline.refit.generators.protocol import EngineHealth, InstalledVersion
from paceline.refit.generators.registry import VLLM_PARTS
from paceline.refit.generators.workers import WorkersEngine
from paceline.refit.receiver.fleet import WorkersInstaller
from paceline.refit.receiver.loop import Receiver

LLM_ARGS = {
    "load_format": "dummy",
    "weight_transfer_config": {"backend": "paceline"},
    "worker_extension_cls": "paceline.refit.generators.vllm.extension.WorkerExtension",
}
"""What ``LLM(...)`` is to be given, beside the model and whatever else."""


class LlmFollower:
    """Keeps an ``LLM`` on its run. Nothing happens outside its methods."""

    def __init__(self, llm: Any, config: EngineServiceConfig) -> None:
        """Connect the workers of ``llm`` to the run.

        Args:
            llm: made with ``LLM_ARGS``; belongs to the caller.
            config: names the run; what concerns a server is not used.

        Raises:
            PreflightError, ControlError: no credentials, no control service.
        """
        self._clock = system.system_clock()
        config = replace(config, worker_id=config.worker_id or new_worker_id(config))
        driver_class: Any = load_entry(VLLM_PARTS, "offline", port="part for vLLM")
        driver = self._driver = driver_class(llm)
        self._workers = WorkersEngine(driver, clock=self._clock)
        with ExitStack() as parts:
            control = control_of(config, load_credentials(config.credentials).control_token)
            parts.callback(control.close)
            installer = WorkersInstaller(
                driver, engine=self._workers, clock=self._clock, stage_timeout_s=STAGE_TIMEOUT_S
            )
            self._receiver: Receiver = receiver_for(
                config, control, self._workers, parts, endpoint="", installer=installer
            )
            register_patiently(self._receiver, clock=self._clock, timeout_s=config.control_wait_s)
            driver.init(link_config(config, self._receiver.worker_id))
            self._parts = parts.pop_all()

    def catch_up(self, *, timeout_s: float) -> InstalledVersion:
        """Install what there is, up to the newest version; returns what is served then.

        Call it between two calls of ``generate``.

        Raises:
            DeadlineExceededError: within the time no version could be installed at all.
        """
        deadline = self._clock.monotonic() + timeout_s
        while True:
            has_more = self._receiver.step()
            installed = self._workers.installed()
            if installed is not None and not has_more:
                return installed
            if self._clock.monotonic() >= deadline:
                reason = self._receiver.health().reason
                raise DeadlineExceededError(f"no version within {timeout_s:g} s: {reason}")
            if not has_more:
                self._clock.sleep(0.1)

    def health(self) -> EngineHealth:
        """Return whether generating now is sound: only in state ready."""
        return self._receiver.health()

    def version(self, version_id: str) -> InstalledVersion | None:
        """Return what a label in ``weight_versions`` of an output means."""
        return self._workers.version(version_id)

    def close(self) -> None:
        """Leave the run; the ``LLM`` stays as it is. Idempotent."""
        self._parts.close()
