"""The machines of one run. Every call that blocks on a machine is made in a thread of its own.

Threads tell the driver what happened through one inbox and decide nothing. They are daemons: a
thread that hangs on a dead machine must not keep the process from ending, the record of the
machine outlives both.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue
from threading import Lock, Thread
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, PreflightError
from paceline.rental import (
    BackendAdapter,
    DeathCause,
    GoneUnrecordedError,
    InstanceHandle,
    RemoteCommandError,
)
from paceline.rental.budget import Spending
from paceline.rental.death import Death
from paceline.rental.orchestrator import RentRequest
from paceline.rental.records import Machine
from paceline.runs.bootstrap import Guest, Kit, bootstrap
from paceline.runs.model import JobSpec, RoleSpec, Slot, slots_of
from paceline.runs.passing import Passing, no_passing
from paceline.runs.supervision import MachineLostError, Patience, Supervised


class Rental(Protocol):
    """What a run asks of the rental half's orchestrator."""

    def rent(self, request: RentRequest) -> Machine:
        """Return a machine that runs. Raises BackendError; whatever exists stays on record."""
        ...

    def stop_renting(self, run_id: str) -> None:
        """Begin no further attempt to rent for a run."""
        ...

    def destroy(self, machine: Machine | str) -> object:
        """End a machine and see it gone; idempotent. What it returns says what was verified.

        Raises NotProvenGoneError, or GoneUnrecordedError when it is gone and cannot be written off.
        """
        ...

    def autopsy(self, machine: Machine) -> Death | None:
        """Return why a machine is missed; None where it lives."""
        ...

    def machines(self, run_id: str | None = None) -> Sequence[Machine]:
        """Return everything on record that is not proven gone."""
        ...

    def spending(self, run_id: str) -> Spending:
        """Return what the run has cost so far, and what it burns."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A slot's machine is rented, or has everything on it: the step asked for is done."""

    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A slot's command is about to be started on a machine that has everything."""

    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A slot's command ended."""

    slot: Slot
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A slot's machine is gone or does not answer."""

    slot: Slot
    reason: str
    cause: DeathCause = DeathCause.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A step did not work, for a reason that the error names."""

    slot: Slot
    error: PacelineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hitch:
    """An errand beside the role's command did not work; the role goes on."""

    slot: Slot
    error: PacelineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Broke:
    """A thread met a bug; the driver raises it on."""

    slot: Slot
    error: BaseException


Message = Ready | Started | Exited | Lost | Failed | Hitch | Broke
OnMachine = Callable[[Slot, BackendAdapter, InstanceHandle, Guest], None]
"""What is done on a slot's machine, by whoever is asked to; may raise PacelineError."""


def _nothing(slot: Slot, backend: BackendAdapter, handle: InstanceHandle, guest: Guest) -> None:
    """Do nothing there."""


def no_link(slot: Slot, machine: Machine) -> None:
    """Leave machines as they are: nobody has to reach anybody."""


def no_wheel(slot: Slot, machine: Machine) -> None:
    """Bring no Paceline: it is there, or not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetParts:
    """What the machines of a run are made with."""

    job: JobSpec
    run_id: str
    rental: Rental
    backend: Callable[[str], BackendAdapter]
    env_of: Callable[[Slot, str], Mapping[str, str]]
    """(slot, backend name) -> what the role is started with."""
    secrets_of: Callable[[RoleSpec], Mapping[str, str]]
    ssh_pubkey_path: Path
    scratch: Path
    """A directory of this run alone, for what is about to be copied to a machine."""
    clock: Clock
    nonce: Callable[[], str]
    """Fresh lower-case hex: what an attempt to run a role is known by."""
    link: Callable[[Slot, Machine], None] = no_link
    """Sees to it that a slot's machine and the other parts of the run reach each other."""
    wheel_for: Callable[[Slot, Machine], Path | None] = no_wheel
    """Returns Paceline for a machine that has to have it."""
    rented: Callable[[Machine], None] = lambda machine: None
    """Is told of each machine that runs."""
    passing: Passing = no_passing
    """Passes the output of roles through, beside their logs."""
    patience: Patience = field(default_factory=Patience)
    adopted: Mapping[Slot, Machine] = field(default_factory=dict)
    """Machines of this run that somebody else has rented, and perhaps set up and started."""
    arm: OnMachine = _nothing
    """Comes after the bootstrap: installs what ends a machine that nobody asks after."""
    prepare: OnMachine = _nothing
    """Comes before each start of the role's command: brings what it goes on from."""
    retry_for_s: float | None = None
    """Where nothing can be had now, ask again for so long."""
    ports: Mapping[Slot, tuple[int, ...]] = field(default_factory=dict)
    """What the world should reach of a slot's machine, where its backend can do that."""


