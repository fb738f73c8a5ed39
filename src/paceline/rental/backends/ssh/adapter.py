"""Your own hosts as machines: taken one at a time, cleaned when given back, otherwise untouched.

On the host, below ``directory`` (``.paceline`` in the login directory)::

    machines/<instance_id>/workspace/   what relative remote paths are relative to
    machines/<instance_id>/jobs/        commands that run
    jobs/                               the same for what this file asks of the host itself

and, for all users of the host, a link at ``lock``. It is the machine: there is no record here.
"""

import getpass
import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from paceline.core.address import join_address
from paceline.core.errors import UsageError
from paceline.rental import waiting
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.registry import register_backend
from paceline.rental.backends.ssh import mapping
from paceline.rental.backends.ssh.config import (
    EXAMPLE,
    FILE_NAME,
    HostConfig,
    SshConfig,
    load_config,
)
from paceline.rental.backends.ssh.mapping import HostFacts, Lock
from paceline.rental.errors import (
    BackendError,
    InstanceNotFoundError,
    NoOffersError,
    ProvisionError,
    SshKeyError,
    SshUnreachableError,
)
from paceline.rental.model import (
    CredentialReport,
    ExitCode,
    InstanceHandle,
    InstanceStatus,
    Offer,
    OfferConstraints,
)
from paceline.rental.remote.protocol import Captured, NetworkRemote, SshTarget

_ASK_TIMEOUT_S = 60.0
_REMOVE_TIMEOUT_S = 600.0
_NUM_AT_ONCE = 16
_log = logging.getLogger("paceline.rental.ssh")
_T = TypeVar("_T")


