"""A provider in memory that keeps a bill and fails on command."""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.core.clock import Clock
from paceline.rental import waiting
from paceline.rental.errors import (
    BackendError,
    InstanceNotFoundError,
    NoOffersError,
    ProvisionError,
    RateLimitError,
    SshUnreachableError,
)
from paceline.rental.model import (
    ExitCode,
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
)
from paceline.rental.remote.protocol import Remote

_log = logging.getLogger("paceline.testing.fakes")


class Fault(StrEnum):
    """What goes wrong with one call; each stands for something that a real provider did."""

    NO_CAPACITY = "no_capacity"
    """provision: sure that nothing was created."""
    TOO_OFTEN = "too_often"
    """provision: 429, before anything was done."""
    REFUSED = "refused"
    """provision: an error that nobody thought of, and nothing was created."""
    ERROR_BUT_CREATED = "error_but_created"
    """provision: status 500, and the machine runs and bills."""
    LEAKED = "leaked"
    """provision: the machine was made, something after it failed, and the handle is known."""
    LOST_CREATE_REPLY = "lost_create_reply"
    """provision: done, and the connection broke before the answer."""
    NEVER_BOOTS = "never_boots"
    """provision: answered, and the machine stays loading."""
    UNREACHABLE = "unreachable"
    """status, listing or teardown: no answer, nothing done."""
    LOST_TEARDOWN_REPLY = "lost_teardown_reply"
    """teardown: done, and the connection broke before the answer."""
    IGNORED_TEARDOWN = "ignored_teardown"
    """teardown: answered as if done, and the machine bills on."""


@dataclass(slots=True)
class FakeInstance:
    """One machine of the fake provider: what it is called and since when it costs."""

    handle: InstanceHandle
    dph: float
    boots: bool
    listed_from_s: float
    ended_at_s: float | None = None


