"""The backend inside a worker of vLLM, bound to what opens a worker's way to its run."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline import system
from paceline.core.registry import load_entry
from paceline.refit.compose.control import load_credentials
from paceline.refit.compose.data import data_plane, open_reader
from paceline.refit.compose.following import open_control, replica_board_of
from paceline.refit.compose.supply import open_supply, with_run_tls
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import ControlUnavailableError
from paceline.refit.generators.registry import VLLM_PARTS
from paceline.refit.generators.workers import LinkConfig, Mirror, Staged
from paceline.refit.model import WorkerRegistration, WorkerRole
from paceline.refit.receiver.install import Installer, InstallLimits, Supply, label_of
from paceline.refit.transports.protocol import ObjectReader

REGISTRATION_TTL_S = 60
"""Of a worker, which leases only: what is served is reported by whoever drives the engine."""


def open_link(config: LinkConfig) -> "RunLink":
    """Connect a worker to its run.

    Raises:
        PreflightError: no credentials.
        ControlError: the service does not know the token, or does not answer.
    """
    credentials = load_credentials(Path(config.credentials) if config.credentials else None)
    with ExitStack() as parts:
        control = open_control(
            config.control,
            token=credentials.control_token,
            run_id=config.run_id,
            allow_plaintext=config.allow_plaintext,
        )
        parts.callback(control.close)
        plane = data_plane(system.environ(), run_id=config.run_id)
        plane = with_run_tls(plane, credentials, parts)
        name = config.worker_id
        reader = open_reader(plane, token=lambda: credentials.data_token, name=f"{name}-sink")
        parts.callback(reader.close)
        supply = open_supply(
            credentials,
            plane,
            board=replica_board_of(config.control, control),
            worker_id=name,
            parts=parts,
        )
        link = RunLink(config, control=control, reader=reader, supply=supply, parts=parts.pop_all())
    link.register()
    return link


class RunLink:
    """Signs Link."""

    def __init__(
        self,
        config: LinkConfig,
        *,
        control: ControlPlane,
        reader: ObjectReader,
        supply: Supply,
        parts: ExitStack,
    ) -> None:
        self._config = config
        self._supply = supply
        self._control = control
        self._reader = reader
        self._parts = parts
        self._clock = system.system_clock()
        self._register_at = self._clock.monotonic()

    def register(self) -> None:
        """Tell the control service that this worker lives. Raises ControlError."""
        self._control.register_worker(
            WorkerRegistration(
                worker_id=self._config.worker_id,
                role=WorkerRole.GENERATOR,
                model_name=self._config.model_name,
            ),
            ttl_seconds=REGISTRATION_TTL_S,
        )
        self._register_at = self._clock.monotonic() + REGISTRATION_TTL_S / 3

    def stage(
        self,
        uid: str,
        *,
        mirror: Mirror,
        between_reads: Callable[[], None],
        known: frozenset[str] | None = None,
    ) -> Staged:
        """Fetch and prove a version, see Link."""
        self.register()
        version = self._control.get_version(uid)

        def keep_alive() -> None:
            between_reads()
            self._register_if_due()

        installer = Installer(
            worker_id=self._config.worker_id,
            control=self._control,
            engine=mirror,
            reader=self._reader,
            clock=self._clock,
            limits=InstallLimits(),
            supply=self._supply,
            prepare=mirror.bind,
        )
        if known is None:  # whoever drives vLLM's four calls alone does not say
            versions = self._control.list_versions(version.model_name)
            known = frozenset(each.uid for each in versions)
        installer.keep_only(known)
        staged, fetched_bytes = installer.stage(version, base=mirror.base, between_reads=keep_alive)
        return Staged(version=label_of(version), install=staged, fetched_bytes=fetched_bytes)

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._parts.close()

    def _register_if_due(self) -> None:
        if self._clock.monotonic() >= self._register_at:
            try:
                self.register()
            except ControlUnavailableError:
                self._register_at = self._clock.monotonic() + 1.0


_engine_class: Any = load_entry(VLLM_PARTS, "worker", port="part for vLLM")
Backend: Any = type("Backend", (_engine_class,), {"connect": staticmethod(open_link)})
