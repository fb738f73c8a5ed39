"""Containers as machines: their own files and processes, this computer's processors and network."""

import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.core.errors import PreflightError
from paceline.core.waiting import wait_until
from paceline.rental import waiting
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.docker import mapping
from paceline.rental.backends.docker.client import DockerClient
from paceline.rental.backends.docker.config import DockerConfig
from paceline.rental.backends.registry import register_backend
from paceline.rental.errors import BackendError, InstanceNotFoundError, ProvisionError
from paceline.rental.model import (
    CredentialReport,
    ExitCode,
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
)
from paceline.rental.remote.protocol import ContainerTarget, NetworkRemote

_GONE_TIMEOUT_S = 60.0
_GB = 1e9
_log = logging.getLogger("paceline.rental.docker")


@register_backend(mapping.BACKEND)
class DockerBackend:
    """Containers of one engine, for nothing; all that are ours bear our label."""

    name = mapping.BACKEND
    listing_lag_s = 0.0

    def __init__(self, config: DockerConfig | None = None, *, parts: Parts | None = None) -> None:
        """Build the adapter; asks the engine nothing."""
        self._config = config or DockerConfig()
        self._parts = parts or default_parts()
        self._client = DockerClient(self._config.command, environ=self._parts.environ)

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return the one offer that the engine can make for what is asked."""
        engine = self._client.info()
        return mapping.offers_of(
            c, engine, self._client.gpus(), free_disk_gb=self._free_disk_gb(engine)
        )

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        """Create a container and start it; the key means nothing here, the disk has no limit."""
        target = mapping.parse_offer_id(offer_id)
        engine = self._client.info()
        devices = mapping.pick_devices(target, self._client.gpus(), self._taken())
        chosen = image or self._config.image
        self._client.ensure_image(chosen)
        instance_id = self._client.create(
            mapping.create_words(
                image=chosen,
                label=label,
                target=target,
                devices=devices,
                words=mapping.option_words(self._config, engine, devices),
            )
        )
        handle = InstanceHandle(self.name, instance_id, label, self._parts.clock.time())
        try:
            self._client.start(instance_id)
        except BackendError as exc:
            # What could not be started stays behind in the state created.
            self._remove_or_leak(handle, exc)
            raise ProvisionError(
                f"local-docker: machine {label} from {chosen} did not start: {exc}"
            ) from exc
        return handle

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Return once its shell answers, which is at once.

        Raises BackendError for one that has ended again, and says what it printed.
        """

        def status() -> InstanceStatus:
            found = self.status(h)
            if found.state == InstanceState.STOPPED:
                said = self._client.logs(h.instance_id, num_lines=5).strip()
                raise BackendError(
                    f"local-docker machine {h.label} has stopped: {said or found.raw['state']}; "
                    "its image needs a POSIX shell and sleep"
                )
            return found

        waiting.wait_running(
            status,
            clock=self._parts.clock,
            timeout_s=timeout_s,
            what=f"local-docker machine {h.label}",
            interval_s=0.5,
            probe=lambda _: self._remote(h).probe(),
        )

    def sync_to(
        self,
        h: InstanceHandle,
        src: Path,
        dst: str,
        *,
        excludes: Iterable[str] = (),
        includes: Iterable[str] = (),
        delete: bool = False,
    ) -> None:
        """Copy into the container."""
        self._remote(h).push(src, dst, includes=includes, excludes=excludes, delete=delete)

    def run_remote(
        self,
        h: InstanceHandle,
        command: str,
        *,
        env: Mapping[str, str] = {},
        stream: bool = True,
        timeout_s: int | None = None,
    ) -> ExitCode:
        """Run a command in the container's workspace."""
        return self._remote(h).run(command, env=env, stream=stream, timeout_s=timeout_s)

    def sync_from(
        self,
        h: InstanceHandle,
        src: str,
        dst: Path,
        *,
        includes: Iterable[str] = (),
        excludes: Iterable[str] = (),
    ) -> None:
        """Copy out of the container."""
        self._remote(h).pull(src, dst, includes=includes, excludes=excludes)

    def status(self, h: InstanceHandle) -> InstanceStatus:
        """Ask the engine once."""
        return mapping.status_of(self._find(h), now_s=self._parts.clock.time())

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        """Kill and remove the container, with its anonymous volumes, and see it gone."""
        if self._find(h) is None or not self._client.remove(h.instance_id):
            _log.warning("local-docker machine %s is gone already", h.label or h.instance_id)
            return
        wait_until(
            lambda: self._find(h) is None,
            what=f"local-docker machine {h.label} going away",
            clock=self._parts.clock,
            timeout_s=_GONE_TIMEOUT_S,
            interval_s=0.2,
        )

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return every container with our label, running or not, oldest first."""
        handles = [mapping.handle_of(container) for container in self._client.ours()]
        return sorted(
            (handle for handle in handles if handle.label.startswith(label_prefix)),
            key=lambda handle: handle.created_at,
        )

    def stop(self, h: InstanceHandle) -> None:
        """Stop the container; its files stay."""
        self._must_find(h)
        self._client.stop(h.instance_id)

    def start(self, h: InstanceHandle) -> None:
        """Start it again."""
        self._must_find(h)
        self._client.start(h.instance_id)

    def logs(self, h: InstanceHandle, *, num_lines: int = 200) -> str:
        """Return what its first process printed, which is nothing unless it failed."""
        self._must_find(h)
        return self._client.logs(h.instance_id, num_lines=num_lines)

    def check(self) -> CredentialReport:
        """Ask the engine whether it is there."""
        try:
            engine = self._client.info()
        except (BackendError, PreflightError) as exc:
            return CredentialReport(found_in=None, is_valid=False, advice=str(exc))
        gpus = "GPUs by CDI" if engine.has_cdi else "GPUs by the nvidia runtime"
        able = gpus if engine.has_cdi or engine.has_runtime else "no GPUs for containers"
        return CredentialReport(
            found_in=self._client.context(),
            is_valid=True,
            account=f"{engine.num_cpus} CPUs, {able}",
        )

    def _find(self, h: InstanceHandle) -> Mapping[str, object] | None:
        """Return the container if there is one and it is ours."""
        if not mapping.is_instance_id(h.instance_id):
            return None
        found = self._client.inspect(h.instance_id)
        return found if found is not None and mapping.label_of(found) is not None else None

    def _must_find(self, h: InstanceHandle) -> None:
        if self._find(h) is None:
            raise InstanceNotFoundError(
                f"local-docker machine {h.label} does not exist; provision another"
            )

    def _taken(self) -> frozenset[str]:
        """Return the GPUs that our containers have; stopped ones keep theirs."""
        return frozenset().union(*map(mapping.devices_of, self._client.ours()))

    def _remove_or_leak(self, handle: InstanceHandle, cause: BackendError) -> None:
        try:
            self._client.remove(handle.instance_id)
        except BackendError as exc:
            raise ProvisionError(
                f"local-docker: machine {handle.label} did not start ({cause}) and is not "
                f"removed: {exc}",
                leaked=handle,
            ) from exc

    def _free_disk_gb(self, engine: mapping.Engine) -> float:
        root = Path(engine.root)
        return shutil.disk_usage(root if root.is_dir() else Path("/")).free / _GB

    def _remote(self, h: InstanceHandle) -> NetworkRemote:
        return self._parts.container_remote(self.access(h), h.instance_id)

    def access(self, h: InstanceHandle) -> ContainerTarget:
        """Return which container it is."""
        if not mapping.is_instance_id(h.instance_id):
            raise InstanceNotFoundError(
                f"local-docker machine {h.instance_id!r} does not exist; provision another"
            )
        return ContainerTarget(
            name=f"local-docker machine {h.label}",
            container=h.instance_id,
            docker=self._config.command,
            jobs=mapping.JOBS,
        )
