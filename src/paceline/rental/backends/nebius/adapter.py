"""Virtual machines on Nebius AI Cloud, reached by ssh."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from paceline.rental import creation, waiting
from paceline.rental.answers import text_at
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.nebius import mapping
from paceline.rental.backends.nebius.client import NebiusClient
from paceline.rental.backends.nebius.config import NebiusConfig, find_key
from paceline.rental.backends.registry import register_backend
from paceline.rental.errors import (
    AbsentError,
    ApiError,
    AuthError,
    CapacityError,
    InstanceNotFoundError,
    NoOffersError,
    ProvisionError,
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
from paceline.rental.rpc import Wire

_GONE_TIMEOUT_S = 300.0
_log = logging.getLogger("paceline.rental.nebius")


@register_backend(mapping.BACKEND)
class NebiusBackend:
    """Virtual machines of Nebius, on demand or preemptible, in one or all projects."""

    name = mapping.BACKEND
    listing_lag_s = 60.0
    """None was measured; this is on the safe side."""
    sees_gone = True

    def __init__(
        self,
        config: NebiusConfig | None = None,
        *,
        parts: Parts | None = None,
        wire: Wire | None = None,
    ) -> None:
        self._parts = parts or default_parts()
        self._config = config or NebiusConfig.from_environ(self._parts.environ)
        self._client = NebiusClient(
            self._config,
            credential=lambda: find_key(self._parts.environ),
            parts=self._parts.http,
            wire=wire,
        )
        self._clock = self._parts.clock
        self._reach = Reach(
            status=self.status,
            connect=self._parts.ssh_remote,
            clock=self._clock,
            identity=self._parts.identity,
            known_hosts=self._parts.known_hosts,
        )

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return what the projects' regions have; two calls more for each preset's price."""
        return self._search(c, is_spot=False)

    def search_spot_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return what may be had preemptible, at what is estimated for it now."""
        return self._search(c, is_spot=True)

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        """Create a machine; a lack of capacity may show only later, while it starts."""
        document = self._document(offer_id, disk_gb, image, ssh_pubkey_path, label)
        return self._provision(document, label)

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
        """Create a preemptible machine; there are no bids, and the price may move afterwards."""
        document = self._document(offer_id, disk_gb, image, ssh_pubkey_path, label)
        spot = mapping.as_spot(document)
        try:
            dph = self._price(spot, disk_gb=disk_gb)
        except ApiError as exc:
            raise ProvisionError(f"nebius: the spot price is not known: {exc}") from exc
        if dph is None or dph > max_dph:
            raise ProvisionError(f"nebius: spot costs {dph} $/h now, the limit is {max_dph} $/h")
        return self._provision(spot, label)

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Block until it runs, has an address, and ssh answers there."""
        what = f"nebius machine {h.instance_id}"
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
        """Run a command on the machine, as the user that cloud-init made, who has sudo."""
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
        """Ask once; one that is being deleted is unknown until it is gone."""
        return mapping.status_of(
            self._client.instance(h.instance_id),
            now_s=self._clock.time(),
            ssh_user=self._config.ssh_user,
            ssh_port=self._config.ssh_port,
        )

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        """Delete with its disk and see it gone; an order that is refused is given again."""
        self._reach.forget(h)
        was_there = waiting.wait_gone(
            lambda: self.status(h),
            destroy=lambda: self._client.delete(h.instance_id),
            is_going=mapping.is_going,
            clock=self._clock,
            timeout_s=_GONE_TIMEOUT_S,
            what=f"nebius machine {h.instance_id}",
        )
        if not was_there:
            _log.warning("nebius machine %s is gone already; nothing to tear down", h.instance_id)

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return every machine in the projects that are used, page by page."""
        now_s = self._clock.time()
        handles = [
            mapping.handle_of(row, now_s=now_s)
            for project in self._client.projects()
            for row in self._client.instances(_project_id(project))
        ]
        return [h for h in handles if h is not None and h.label.startswith(label_prefix)]

    def residue(self, h: InstanceHandle) -> list[str]:
        """Return the boot disk of a machine, where it is still there."""
        name = mapping.disk_name_of(h.label)
        return [
            f"disk {text_at(row, 'metadata', 'id')}"
            for project in self._client.projects()
            for row in self._client.disks(_project_id(project))
            if text_at(row, "metadata", "name") == name
        ]

    def stop(self, h: InstanceHandle) -> None:
        """Halt it; its disk bills on, its address is lost."""
        self._act(h, self._client.stop, InstanceState.STOPPED)

    def start(self, h: InstanceHandle) -> None:
        """Start it where its disk is, if there is capacity."""
        try:
            self._act(h, self._client.start, InstanceState.RUNNING, InstanceState.LOADING)
        except CapacityError as exc:
            raise NoOffersError(str(exc)) from exc

    def self_destroy_recipe(self, h: InstanceHandle) -> SelfDestroyRecipe:
        """Return how it halts itself, which is less than an end."""
        return mapping.self_destroy_recipe()

    def death_cause(self, status: InstanceStatus, *, is_spot: bool) -> DeathCause | None:
        """Return why it is not there any more: a preemption looks like a halt."""
        return mapping.death_cause(status, is_spot=is_spot)

    def check(self) -> CredentialReport:
        """Find the credentials and try them; the provider tells no balance."""
        found = find_key(self._parts.environ)
        if found is None:
            return mapping.no_key_report()
        try:
            projects = self._client.projects()
            for project in projects[:1]:
                self._client.platforms(_project_id(project))
        except AuthError as exc:
            return CredentialReport(found_in=found.found_in, is_valid=False, advice=str(exc))
        advice = "" if projects else "there is no project: make one, or set NEBIUS_PROJECT_ID"
        return CredentialReport(found_in=found.found_in, is_valid=True, advice=advice)

    def _search(self, c: OfferConstraints, *, is_spot: bool) -> list[Offer]:
        mapping.target_of(c)  # refuses what nobody has before anything is asked
        advice = self._client.advice()
        offers = [
            offer
            for project in self._client.projects()
            for offer in self._offers_in(project, c, advice=advice, is_spot=is_spot)
        ]
        return mapping.sorted_offers(offers, c)

    def _offers_in(
        self,
        project: Mapping[str, object],
        c: OfferConstraints,
        *,
        advice: list[Mapping[str, object]],
        is_spot: bool,
    ) -> Iterable[Offer]:
        platforms = self._client.platforms(_project_id(project))
        for platform, preset, board in mapping.presets_of(platforms, c, is_spot=is_spot):
            region = mapping.region_of(project)
            if mapping.is_exhausted(
                advice, region=region, platform=platform, preset=preset, is_spot=is_spot
            ):
                continue
            document = mapping.priced_document(
                _project_id(project), platform=platform, preset=preset, is_spot=is_spot
            )
            dph = self._price(document, disk_gb=c.min_disk_gb)
            if dph is not None:
                yield mapping.offer_of(
                    project, platform=platform, preset=preset, board=board, dph=dph, c=c
                )

    def _price(self, document: Mapping[str, object], *, disk_gb: int) -> float | None:
        """Return $/h of the machine and its disk, or None where one is not told."""
        machine = self._client.estimate("compute_instance_spec", mapping.without_disk(document))
        disk = self._client.estimate(
            "compute_disk_spec",
            mapping.disk_document(mapping.project_of(document), disk_gb=disk_gb),
        )
        prices = (mapping.cost_of(machine), mapping.cost_of(disk))
        return None if prices[0] is None or prices[1] is None else prices[0] + prices[1]

    def _document(
        self, offer_id: str, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> dict[str, object]:
        project_id, _, _ = mapping.parse_offer_id(offer_id)
        public_key = creation.read_public_key(ssh_pubkey_path)
        try:
            subnet_id = mapping.subnet_of(self._client.subnets(project_id))
        except ApiError as exc:
            raise creation.provision_error(exc) from exc
        if subnet_id is None:
            raise ProvisionError(
                f"nebius: project {project_id} has no subnet; make one at the provider"
            )
        return mapping.create_document(
            offer_id,
            disk_gb=disk_gb,
            image_family=mapping.image_family_of(image, self._config.image_family),
            subnet_id=subnet_id,
            user_data=mapping.user_data_of(public_key, user=self._config.ssh_user),
            label=label,
        )

    def _provision(self, document: Mapping[str, object], label: str) -> InstanceHandle:
        created_at = self._clock.time()
        # labels are unique per attempt, so one that is sent twice by anybody makes one machine
        key = hashlib.sha256(label.encode()).hexdigest()[:32]

        def call() -> InstanceHandle:
            instance_id = self._client.create(document, idempotency_key=key)
            return InstanceHandle(self.name, instance_id, label, created_at)

        return creation.create(
            call,
            label=label,
            listing=self.list_instances,
            clock=self._clock,
            settle_s=creation.SETTLE_S,
        )

    def _act(self, h: InstanceHandle, order: Callable[[str], None], *wanted: InstanceState) -> None:
        """Move a machine; one that is there already was refused for its state, and is fine."""
        try:
            order(h.instance_id)
        except AbsentError as exc:
            raise InstanceNotFoundError(f"nebius machine {h.instance_id} does not exist") from exc
        except RequestError:
            if InstanceState.parse(self.status(h).state) not in wanted:
                raise
        self._reach.drop(h)


def _project_id(project: Mapping[str, object]) -> str:
    return text_at(project, "metadata", "id")