@dataclass(slots=True, kw_only=True)
class FakeBackend:
    """The seed's eight methods and nothing more, over machines that exist only here.

    ``faults`` are used up by the calls that they are for, in order. With ``remote`` the machines
    have a shell and files; without it, commands succeed and do nothing.
    """

    clock: Clock
    name: str = "fake"
    dphs: tuple[float, ...] = (1.0, 2.0)
    """One offer per price, on sale for ever."""
    boot_s: float = 30.0
    listing_lag_s: float = 0.0
    remote: Callable[[InstanceHandle], Remote] | None = None
    on_gone: Callable[[InstanceHandle], None] | None = None
    faults: list[Fault] = field(default_factory=list)
    instances: list[FakeInstance] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    before_call: Callable[[str], None] = lambda _method: None
    """Runs before every call; raising here is a crash of the caller."""
    after_call: Callable[[str], None] = lambda _method: None
    """Runs when a call is done and its answer has not arrived yet."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def billing(self) -> list[FakeInstance]:
        """Return the machines that cost money now."""
        with self._lock:
            return [instance for instance in self.instances if instance.ended_at_s is None]

    def bill_usd(self, *, without: Collection[str] = ()) -> float:
        """Return what all machines have cost so far, those of the labels in ``without`` apart."""
        now_s = self.clock.time()
        with self._lock:
            return sum(
                instance.dph * ((instance.ended_at_s or now_s) - instance.handle.created_at) / 3600
                for instance in self.instances
                if instance.handle.label not in without
            )

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return what is within the price limit."""
        self._call("search_offers")
        fitting = [
            self._offer(place, dph, c)
            for place, dph in enumerate(self.dphs)
            if c.max_dph is None or dph <= c.max_dph
        ]
        if not fitting:
            raise NoOffersError(f"{self.name}: nothing for {c.gpu_target} under {c.max_dph} $/h")
        return sorted(fitting, key=lambda offer: offer.dph)

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        """Create a machine, or fail in the way that comes next."""
        self._call("provision")
        fault = self._take_fault(*_PROVISION_FAULTS)
        if not offer_id.startswith(f"{self.name}-") or fault is Fault.NO_CAPACITY:
            raise ProvisionError(f"{self.name}: no capacity for offer {offer_id}")
        if fault is Fault.TOO_OFTEN:
            raise ProvisionError(f"{self.name}: too many requests") from RateLimitError(
                "429", pace_s=12.0
            )
        if fault is Fault.REFUSED:
            raise BackendError(f"{self.name}: status 418")
        handle = self._add(offer_id, label, boots=fault is not Fault.NEVER_BOOTS)
        if fault is Fault.ERROR_BUT_CREATED:
            raise BackendError(f"{self.name}: status 500")
        if fault is Fault.LOST_CREATE_REPLY:
            raise ConnectionResetError(f"{self.name}: connection reset")
        if fault is Fault.LEAKED:
            raise ProvisionError(f"{self.name}: key could not be attached", leaked=handle)
        self.after_call("provision")
        return handle

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Wait on the clock until it runs."""
        waiting.wait_running(lambda: self.status(h), clock=self.clock, timeout_s=timeout_s)

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
        """Copy to the machine's own files, where it has some."""
        self._call("sync_to")
        remote = self._remote_of(h)
        if remote is not None:
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
        """Run it in the machine's shell, where it has one."""
        self._call("run_remote")
        remote = self._remote_of(h)
        if remote is None:
            return ExitCode(0, 0.0)
        return remote.run(command, env=env, stream=stream, timeout_s=timeout_s)

    def sync_from(
        self,
        h: InstanceHandle,
        src: str,
        dst: Path,
        *,
        includes: Iterable[str] = (),
        excludes: Iterable[str] = (),
    ) -> None:
        """Copy from the machine's own files, where it has some."""
        self._call("sync_from")
        remote = self._remote_of(h)
        if remote is not None:
            remote.pull(src, dst, includes=includes, excludes=excludes)

    def status(self, h: InstanceHandle) -> InstanceStatus:
        """Say what the machine is doing."""
        self._call("status")
        if self._take_fault(Fault.UNREACHABLE):
            raise BackendError(f"{self.name}: no answer")
        instance = self._find(h)
        if instance is None:
            return InstanceStatus(InstanceState.DESTROYED.value, "", 0, None, None, {})
        uptime_s = self.clock.time() - instance.handle.created_at
        is_up = instance.boots and uptime_s >= self.boot_s
        state = InstanceState.RUNNING if is_up else InstanceState.LOADING
        return InstanceStatus(state.value, "fake", 1, uptime_s, None, {})

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        """End the machine and its bill."""
        self._call("teardown")
        fault = self._take_fault(*_TEARDOWN_FAULTS)
        if fault is Fault.UNREACHABLE:
            raise BackendError(f"{self.name}: no answer")
        instance = self._find(h)
        if instance is None:
            _log.warning("%s machine %s is gone already", self.name, h.instance_id)
            return
        if fault is Fault.IGNORED_TEARDOWN:
            return
        if self.on_gone is not None:
            self.on_gone(h)
        instance.ended_at_s = self.clock.time()
        if fault is Fault.LOST_TEARDOWN_REPLY:
            raise BackendError(f"{self.name}: connection reset")
        self.after_call("teardown")

    def _call(self, method: str) -> None:
        self.calls.append(method)
        self.before_call(method)

    def _take_fault(self, *kinds: Fault) -> Fault | None:
        """Use up the next fault if it is for this call."""
        with self._lock:
            if self.faults and self.faults[0] in kinds:
                return self.faults.pop(0)
            return None

    def _offer(self, place: int, dph: float, c: OfferConstraints) -> Offer:
        count = int(c.gpu_target.rpartition("-")[2].removesuffix("x"))
        return Offer(
            backend=self.name,
            id=f"{self.name}-{place}",
            gpu_name="fake",
            num_gpus=count,
            gpu_total_ram_gb=24 * count,
            dph=dph,
            reliability=0.99,
            inet_down_mbps=1000.0,
            disk_space_gb=10_000.0,
            geolocation="nowhere",
            raw={},
        )

    def _add(self, offer_id: str, label: str, *, boots: bool) -> InstanceHandle:
        with self._lock:
            now_s = self.clock.time()
            handle = InstanceHandle(self.name, f"i-{len(self.instances)}", label, now_s)
            self.instances.append(
                FakeInstance(
                    handle,
                    dph=self.dphs[int(offer_id.rpartition("-")[2])],
                    boots=boots,
                    listed_from_s=now_s + self.listing_lag_s,
                )
            )
            return handle

    def _find(self, h: InstanceHandle) -> FakeInstance | None:
        return next(
            (
                instance
                for instance in self.billing()
                if instance.handle.instance_id == h.instance_id
            ),
            None,
        )

    def _remote_of(self, h: InstanceHandle) -> Remote | None:
        instance = self._find(h)
        if instance is None:
            raise InstanceNotFoundError(f"{self.name}: no machine {h.instance_id}")
        if self.clock.time() - instance.handle.created_at < self.boot_s:
            raise SshUnreachableError(f"{self.name}: {h.instance_id} is not up yet")
        return self.remote(h) if self.remote is not None else None


@dataclass(slots=True, kw_only=True)
class ListingFakeBackend(FakeBackend):
    """The same provider with a listing, which may be late by ``listing_lag_s``."""

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return what has had the time to show up."""
        self._call("list_instances")
        if self._take_fault(Fault.UNREACHABLE):
            raise BackendError(f"{self.name}: no answer")
        now_s = self.clock.time()
        return [
            instance.handle
            for instance in self.billing()
            if instance.listed_from_s <= now_s and instance.handle.label.startswith(label_prefix)
        ]


_PROVISION_FAULTS = (
    Fault.NO_CAPACITY,
    Fault.TOO_OFTEN,
    Fault.REFUSED,
    Fault.ERROR_BUT_CREATED,
    Fault.LEAKED,
    Fault.LOST_CREATE_REPLY,
    Fault.NEVER_BOOTS,
)
_TEARDOWN_FAULTS = (Fault.UNREACHABLE, Fault.LOST_TEARDOWN_REPLY, Fault.IGNORED_TEARDOWN)
