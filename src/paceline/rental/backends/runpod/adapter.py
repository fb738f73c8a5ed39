"""Pods on RunPod, reached by ssh."""

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from paceline.rental import creation, waiting
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.registry import register_backend
from paceline.rental.backends.runpod import mapping
from paceline.rental.backends.runpod.client import RunpodClient
from paceline.rental.backends.runpod.config import RunpodConfig, find_key
from paceline.rental.errors import (
    AbsentError,
    AuthError,
    CapacityError,
    InstanceNotFoundError,
    NoOffersError,
    RequestError,
)
from paceline.rental.model import (
    CredentialReport,
    DeathCause,
    ExitCode,
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
    SelfDestroyRecipe,
)
from paceline.rental.remote.protocol import SshTarget
from paceline.rental.remote.reach import Reach

_GONE_TIMEOUT_S = 120.0
_log = logging.getLogger("paceline.rental.runpod")


@register_backend(mapping.BACKEND)
class RunpodBackend:
    """Pods of RunPod: containers with root, on demand; its spot market is left out."""

    name = mapping.BACKEND
    listing_lag_s = 60.0
    """Seconds were seen; this is on the safe side."""
    sees_gone = True

    def __init__(self, config: RunpodConfig | None = None, *, parts: Parts | None = None) -> None:
        self._parts = parts or default_parts()
        self._config = config or RunpodConfig.from_environ(self._parts.environ)
        self._client = RunpodClient(self._config, key=self._key, parts=self._parts.http)
        self._clock = self._parts.clock
        self._ended: set[str] = set()
        self._ports: tuple[int, ...] = ()
        self._reach = Reach(
            status=self.status,
            connect=self._parts.ssh_remote,
            clock=self._clock,
            identity=self._parts.identity,
            known_hosts=self._parts.known_hosts,
        )

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return what is available in that width now; one call per cloud that is allowed."""
        target, _ = mapping.target_of(c)
        rows: dict[str, Iterable[Mapping[str, object]]] = {
            cloud: self._client.gpus(cloud=cloud, count=target.count)
            for cloud in self._config.clouds
        }
        return mapping.offers_of(rows, c)

    def with_ports(self, ports: Sequence[int]) -> Self:
        """Return it such that pods have these TCP ports reached from outside."""
        other = copy.copy(self)
        other._ports = tuple(ports)  # noqa: SLF001 - the same class
        return other

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        """Create a pod with a volume of ``disk_gb`` at /workspace."""
        body = mapping.create_body(
            offer_id,
            disk_gb=disk_gb,
            container_disk_gb=self._config.container_disk_gb,
            image=image or self._config.image,
            public_key=creation.read_public_key(ssh_pubkey_path),
            label=label,
            ports=self._ports,
        )
        created_at = self._clock.time()
        return creation.create(
            lambda: InstanceHandle(
                self.name, str(self._client.create(body)["id"]), label, created_at
            ),
            label=label,
            listing=self.list_instances,
            clock=self._clock,
            settle_s=creation.SETTLE_S,
        )

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Block until it runs, has a direct address, and ssh answers there."""
        what = f"runpod pod {h.instance_id}"
        waiting.wait_running(
            waiting.failing(lambda: self.status(h), mapping.failure_of, what=what),
            clock=self._clock,
            timeout_s=timeout_s,
            what=what,
            probe=lambda status: self._reach.probe(h, status),
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
        """Copy to the pod."""
        remote = self._reach.remote(h)
        remote.push(src, dst, includes=includes, excludes=excludes, delete=delete)

    def run_remote(
        self,
        h: InstanceHandle,
        command: str,
        *,
        env: Mapping[str, str] = {},
        stream: bool = True,
        timeout_s: int | None = None,
    ) -> ExitCode:
        """Run a command on the pod."""
        return self._reach.remote(h).run(command, env=env, stream=stream, timeout_s=timeout_s)

    def sync_from(
        self,
        h: InstanceHandle,
        src: str,
        dst: Path,
        *,
        includes: Iterable[str] = (),
        excludes: Iterable[str] = (),
    ) -> None:
        """Copy from the pod."""
        self._reach.remote(h).pull(src, dst, includes=includes, excludes=excludes)

    def access(self, h: InstanceHandle) -> SshTarget:
        """Return where its sshd is."""
        return self._reach.target(h)

    def status(self, h: InstanceHandle) -> InstanceStatus:
        """Ask once; one that was created seconds ago and is not known yet is loading."""
        row = self._client.pod(h.instance_id)
        return mapping.status_of(
            row,
            h,
            now_s=self._clock.time(),
            ssh_user=self._config.ssh_user,
            was_ended=h.instance_id in self._ended,
        )

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        """Terminate and see it gone; ``force`` makes no difference here."""
        self._reach.forget(h)
        was_there = waiting.wait_gone(
            lambda: self.status(h),
            destroy=lambda: self._destroy(h),
            clock=self._clock,
            timeout_s=_GONE_TIMEOUT_S,
            what=f"runpod pod {h.instance_id}",
        )
        if not was_there:
            _log.warning("runpod pod %s is gone already; nothing to tear down", h.instance_id)

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return every pod of the account; one call."""
        now_s = self._clock.time()
        handles = [mapping.handle_of(row, now_s=now_s) for row in self._client.pods()]
        return [h for h in handles if h is not None and h.label.startswith(label_prefix)]

    def stop(self, h: InstanceHandle) -> None:
        """Halt it; /workspace stays and bills twice as much, the container's disk is lost."""
        self._act(h, "stop", InstanceState.STOPPED)

    def start(self, h: InstanceHandle) -> None:
        """Start it on the host where its volume is, if that has GPUs to spare."""
        try:
            self._act(h, "start", InstanceState.RUNNING, InstanceState.LOADING)
        except CapacityError as exc:
            raise NoOffersError(f"{exc}; its host has given its GPUs away") from exc

    def balance_usd(self) -> float:
        """Return the credit left; asks the older API, which alone tells."""
        return mapping.balance_of(self._client.account())

    def actual_cost_usd(self, h: InstanceHandle) -> float | None:
        """Return what the books say about the pod."""
        return mapping.cost_of(self._client.billing(h.instance_id))

    def self_destroy_recipe(self, h: InstanceHandle) -> SelfDestroyRecipe:
        """Return a command that uses the pod's own key."""
        return mapping.self_destroy_recipe(self._config.api_url)

    def logs(self, h: InstanceHandle, *, num_lines: int = 200) -> str:
        """Return the pod's log."""
        try:
            events = self._client.log_events(h.instance_id, num_lines=num_lines)
        except AbsentError as exc:
            raise InstanceNotFoundError(f"runpod pod {h.instance_id} does not exist") from exc
        return mapping.log_lines(events, num_lines=num_lines)

    def death_cause(self, status: InstanceStatus, *, is_spot: bool) -> DeathCause | None:
        """Return why it is not there any more; one that ended by itself is started again."""
        return mapping.death_cause(status)

    def check(self) -> CredentialReport:
        """Find the key and ask who we are."""
        found = find_key(self._parts.environ)
        if found is None:
            return mapping.no_key_report()
        try:
            account = self._client.account()
        except AuthError as exc:
            return CredentialReport(found_in=found.found_in, is_valid=False, advice=str(exc))
        return mapping.report_of(account, found_in=found.found_in)

    def _key(self) -> str | None:
        found = find_key(self._parts.environ)
        return None if found is None else found.key

    def _destroy(self, h: InstanceHandle) -> None:
        self._client.delete(h.instance_id)
        self._ended.add(h.instance_id)

    def _act(self, h: InstanceHandle, action: str, *wanted: InstanceState) -> None:
        """Move a pod; one that is there already was refused with a conflict, and is fine."""
        try:
            self._client.act(h.instance_id, action)
        except AbsentError as exc:
            raise InstanceNotFoundError(f"runpod pod {h.instance_id} does not exist") from exc
        except RequestError:
            if InstanceState.parse(self.status(h).state) not in wanted:
                raise
        self._reach.drop(h)
