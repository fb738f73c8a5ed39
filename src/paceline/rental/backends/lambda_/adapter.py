"""Virtual machines on Lambda Cloud, reached by ssh."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock

from paceline.rental import creation, waiting
from paceline.rental.answers import text_at
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.lambda_ import mapping
from paceline.rental.backends.lambda_.client import LambdaClient
from paceline.rental.backends.lambda_.config import LambdaConfig, find_key
from paceline.rental.backends.lambda_.keys import KnownKeys
from paceline.rental.backends.registry import register_backend
from paceline.rental.errors import (
    AbsentError,
    ApiError,
    AuthError,
    InstanceNotFoundError,
    ProvisionError,
    RequestError,
    SshDeniedError,
)
from paceline.rental.looks import Looks, Row
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
        self._looks = Looks(self._client.instances, clock=self._clock)
        self._keys = KnownKeys(
            self._parts.state_dir / "ssh" / "registered",
            account=lambda: f"{self._config.api_url} {self._key()}",
        )
        self._registering = Lock()
        self._num_mended = 0
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
        blob = mapping.key_blob(creation.read_public_key(ssh_pubkey_path))
        key_name, num_mended = self._key_name(blob)
        created_at = round(self._clock.time(), 3)
        body = partial(mapping.launch_body, offer_id, image=image, label=label, now_s=created_at)

        def call() -> InstanceHandle:
            try:
                instance_id = self._client.launch(body(key_name=key_name))
            except (AbsentError, RequestError):
                # Nothing was made. If the key is why, it is registered, and that is worth a second.
                if num_mended is None:
                    raise
                other = self._mended(blob, key_name, num_mended=num_mended)
                if other is None:
                    raise
                instance_id = self._client.launch(body(key_name=other))
            return InstanceHandle(self.name, instance_id, label, created_at)

        return creation.create(
            call,
            label=label,
            listing=self.list_instances,
            clock=self._clock,
            settle_s=creation.SETTLE_S,
        )

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Block until it is active, has an address, and ssh answers there."""
        what = f"lambda machine {h.instance_id}"
        try:
            waiting.wait_running(
                waiting.failing(lambda: self._look(h), mapping.failure_of, what=what),
                clock=self._clock,
                timeout_s=timeout_s,
                what=what,
                probe=lambda status: self._reach.probe(h, status),
                first_look_s=waiting.newborn_s(h.created_at, clock=self._clock),
            )
        except SshDeniedError:
            self._keys.forget()  # another key may go by the name that we remember
            raise

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
        return self._status_of(self._client.instance(h.instance_id), h)

    def _look(self, h: InstanceHandle) -> InstanceStatus:
        """Ask by the listing: one call for all machines that are waited for."""
        rows = self._looks.listing()
        row = next((row for row in rows if text_at(row, "id") == h.instance_id), None)
        # a listing may be late
        return self._looks.keep(
            h.instance_id, self.status(h) if row is None else self._status_of(row, h)
        )

    def _status_of(self, row: Row | None, h: InstanceHandle) -> InstanceStatus:
        return mapping.status_of(
            row,
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
            seen=self._looks.take(h.instance_id),
            clock=self._clock,
            timeout_s=_GONE_TIMEOUT_S,
            what=f"lambda machine {h.instance_id}",
        )
        if not was_there:
            _log.warning("lambda machine %s is gone already; nothing to tear down", h.instance_id)

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return every machine of the account; one call."""
        listed = self._handles(self._looks.listing())
        return [h for h in listed if h.label.startswith(label_prefix)]

    def listed_since(self, since_s: float) -> list[InstanceHandle] | None:
        """Return what the newest look at machines that are waited for has listed."""
        rows = self._looks.listed_since(since_s)
        return None if rows is None else self._handles(rows)

    def _handles(self, rows: Sequence[Row]) -> list[InstanceHandle]:
        now_s = self._clock.time()
        handles = (mapping.handle_of(row, now_s=now_s) for row in rows)
        return [h for h in handles if h is not None]

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

    def _key_name(self, blob: str) -> tuple[str, int | None]:
        """Return how our key is called at Lambda; if that is remembered, how often it was mended.

        What nobody remembers is asked for, by one thread for all. Raises ProvisionError.
        """
        with self._registering:
            known = self._keys.get(blob)
            if known is not None:
                return known, self._num_mended
            try:
                return self._keys.put(blob, self._registered(blob) or self._register(blob)), None
            except ApiError as exc:
                raise creation.provision_error(exc) from exc

    def _mended(self, blob: str, refused: str, *, num_mended: int) -> str | None:
        """Return how our key is called, None if it was called so all along: it was not the key.

        Raises ProvisionError.
        """
        with self._registering:
            if self._num_mended != num_mended:
                return self._keys.get(blob)  # by another thread, since we asked
            self._keys.forget()
            try:
                found = self._registered(blob)
                name = self._keys.put(blob, found or self._register(blob))
            except ApiError as exc:
                raise creation.provision_error(exc) from exc
            if found == refused:
                return None
            self._num_mended += 1
            return name

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
