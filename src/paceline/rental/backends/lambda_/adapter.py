"""Virtual machines on Lambda Cloud, reached by ssh."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.rental import creation, waiting
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.lambda_ import mapping
from paceline.rental.backends.lambda_.client import LambdaClient
from paceline.rental.backends.lambda_.config import LambdaConfig, find_key
from paceline.rental.backends.registry import register_backend
from paceline.rental.errors import (
    AbsentError,
    ApiError,
    AuthError,
    InstanceNotFoundError,
    ProvisionError,
    RequestError,
)
from paceline.rental.model import (
    CredentialReport,
    DeathCause,
    ExitCode,
    InstanceHandle,
    InstanceStatus,
    Offer,
    OfferConstraints,
)
from paceline.rental.remote.protocol import SshTarget
from paceline.rental.remote.reach import Reach

_GONE_TIMEOUT_S = 600.0  # machines of eight GPUs take their time
_log = logging.getLogger("paceline.rental.lambda")


@register_backend(mapping.BACKEND)
class LambdaBackend:
    """Virtual machines of Lambda: they start and they end, and there is nothing in between."""

    name = mapping.BACKEND
    listing_lag_s = 60.0
    """None was measured; this is on the safe side."""
    sees_gone = True

    def __init__(self, config: LambdaConfig | None = None, *, parts: Parts | None = None) -> None:
        self._parts = parts or default_parts()
        self._config = config or LambdaConfig.from_environ(self._parts.environ)
        self._client = LambdaClient(self._config, key=self._key, parts=self._parts.http)
        self._clock = self._parts.clock
        self._reach = Reach(
            status=self.status,
            connect=self._parts.ssh_remote,
            clock=self._clock,
            identity=self._parts.identity,
            known_hosts=self._parts.known_hosts,
        )

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return types in regions that say they have some; the disk is the type's own."""
        return mapping.offers_of(self._client.instance_types(), c)

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        """Register the ssh key if need be and launch; ``disk_gb`` was checked by the search."""
        mapping.parse_offer_id(offer_id)
        key_name = self._key_name(creation.read_public_key(ssh_pubkey_path))
        created_at = self._clock.time()
        body = mapping.launch_body(
            offer_id, image=image, key_name=key_name, label=label, now_s=created_at
        )
        return creation.create(
            lambda: InstanceHandle(self.name, self._client.launch(body), label, created_at),
            label=label,
            listing=self.list_instances,
            clock=self._clock,
            settle_s=creation.SETTLE_S,
        )

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Block until it is active, has an address, and ssh answers there."""
        what = f"lambda machine {h.instance_id}"
        waiting.wait_running(
            waiting.failing(lambda: self.status(h), mapping.failure_of, what=what),
            clock=self._clock,
            timeout_s=timeout_s,
            what=what,
            probe=lambda status: self._reach.probe(h, status),
            first_look_s=waiting.newborn_s(h.created_at, clock=self._clock),
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
        """Copy to the machine."""
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
        """Run a command on the machine, as the user ubuntu, who has sudo."""
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
        """Copy from the machine."""
        self._reach.remote(h).pull(src, dst, includes=includes, excludes=excludes)

    def access(self, h: InstanceHandle) -> SshTarget:
        """Return where its sshd is."""
        return self._reach.target(h)

    def status(self, h: InstanceHandle) -> InstanceStatus:
        """Ask once; one that is terminating is unknown until it is gone."""
        return mapping.status_of(
            self._client.instance(h.instance_id),
            h,
            now_s=self._clock.time(),
            ssh_user=self._config.ssh_user,
            ssh_port=self._config.ssh_port,
        )

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        """Terminate and see it gone; ``force`` makes no difference here."""
        self._reach.forget(h)
        was_there = waiting.wait_gone(
            lambda: self.status(h),
            destroy=lambda: self._client.terminate(h.instance_id),
            is_going=mapping.is_terminating,
            clock=self._clock,
            timeout_s=_GONE_TIMEOUT_S,
            what=f"lambda machine {h.instance_id}",
        )
        if not was_there:
            _log.warning("lambda machine %s is gone already; nothing to tear down", h.instance_id)

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return every machine of the account; one call."""
        now_s = self._clock.time()
        handles = [mapping.handle_of(row, now_s=now_s) for row in self._client.instances()]
        return [h for h in handles if h is not None and h.label.startswith(label_prefix)]

    def relabel(self, h: InstanceHandle, label: str) -> InstanceHandle:
        """Change the machine's name, which is its label; at most 64 characters."""
        try:
            self._client.rename(h.instance_id, label)
        except AbsentError as exc:
            raise InstanceNotFoundError(f"lambda machine {h.instance_id} does not exist") from exc
        return InstanceHandle(self.name, h.instance_id, label, h.created_at)

    def death_cause(self, status: InstanceStatus, *, is_spot: bool) -> DeathCause | None:
        """Return why it is not there any more: preempted has a word of its own here."""
        return mapping.death_cause(status)

    def check(self) -> CredentialReport:
        """Find the key and try it; the provider tells neither who we are nor what is left."""
        found = find_key(self._parts.environ)
        if found is None:
            return mapping.no_key_report()
        try:
            self._client.ssh_keys()
        except AuthError as exc:
            return CredentialReport(found_in=found.found_in, is_valid=False, advice=str(exc))
        return CredentialReport(found_in=found.found_in, is_valid=True)

    def _key(self) -> str | None:
        found = find_key(self._parts.environ)
        return None if found is None else found.key

    def _key_name(self, public_key: str) -> str:
        """Return the name of our key at Lambda, registering it where it is not there yet.

        Raises ProvisionError.
        """
        blob = mapping.key_blob(public_key)
        try:
            return self._registered(blob) or self._register(blob)
        except ApiError as exc:
            raise creation.provision_error(exc) from exc

    def _registered(self, blob: str) -> str | None:
        names = mapping.key_names(self._client.ssh_keys(), blob)
        return names[0] if names else None

    def _register(self, blob: str) -> str:
        name = mapping.key_name_of(blob)
        try:
            self._client.add_ssh_key(name, blob)
        except RequestError as exc:
            if not mapping.is_duplicate(exc):
                raise
            found = self._registered(blob)
            if found is None:
                raise ProvisionError(
                    f"lambda: the name {name} belongs to another ssh key; delete that at the "
                    "provider",
                    is_backend_wide=True,
                ) from exc
            return found
        return name
