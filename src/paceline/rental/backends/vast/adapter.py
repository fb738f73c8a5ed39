"""Machines on Vast.ai, reached by ssh."""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from paceline.core.waiting import wait_until
from paceline.rental import creation, waiting
from paceline.rental.answers import text_at
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.registry import register_backend
from paceline.rental.backends.vast import mapping
from paceline.rental.backends.vast.client import VastClient
from paceline.rental.backends.vast.config import VastConfig, find_key
from paceline.rental.errors import (
    AbsentError,
    ApiError,
    AuthError,
    InstanceNotFoundError,
    ProvisionError,
    RequestError,
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
    SelfDestroyRecipe,
)
from paceline.rental.remote.protocol import SshTarget
from paceline.rental.remote.reach import Reach

_GONE_TIMEOUT_S = 120.0
_LOG_TIMEOUT_S = 15.0
_log = logging.getLogger("paceline.rental.vast")


@register_backend(mapping.BACKEND)
class VastBackend:
    """Machines of the Vast.ai marketplace: containers with root, on other people's hosts."""

    name = mapping.BACKEND
    listing_lag_s = 60.0
    """None was measured; a lost create has been found at once, so this is on the safe side."""
    sees_gone = True

    def __init__(self, config: VastConfig | None = None, *, parts: Parts | None = None) -> None:
        self._parts = parts or default_parts()
        self._config = config or VastConfig.from_environ(self._parts.environ)
        self._client = VastClient(self._config, key=self._key, parts=self._parts.http)
        self._clock = self._parts.clock
        self._looks = Looks(self._client.instances, clock=self._clock)
        self._ports: tuple[int, ...] = ()
        self._reach = Reach(
            status=self.status,
            connect=self._parts.ssh_remote,
            clock=self._clock,
            identity=self._parts.identity,
            known_hosts=self._parts.known_hosts,
        )

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return machines on demand; works without a key."""
        return self._search(c, is_spot=False)

    def with_ports(self, ports: Sequence[int]) -> Self:
        """Return it such that hosts have ports for these too, and machines get them."""
        other = copy.copy(self)
        other._ports = tuple(ports)  # noqa: SLF001 - the same class
        return other

    def search_spot_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return machines that go to the highest bid; ``dph`` is the lowest bid taken now."""
        return self._search(c, is_spot=True)

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        """Rent on demand; the disk is of that size for the life of the machine."""
        public_key = creation.read_public_key(ssh_pubkey_path)
        body = mapping.create_body(
            disk_gb=disk_gb,
            image=image or self._config.image,
            public_key=public_key,
            label=label,
            max_dph=None,
            ports=self._ports,
        )
        return self._provision(offer_id, body, public_key)

    def provision_spot(
        self,
        offer_id: str,
        *,
        disk_gb: int,
        image: str,
        ssh_pubkey_path: Path,
        label: str,
        max_dph: float,
    ) -> InstanceHandle:
        """Bid ``max_dph``; a bid that is too low is an error, and what it left is named in it."""
        public_key = creation.read_public_key(ssh_pubkey_path)
        body = mapping.create_body(
            disk_gb=disk_gb,
            image=image or self._config.image,
            public_key=public_key,
            label=label,
            max_dph=max_dph,
            ports=self._ports,
        )
        return self._provision(offer_id, body, public_key)

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Block until it runs and ssh answers; a start that failed for good raises at once."""
        what = f"vast machine {h.instance_id}"
        waiting.wait_running(
            waiting.failing(self._looker(h), mapping.failure_of, what=what),
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
        """Run a command on the machine."""
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
        """Ask once."""
        return self._status_of(self._client.instance(h.instance_id))

    def _looker(self, h: InstanceHandle) -> Callable[[], InstanceStatus]:
        """Return how to ask for a machine: first by the listing, which many wait for, then itself.

        Single reads are two seconds apart, and the end of a short run needs the next.
        """
        num_looks = 0

        def look() -> InstanceStatus:
            nonlocal num_looks
            num_looks += 1
            rows = self._looks.listing() if num_looks == 1 else ()
            row = next((row for row in rows if text_at(row, "id") == h.instance_id), None)
            return self.status(h) if row is None else self._status_of(row)

        return look

    def _status_of(self, row: Row | None) -> InstanceStatus:
        return mapping.status_of(row, now_s=self._clock.time(), ssh_user=self._config.ssh_user)

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        """Destroy and see it gone; ``force`` makes no difference here."""
        self._reach.forget(h)
        was_there = waiting.wait_gone(
            lambda: self.status(h),
            destroy=lambda: self._client.destroy(h.instance_id),
            clock=self._clock,
            timeout_s=_GONE_TIMEOUT_S,
            what=f"vast machine {h.instance_id}",
        )
        if not was_there:
            _log.warning("vast machine %s is gone already; nothing to tear down", h.instance_id)

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return every machine of the account, page by page; a page is one call."""
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

    def stop(self, h: InstanceHandle) -> None:
        """Halt it; its disk bills on, and its GPUs may be given away."""
        self._change(h, {"state": "stopped"})

    def start(self, h: InstanceHandle) -> None:
        """Ask for its GPUs again; it may wait for them for ever, so bound the wait."""
        self._change(h, {"state": "running"})

    def relabel(self, h: InstanceHandle, label: str) -> InstanceHandle:
        """Change the label."""
        self._change(h, {"label": label})
        return InstanceHandle(self.name, h.instance_id, label, h.created_at)

    def balance_usd(self) -> float:
        """Return the credit left."""
        return mapping.balance_of(self._client.user())

    def actual_cost_usd(self, h: InstanceHandle) -> float | None:
        """Return what the charges say about the machine."""
        rows = self._client.charges(
            since_s=h.created_at - mapping.DAY_S, until_s=self._clock.time() + mapping.DAY_S
        )
        return mapping.cost_of(rows, h.instance_id)

    def self_destroy_recipe(self, h: InstanceHandle) -> SelfDestroyRecipe:
        """Return a command that uses the machine's own key, which can end nothing else."""
        return mapping.self_destroy_recipe(self._config.api_url)

    def logs(self, h: InstanceHandle, *, num_lines: int = 200) -> str:
        """Ask for the container's log and wait until it has been put somewhere."""
        try:
            address = self._client.request_logs(h.instance_id, num_lines=num_lines)
        except AbsentError as exc:
            raise InstanceNotFoundError(f"vast machine {h.instance_id} does not exist") from exc
        text = ""

        def is_there() -> bool:
            nonlocal text
            try:
                text = self._client.text(address)
            except AuthError:
                raise
            except ApiError:
                return False  # not written yet; the deadline below speaks
            return True

        wait_until(
            is_there,
            what=f"the log of vast machine {h.instance_id}",
            clock=self._clock,
            timeout_s=_LOG_TIMEOUT_S,
            interval_s=0.5,
        )
        return "\n".join(text.splitlines()[-num_lines:])

    def death_cause(self, status: InstanceStatus, *, is_spot: bool) -> DeathCause | None:
        """Return why it is not there any more: a lost bid differs from a lost host."""
        return mapping.death_cause(status, is_spot=is_spot)

    def check(self) -> CredentialReport:
        """Find the key and ask who we are."""
        found = find_key(self._parts.environ)
        if found is None:
            return mapping.no_key_report()
        try:
            user = self._client.user()
        except AuthError as exc:
            return CredentialReport(found_in=found.found_in, is_valid=False, advice=str(exc))
        return mapping.report_of(user, found_in=found.found_in)

    def _key(self) -> str | None:
        found = find_key(self._parts.environ)
        return None if found is None else found.key

    def _search(self, c: OfferConstraints, *, is_spot: bool) -> list[Offer]:
        filters: dict[str, object] = {"direct_port_count": {"gte": 1 + len(self._ports)}}
        if self._config.is_verified_only:
            filters["verified"] = {"eq": True}
        if self._config.is_datacenter_only:
            filters["datacenter"] = {"eq": True}
        query = mapping.query_of(
            c, is_spot=is_spot, num_offers_max=self._config.num_offers_max, filters=filters
        )
        return mapping.offers_of(self._client.search(query), c, is_spot=is_spot)

    def _provision(
        self, offer_id: str, body: Mapping[str, object], public_key: str
    ) -> InstanceHandle:
        mapping.check_offer_id(offer_id)
        label = str(body["label"])
        created_at = self._clock.time()

        def call() -> InstanceHandle:
            try:
                instance_id = self._client.create(offer_id, body)
            except ApiError as exc:
                left = mapping.created_id(exc.document)
                if left is None:
                    raise
                h = InstanceHandle(self.name, left, label, created_at)
                raise creation.provision_error(exc, leaked=h) from exc
            return InstanceHandle(self.name, instance_id, label, created_at)

        h = creation.create(
            call,
            label=label,
            listing=self.list_instances,
            clock=self._clock,
            settle_s=creation.SETTLE_S,
        )
        self._attach(h, public_key)
        return h

    def _attach(self, h: InstanceHandle, public_key: str) -> None:
        try:
            self._client.attach_key(h.instance_id, public_key)
        except RequestError as exc:
            # Some kinds of account may not; the key that the start script wrote lets us in.
            _log.warning("%s; logins may be refused after some hours", exc)
        except ApiError as exc:
            raise ProvisionError(
                f"vast machine {h.instance_id} exists and our ssh key could not be attached: {exc}",
                leaked=h,
            ) from exc

    def _change(self, h: InstanceHandle, body: Mapping[str, object]) -> None:
        try:
            self._client.change(h.instance_id, body)
        except AbsentError as exc:
            raise InstanceNotFoundError(f"vast machine {h.instance_id} does not exist") from exc
        self._reach.drop(h)