class Fleet:
    """Machines by slot, and what can be done with them."""

    def __init__(self, parts: FleetParts) -> None:
        self._parts = parts
        self._roles = slots_of(parts.job)
        self._machines: dict[Slot, Machine] = dict(parts.adopted)
        self._adopted = set(parts.adopted)
        self._inbox: Queue[Message] = Queue()
        self._renting: set[Slot] = set()
        self._unrecorded: dict[str, GoneUnrecordedError] = {}
        self._lock = Lock()

    @property
    def renting(self) -> frozenset[Slot]:
        """Return the slots for which a create call may be under way."""
        with self._lock:
            return frozenset(self._renting)

    @property
    def unrecorded(self) -> Mapping[str, GoneUnrecordedError]:
        """Return, by label, the machines that are gone although the record could not be told."""
        with self._lock:
            return dict(self._unrecorded)

    @property
    def machines(self) -> Mapping[Slot, Machine]:
        """Return the machine that each slot has now."""
        with self._lock:
            return dict(self._machines)

    def next_message(self, *, timeout_s: float) -> Message | None:
        """Return what happened next, None when nothing did for ``timeout_s``."""
        try:
            return self._inbox.get(block=timeout_s > 0, timeout=timeout_s)
        except Empty:
            return None

    def rent(self, slot: Slot) -> None:
        """Begin to rent, unless there is a machine; ends in Ready or Failed."""
        if slot in self.machines:
            self._inbox.put(Ready(slot=slot))
            return
        self._begin(slot, lambda: self._rented(slot), rents=True)

    def bootstrap(self, slot: Slot) -> None:
        """Begin to put everything on the machine; ends in Ready or Failed."""
        self._begin(slot, lambda: self._bootstrapped(slot))

    def start(self, slot: Slot) -> None:
        """Start the role's command; ends in Exited or Lost."""
        self._begin(slot, lambda: self._ran(slot))

    def replace(self, slot: Slot) -> None:
        """Rent another machine for the slot and start its command there; ends as start does."""
        self._begin(slot, lambda: self._replaced(slot), rents=True)

    def stop(self, slot: Slot) -> None:
        """Ask the role's command to end; the call that started it then ends in Exited."""
        self._begin(slot, lambda: self._stopped(slot))

    def pull(self, slot: Slot, out: Path, paths: Sequence[str]) -> Thread:
        """Copy the slot's logs and artifacts below ``out``; ends in Ready or Hitch.

        The thread returned is alive while it copies.
        """
        return self._begin(slot, lambda: self._pulled(slot, out, paths), is_errand=True)

    def errand(self, slot: Slot, work: OnMachine) -> Thread:
        """Do something beside the slot's command on its machine; only a Hitch is told."""

        def done() -> None:
            work(slot, *self._reach(slot), self._guest(slot))

        return self._begin(slot, done, is_errand=True)

    def destroy(self, machine: Machine) -> None:
        """End one machine and see it gone; ends in Ready or Failed."""
        slot = Slot(role=machine.role, index=machine.index)

        def work() -> Message:
            try:
                self._parts.rental.destroy(machine)
            except GoneUnrecordedError as exc:
                with self._lock:
                    self._unrecorded[machine.label] = exc
            return Ready(slot=slot)

        self._begin(slot, work)

    def _begin(
        self,
        slot: Slot,
        work: Callable[[], Message | None],
        *,
        rents: bool = False,
        is_errand: bool = False,
    ) -> Thread:
        if rents:
            with self._lock:
                self._renting.add(slot)
        trouble = Hitch if is_errand else Failed
        argv = (slot, work, trouble)
        thread = Thread(target=self._carry_out, args=argv, name=str(slot), daemon=True)
        thread.start()
        return thread

    def _carry_out(
        self, slot: Slot, work: Callable[[], Message | None], trouble: type[Failed | Hitch]
    ) -> None:
        message: Message | None
        try:
            message = work()
        except PacelineError as exc:
            message = trouble(slot=slot, error=exc)
        except BaseException as exc:  # noqa: BLE001 - handed to the driver, which raises it
            message = Broke(slot=slot, error=exc)
        if message is not None:
            self._inbox.put(message)

    def _rented(self, slot: Slot) -> Message:
        try:
            machine = self._parts.rental.rent(self._request(slot))
        finally:
            with self._lock:
                self._renting.discard(slot)
        with self._lock:
            self._machines[slot] = machine
        self._parts.rented(machine)
        return Ready(slot=slot)

    def _request(self, slot: Slot) -> RentRequest:
        request = rent_request(
            self._roles[slot],
            slot.index,
            run_id=self._parts.run_id,
            ssh_pubkey_path=self._parts.ssh_pubkey_path,
        )
        budget = self._parts.job.budget
        return replace(
            request,
            hard_usd=None if budget is None else budget.hard_usd,
            retry_for_s=self._parts.retry_for_s,
            ports=self._parts.ports.get(slot, ()),
        )

    def _bootstrapped(self, slot: Slot) -> Message:
        backend, handle = self._reach(slot)
        role = self._roles[slot]
        self._parts.link(slot, self.machines[slot])
        if not (slot in self._adopted and self._supervised(slot).is_ready()):
            kit = Kit(
                role=role,
                env=self._parts.env_of(slot, handle.backend),
                secrets=self._parts.secrets_of(role),
                scratch=self._parts.scratch,
                wheel=self._parts.wheel_for(slot, self.machines[slot]),
            )
            bootstrap(backend, handle, guest=self._guest(slot), kit=kit)
        self._parts.arm(slot, backend, handle, self._guest(slot))
        return Ready(slot=slot)

    def _ran(self, slot: Slot) -> Message:
        try:
            return Exited(slot=slot, code=self._attempted(slot))
        except MachineLostError as exc:
            return self._lost(slot, str(exc))

    def _lost(self, slot: Slot, reason: str) -> Lost:
        """Say why, as far as the provider tells; that it does not changes nothing else."""
        try:
            death = self._parts.rental.autopsy(self.machines[slot])
        except PacelineError:
            death = None
        if death is None:
            return Lost(slot=slot, reason=reason)
        told = "; ".join(dict.fromkeys(filter(None, (reason, death.reason))))
        return Lost(slot=slot, reason=told, cause=death.cause)

    def _attempted(self, slot: Slot) -> int:
        """Begin the role, or find it begun on a machine that was adopted; return how it ended."""
        role = self._supervised(slot)
        machine = self.machines[slot]
        token = ""
        if not (self._take_adopted(slot) and role.has_begun()):
            token = self._parts.nonce()
            self._parts.prepare(slot, *self._reach(slot), self._guest(slot))
            role.begin(token, self._parts.env_of(slot, machine.backend))
        self._inbox.put(Started(slot=slot))
        with self._parts.passing(machine, self._guest(slot)):
            return role.wait(token)

    def _take_adopted(self, slot: Slot) -> bool:
        """Return whether the slot's machine came with a role, the first time that it is asked."""
        with self._lock:
            was_adopted = slot in self._adopted
            self._adopted.discard(slot)
        return was_adopted

    def _supervised(self, slot: Slot) -> Supervised:
        backend, handle = self._reach(slot)
        patience = self._parts.patience
        if self._roles[slot].spot:
            patience = replace(patience, ask_every_s=patience.ask_spot_every_s)
        return Supervised(
            backend, handle, self._guest(slot), clock=self._parts.clock, patience=patience
        )

    def _replaced(self, slot: Slot) -> Message:
        try:
            self._parts.rental.destroy(self.machines[slot].label)
        except PacelineError:
            with self._lock:
                self._renting.discard(slot)
            raise
        self._rented(slot)
        self._bootstrapped(slot)
        return self._ran(slot)

    def _stopped(self, slot: Slot) -> Message:
        self._supervised(slot).stop()
        return Ready(slot=slot)

    def _pulled(self, slot: Slot, out: Path, paths: Sequence[str]) -> Message:
        backend, handle = self._reach(slot)
        guest = self._guest(slot)
        mine = out / "artifacts" / str(slot)
        try:
            for directory in (out / "logs", mine):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise PreflightError(f"cannot make {exc.filename}: {exc.strerror}") from exc
        wanted = {guest.path("logs"): out / "logs", guest.path("out"): mine}
        for path in paths:
            wanted[guest.path("work", path.rstrip("/"))] = mine / path.rstrip("/")
        for there, here in wanted.items():
            try:
                backend.sync_from(handle, there, here)
            except RemoteCommandError:
                # A machine whose setup was cut short has nothing yet, and roles share one list of
                # paths although not every role makes everything on it.
                asked = f"test -e {shlex.quote(there)}"
                if backend.run_remote(handle, asked, stream=False, timeout_s=30).code != 1:
                    raise
        return Ready(slot=slot)

    def _reach(self, slot: Slot) -> tuple[BackendAdapter, InstanceHandle]:
        handle = self.machines[slot].handle
        return self._parts.backend(handle.backend), handle

    def _guest(self, slot: Slot) -> Guest:
        return Guest(run_id=self._parts.run_id, slot=slot)


def rent_request(role: RoleSpec, index: int, *, run_id: str, ssh_pubkey_path: Path) -> RentRequest:
    """Return what one slot of a role asks the rental half for."""
    return RentRequest(
        run_id=run_id,
        role=role.name,
        index=index,
        gpu=role.gpu,
        backends=role.backends,
        min_disk_gb=role.disk_gb,
        max_dph=role.max_dph,
        image=role.image,
        ssh_pubkey_path=ssh_pubkey_path,
        boot_timeout_s=role.boot_timeout_s,
        is_spot=role.spot,
        min_reliability=role.min_reliability,
        min_inet_down_mbps=role.min_inet_mbps,
        net_floor_mbps=role.net_floor_mbps,
    )