@register_backend(mapping.BACKEND)
class SshBackend:
    """Machines that you own, from a list in ``hosts.toml``."""

    name = mapping.BACKEND
    listing_lag_s = 0.0

    def __init__(self, config: SshConfig | None = None, *, parts: Parts | None = None) -> None:
        """Build the adapter; the list is read when it is first needed."""
        self._parts = parts or default_parts()
        self._given = config
        self._config_path = self._parts.config_dir / FILE_NAME

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Ask every host that has what is wanted, at once; one that does not answer is no offer."""
        hosts = self._hosts()
        if not hosts:
            raise NoOffersError(
                f"ssh: no hosts are known; list them in {self._config_path}, such as {EXAMPLE}"
            )
        candidates = [host for host in hosts if mapping.is_candidate(c, host.gpu)]
        if not candidates:
            have = ", ".join(f"{host.name} {host.gpu}" for host in hosts)
            raise NoOffersError(f"ssh: no host has {c.gpu_target}; there is {have}")
        offers, reasons = [], []
        for host, facts in zip(candidates, self._ask_all(candidates, self._facts), strict=True):
            if isinstance(facts, BackendError):
                reasons.append(f"{host.name}: {facts}")
                _log.warning("%s is passed over: %s", host.name, facts)
            elif why := mapping.objection(facts, c, gpu=host.gpu, dph=host.dph):
                reasons.append(f"{host.name} {why}")
            else:
                offers.append(
                    mapping.offer_of(facts, c, name=host.name, address=host.address, dph=host.dph)
                )
        if not offers:
            raise NoOffersError(f"ssh: no host is free: {'; '.join(reasons)}")
        return sorted(offers, key=lambda offer: offer.dph)

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        """Take the host; image and key mean nothing here, since you are let in already."""
        host = self._host(offer_id)
        if host is None:
            raise ProvisionError(f"ssh: {offer_id!r} is no host of {self._config_path}")
        lock = Lock(
            instance_id=mapping.make_instance_id(host.name, self._parts.nonce()),
            label=label,
            created_at=self._parts.clock.time(),
            operator=f"{getpass.getuser()}@{platform.node()}",
        )
        script = mapping.take_script(
            directory=host.directory, lock_path=host.lock, lock=lock, disk_gb=disk_gb
        )
        try:
            answer = self._host_remote(host).capture(script, timeout_s=_ASK_TIMEOUT_S)
        except (SshUnreachableError, SshKeyError) as exc:
            # Both say that nothing was started.
            raise ProvisionError(f"ssh: host {host.name} was not taken: {exc}") from exc
        self._refuse(answer, host, disk_gb)
        return lock.handle()

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Return at once, or as soon as the host answers again."""
        waiting.wait_running(
            lambda: self.status(h),
            clock=self._parts.clock,
            timeout_s=timeout_s,
            what=f"ssh machine {h.instance_id}",
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
        """Copy to the workspace, or to an absolute path on the host, which stays yours."""
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
        """Run a command in the workspace."""
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
        """Copy from the workspace."""
        self._remote(h).pull(src, dst, includes=includes, excludes=excludes)

    def status(self, h: InstanceHandle) -> InstanceStatus:
        """Read the host's lock."""
        host = self._host_of(h)
        if host is None:
            return mapping.gone_status()
        directory = mapping.machine_dir(host.directory, h.instance_id)
        kind, _, count = host.gpu.rpartition("-")
        return mapping.status_of(
            self._facts(host).lock,
            h.instance_id,
            now_s=self._parts.clock.time(),
            endpoint=f"ssh://{host.user}@{join_address(host.address, host.port)}",
            raw={
                "host": host.address,
                "workspace": f"{directory}/workspace",
                "gpu": kind,
                "num_gpus": count.removesuffix("x"),
            },
        )

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        """End the machine's processes, remove its files, give the host back."""
        host = self._host_of(h)
        lock = None if host is None else self._facts(host).lock
        if host is None or lock is None or lock.instance_id != h.instance_id:
            _log.warning("ssh machine %s is gone already; nothing to tear down", h.instance_id)
            return
        of_host = self._host_remote(host)
        close = mapping.close_script(directory=host.directory, instance_id=h.instance_id)
        release = mapping.release_script(
            directory=host.directory,
            lock_path=host.lock,
            lock_text=mapping.render_lock(lock),
            instance_id=h.instance_id,
        )
        self._must(of_host.capture(close, timeout_s=_ASK_TIMEOUT_S), host)
        try:
            self._machine_remote(host, h.instance_id, home="closing").close(force=force)
        except InstanceNotFoundError:
            # Somebody removed its files by hand; the lock is left.
            _log.warning("ssh machine %s has no files any more", h.instance_id)
        self._must(of_host.capture(release, timeout_s=_REMOVE_TIMEOUT_S), host)

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Read every host's lock. Raises where one does not answer: it may be taken by us."""
        handles = []
        for facts in self._ask_all(self._hosts(), self._facts):
            if isinstance(facts, BackendError):
                raise facts
            if facts.lock is not None and facts.lock.label.startswith(label_prefix):
                handles.append(facts.lock.handle())
        return sorted(handles, key=lambda handle: handle.created_at)

    def check(self) -> CredentialReport:
        """Ask every host whether it lets us in."""
        hosts = self._hosts()
        if not hosts:
            advice = f"list your hosts in {self._config_path}, such as {EXAMPLE}"
            return CredentialReport(found_in=None, is_valid=False, advice=advice)
        answers = self._ask_all(hosts, self._facts)
        failures = [str(answer) for answer in answers if isinstance(answer, BackendError)]
        return CredentialReport(
            found_in=str(self._config_path),
            is_valid=not failures,
            account=f"{len(hosts) - len(failures)} of {len(hosts)} hosts answer",
            advice="; ".join(failures),
        )

    def _hosts(self) -> tuple[HostConfig, ...]:
        if self._given is None:
            try:
                self._given = load_config(self._config_path)
            except UsageError as exc:
                raise BackendError(f"ssh: {exc}") from exc
        return self._given.host

    def _host(self, name: str) -> HostConfig | None:
        return next((host for host in self._hosts() if host.name == name), None)

    def _host_of(self, h: InstanceHandle) -> HostConfig | None:
        """Return the host of a machine, None for a name that no machine has."""
        name = mapping.host_of(h.instance_id)
        if name is None:
            return None
        host = self._host(name)
        if host is None:
            raise BackendError(
                f"ssh machine {h.instance_id} is on host {name!r}, which {self._config_path} does "
                "not list any more; list it again to end the machine"
            )
        return host

    def _facts(self, host: HostConfig) -> HostFacts:
        script = mapping.look_script(directory=host.directory, lock=host.lock)
        answer = self._host_remote(host).capture(script, timeout_s=_ASK_TIMEOUT_S)
        return mapping.parse_facts(answer.output)

    def _ask_all(
        self, hosts: Iterable[HostConfig], ask: Callable[[HostConfig], _T]
    ) -> list[_T | BackendError]:
        """Ask all hosts at once; an error of one is its answer."""

        def answer(host: HostConfig) -> _T | BackendError:
            try:
                return ask(host)
            except BackendError as exc:
                return exc

        with ThreadPoolExecutor(max_workers=_NUM_AT_ONCE) as pool:
            return list(pool.map(answer, hosts))

    def _refuse(self, answer: Captured, host: HostConfig, disk_gb: int) -> None:
        """Raise ProvisionError unless the host is ours now."""
        if answer.code == mapping.TAKEN:
            lock = mapping.parse_lock(answer.output.strip())
            who = f"{lock.operator} as {lock.label}" if lock else f"whoever made {host.lock}"
            raise ProvisionError(f"ssh: host {host.name} is taken by {who}; take another or wait")
        if answer.code == mapping.SMALL_DISK:
            raise ProvisionError(
                f"ssh: host {host.name} has less than {disk_gb} GB of free disk; free some or ask "
                "for less"
            )
        if answer.code != 0:
            raise ProvisionError(
                f"ssh: host {host.name} was not taken: {answer.errors.strip()[-300:]}; "
                f"{host.user} must be able to write {host.lock} and {host.directory} there"
            )

    def _must(self, answer: Captured, host: HostConfig) -> None:
        if answer.code != 0:
            raise BackendError(
                f"ssh: host {host.name} is not given back yet: {answer.errors.strip()[-300:]}; "
                "mend that and tear down again"
            )

    def access(self, h: InstanceHandle) -> SshTarget:
        """Return where its sshd is, and which directory there is the machine."""
        return self._machine_target(self._must_host(h), h.instance_id, home="workspace")

    def _remote(self, h: InstanceHandle) -> NetworkRemote:
        return self._machine_remote(self._must_host(h), h.instance_id, home="workspace")

    def _must_host(self, h: InstanceHandle) -> HostConfig:
        host = self._host_of(h)
        if host is None:
            raise InstanceNotFoundError(
                f"ssh machine {h.instance_id!r} does not exist; provision another"
            )
        return host

    def _machine_remote(self, host: HostConfig, instance_id: str, *, home: str) -> NetworkRemote:
        return self._parts.ssh_remote(
            self._machine_target(host, instance_id, home=home), instance_id
        )

    def _machine_target(self, host: HostConfig, instance_id: str, *, home: str) -> SshTarget:
        directory = mapping.machine_dir(host.directory, instance_id)
        return self._target(host, home=f"{directory}/{home}", jobs="../jobs")

    def _host_remote(self, host: HostConfig) -> NetworkRemote:
        jobs = f"{host.directory.rstrip('/')}/jobs"
        return self._parts.ssh_remote(self._target(host, home=".", jobs=jobs), f"host-{host.name}")

    def _target(self, host: HostConfig, *, home: str, jobs: str) -> SshTarget:
        return SshTarget(
            name=f"ssh host {host.name}",
            host=host.address,
            port=host.port,
            user=host.user,
            known_hosts=self._parts.known_hosts(self.name, host.name),
            identity=host.identity,
            proxy_jump=host.proxy_jump,
            home=home,
            jobs=jobs,
        )
