"""Rents and ends machines so that nothing bills that is not on record.

The order of writes is the whole point. An intent with a unique label is in the store before
the create call is made, the id right after it is answered. A crash between the two leaves an
intent, and `reconcile` looks for its label at the provider. A machine leaves the list of
`machines` only when a read has shown that it is gone, or that it never was.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError, UsageError
from paceline.core.waiting import wait_until
from paceline.rental.backends.protocol import BackendAdapter, SupportsListing, SupportsListingLag
from paceline.rental.catalogue import parse_target
from paceline.rental.errors import (
    BackendError,
    GoneUnrecordedError,
    InstanceNotFoundError,
    NoOffersError,
    NotProvenGoneError,
    ProvisionError,
)
from paceline.rental.ledger import Ledger
from paceline.rental.lifecycle import MachineState, is_over
from paceline.rental.model import InstanceHandle, InstanceState, Offer, OfferConstraints
from paceline.rental.plan import (
    BackendAnswer,
    NextStep,
    PastFailure,
    RentPlan,
    after_failure,
    plan_attempts,
)
from paceline.rental.records import (
    LABEL_PREFIX,
    Finding,
    FindingKind,
    Machine,
    make_label,
    offer_summary,
)
from paceline.store.protocol import Store, StoreError

_LISTING_LAG_S = 900.0
"""How late a listing may be where the backend does not say; longer than any seen."""
_SETTLE_S_MAX = 30.0
"""How long renting waits for a lost machine to turn up in a listing before it gives up."""
_GONE_TIMEOUT_S = 120.0
_POLL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RentRequest:
    """One machine that a role of a run needs."""

    run_id: str
    role: str
    index: int
    gpu: str
    """Canonical target, ``h100-1x``."""
    backends: tuple[str, ...]
    """Where it may be rented; at equal price the first one wins."""
    min_disk_gb: int
    max_dph: float | None
    image: str
    ssh_pubkey_path: Path
    boot_timeout_s: int = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What a look for a label gave: a machine, or none and whether that proves anything."""

    instance: InstanceHandle | None = None
    proves_absence: bool = False
    note: str = ""


class Orchestrator:
    """Drives plan and lifecycle over backends, store and clock; several threads may use it."""

    def __init__(
        self,
        *,
        store: Store,
        backend: Callable[[str], BackendAdapter],
        clock: Clock,
        nonce: Callable[[], str],
        notify: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._ledger = Ledger(store)
        self._backend = backend
        self._clock = clock
        self._nonce = nonce
        self._notify = notify

    def plan(self, request: RentRequest, failures: Iterable[PastFailure] = ()) -> RentPlan:
        """Ask all backends of the request at once and order what they have. Creates nothing."""
        target = parse_target(request.gpu)
        constraints = OfferConstraints(
            str(target), min_disk_gb=request.min_disk_gb, max_dph=request.max_dph
        )
        if not request.backends:
            raise UsageError(f"role {request.role}: no backend is named; name at least one")
        with ThreadPoolExecutor(max_workers=len(request.backends)) as pool:
            answers = list(pool.map(lambda name: self._ask(name, constraints), request.backends))
        return plan_attempts(
            answers, constraints=constraints, num_gpus=target.count, failures=failures
        )

    def rent(self, request: RentRequest) -> Machine:
        """Return a machine that runs, from the cheapest offer that becomes one.

        Raises:
            NoOffersError: nothing on offer fits, or none of what fits could be had.
            DeadlineExceededError, InstanceNotFoundError: a machine never became usable; it
                has been destroyed.
            NotProvenGoneError: a machine may exist that could not be proven gone; it stays
                on record.
        """
        plan = self.plan(request)
        failures: list[PastFailure] = []
        refusing: set[str] = set()
        for offer in plan.attempts:
            if offer.backend in refusing:
                continue
            try:
                machine = self._create(request, offer)
            except (ProvisionError, NoOffersError) as exc:
                past = PastFailure(backend=offer.backend, offer_id=offer.id, reason=str(exc))
                failures.append(past)
                if isinstance(exc, ProvisionError) and exc.is_backend_wide:
                    refusing.add(offer.backend)
            else:
                return self._boot(machine, request)
        tried = "; ".join(map(str, failures)) or "nothing"
        raise NoOffersError(
            f"{request.role} {request.index}: no {request.gpu} could be rented. Tried: {tried}. "
            f"Passed over: {plan.explain() or 'nothing'}. Allow another backend, a higher price "
            "or less disk, or try again later"
        )

    def destroy(self, machine: Machine | str) -> None:
        """End a machine on record and see it gone; one that is over already is left as it is.

        A record that cannot be read or written holds nothing up: a machine that goes on billing
        because a disk is full is the worse of the two.

        Raises:
            UsageError: no such machine on record.
            NotProvenGoneError: it may still bill; it stays on record and destroying again is safe.
            GoneUnrecordedError: it is gone, and only the record does not say so yet.
            StoreError: the record cannot be read, and only a label was given.
        """
        found = self._find(machine)
        if is_over(found.state):
            return
        if found.instance is None:
            found, _ = self._resolve(found, settle_s=_SETTLE_S_MAX)
            if found.state is MachineState.NEVER_CREATED:
                return
        handle = found.handle
        if found.state is not MachineState.ENDING:
            # GONE follows from every state, so it does not matter whether this was written.
            with suppress(StoreError):
                found = self._ledger.move(found, MachineState.ENDING)
        try:
            self._backend(found.backend).teardown(handle)
        except InstanceNotFoundError:
            pass  # an adapter that is stricter than its contract; the read below decides
        except BackendError as exc:
            raise _not_proven_gone(found, str(exc)) from exc
        self._see_gone(found)
        try:
            self._end(found)
        except StoreError as exc:
            raise GoneUnrecordedError(
                f"machine {found.label} is gone, but that is not on record: {exc}. Mend that, then "
                "run `paceline gc`"
            ) from exc

    def _find(self, machine: Machine | str) -> Machine:
        """Return the record of a machine; if none can be read, the machine as it was handed in."""
        if isinstance(machine, str):
            return self._ledger.find(machine)
        try:
            return self._ledger.find(machine.label)
        except StoreError:
            return machine

    def machines(self, run_id: str | None = None) -> tuple[Machine, ...]:
        """Return everything on record that is not proven gone, oldest first."""
        alive = [machine for machine in self._ledger.machines(run_id) if not is_over(machine.state)]
        return tuple(sorted(alive, key=lambda machine: (machine.intended_at, machine.label)))

    def reconcile(
        self, *, run_id: str | None = None, backends: Iterable[str] = ()
    ) -> tuple[Finding, ...]:
        """Compare the record with what the backends say, and mend the record. Destroys nothing.

        Asked are the backends on record and those named. Call it for runs that nobody drives
        any more: an intent of a run that is being rented right now has no id either.
        """
        records = self._ledger.machines(run_id)
        findings = [
            finding
            for machine in records
            if not is_over(machine.state)
            for finding in self._check(machine)
        ]
        names = sorted({machine.backend for machine in records} | set(backends))
        for name in names:
            findings += self._find_unrecorded(name, run_id)
        return tuple(findings)

    def forget(self, label: str) -> None:
        """Take the operator's word that an intent without id came to nothing.

        Raises:
            IllegalMoveError: its machine is known; destroy it instead.
        """
        self._end(self._ledger.find(label), MachineState.NEVER_CREATED)

    def cost_usd(self, run_id: str) -> float:
        """Return what all machines of a run have cost at most, by price and our own clock."""
        now_s = self._clock.time()
        return sum(machine.cost_usd(now_s=now_s) for machine in self._ledger.machines(run_id))

    def _ask(self, name: str, constraints: OfferConstraints) -> BackendAnswer:
        try:
            offers = self._backend(name).search_offers(constraints)
        except BackendError as exc:
            return BackendAnswer(backend=name, refusal=str(exc))
        return BackendAnswer(backend=name, offers=tuple(offers))

    def _create(self, request: RentRequest, offer: Offer) -> Machine:
        """Write the intent, create, write the id.

        Raises ProvisionError or NoOffersError when the next offer may be tried.
        """
        machine = self._intend(request, offer)
        try:
            handle = self._backend(offer.backend).provision(
                offer.id,
                disk_gb=request.min_disk_gb,
                image=request.image,
                ssh_pubkey_path=request.ssh_pubkey_path,
                label=machine.label,
            )
        except Exception as exc:  # noqa: BLE001 - whatever an adapter raises, it may have created
            return self._after_failed_create(machine, exc)
        return self._take_created(machine, handle)

    def _intend(self, request: RentRequest, offer: Offer) -> Machine:
        machine = Machine(
            label=make_label(
                run_id=request.run_id, role=request.role, index=request.index, nonce=self._nonce()
            ),
            run_id=request.run_id,
            role=request.role,
            index=request.index,
            backend=offer.backend,
            offer=offer_summary(offer),
            state=MachineState.INTENDED,
            intended_at=self._clock.time(),
        )
        self._ledger.add(machine)
        return machine

    def _after_failed_create(self, machine: Machine, failure: Exception) -> Machine:
        """Return the machine if it exists after all; else raise, with the record telling why."""
        step = after_failure(failure)
        if step is NextStep.LOOK_AND_STOP:
            found, look = self._resolve(machine, settle_s=_SETTLE_S_MAX, failure=failure)
            if look.instance is not None:
                return found
            raise failure
        leaked = failure.leaked if isinstance(failure, ProvisionError) else None
        # A provider that answers "no" and creates nevertheless has been seen: look once.
        instance = leaked or self._look(machine).instance
        if instance is None:
            self._end(machine, MachineState.NEVER_CREATED)
        else:
            self.destroy(self._take(machine, instance))
        raise failure

    def _take(self, machine: Machine, instance: InstanceHandle) -> Machine:
        """Put the id on record, under the names by which this record knows the machine."""
        handle = replace(instance, backend=machine.backend, label=machine.label)
        return self._ledger.move(machine, MachineState.CREATED, instance=handle)

    def _take_created(self, machine: Machine, instance: InstanceHandle) -> Machine:
        """Put the id on record; if that cannot be done, do not leave the machine running."""
        try:
            return self._take(machine, instance)
        except Exception as exc:
            try:
                self._backend(machine.backend).teardown(instance)
            except BackendError as worse:
                raise _not_proven_gone(machine, f"id {instance.instance_id}: {worse}") from exc
            raise

    def _boot(self, machine: Machine, request: RentRequest) -> Machine:
        told = {"role": machine.role, "index": machine.index, "label": machine.label}
        self._notify(
            "machine.provisioned",
            {**told, "backend": machine.backend, "instance_id": machine.handle.instance_id},
        )
        try:
            self._backend(machine.backend).wait_running(
                machine.handle, timeout_s=request.boot_timeout_s
            )
        except Exception:
            self.destroy(machine)
            raise
        running = self._ledger.move(machine, MachineState.RUNNING)
        self._notify("machine.running", told)
        return running

    def _resolve(
        self, machine: Machine, *, settle_s: float, failure: Exception | None = None
    ) -> tuple[Machine, _Look]:
        """Find out what became of an intent, waiting up to ``settle_s`` for a late listing.

        Raises NotProvenGoneError if that cannot be found out now.
        """
        deadline = self._clock.monotonic() + settle_s
        look = self._look(machine)
        while look.instance is None and not look.proves_absence:
            left_s = deadline - self._clock.monotonic()
            if left_s <= 0 or not isinstance(self._backend(machine.backend), SupportsListing):
                raise _not_proven_gone(machine, look.note) from failure
            self._clock.sleep(min(_POLL_S, left_s))
            look = self._look(machine)
        if look.instance is not None:
            return self._take(machine, look.instance), look
        return self._end(machine, MachineState.NEVER_CREATED), look

    def _look(self, machine: Machine) -> _Look:
        """Ask the backend once for the machine's label."""
        backend = self._backend(machine.backend)
        if not isinstance(backend, SupportsListing):
            return _Look(note=f"{machine.backend} cannot list machines")
        age_s = self._clock.time() - machine.intended_at
        try:
            listed = backend.list_instances(label_prefix=machine.label)
        except BackendError as exc:
            return _Look(note=str(exc))
        for instance in listed:
            if instance.label == machine.label:
                return _Look(instance=instance)
        lag_s = _lag_of(backend)
        note = f"not listed {age_s:.0f} s after its create call; listings may be {lag_s:g} s late"
        return _Look(proves_absence=age_s >= lag_s, note=note)

    def _see_gone(self, machine: Machine) -> None:
        """Read until the backend says gone.

        Raises NotProvenGoneError if it does not in time.
        """
        said = "nothing"

        def is_gone() -> bool:
            nonlocal said
            try:
                said = f"state {self._state_of(machine)}"
            except BackendError as exc:
                said = str(exc)
                return False
            return said == f"state {InstanceState.DESTROYED}"

        try:
            wait_until(
                is_gone,
                what=machine.label,
                clock=self._clock,
                timeout_s=_GONE_TIMEOUT_S,
                interval_s=_POLL_S,
            )
        except DeadlineExceededError as exc:
            raise _not_proven_gone(machine, f"last read: {said}") from exc

    def _state_of(self, machine: Machine) -> InstanceState:
        try:
            status = self._backend(machine.backend).status(machine.handle)
        except InstanceNotFoundError:
            return InstanceState.DESTROYED
        return InstanceState.parse(status.state)

    def _check(self, machine: Machine) -> list[Finding]:
        """Bring one live record up to date."""
        if machine.instance is None:
            return [self._check_intent(machine)]
        try:
            state = self._state_of(machine)
        except BackendError as exc:
            return [_finding(FindingKind.NOT_PROVEN, machine, str(exc))]
        # Right after a create call some providers do not know the machine yet.
        age_s = self._clock.time() - machine.intended_at
        is_settled = age_s >= _lag_of(self._backend(machine.backend))
        if state is not InstanceState.DESTROYED:
            return []
        if machine.state is MachineState.CREATED and not is_settled:
            return [_finding(FindingKind.NOT_PROVEN, machine, "not known there yet, or gone")]
        return [_finding(FindingKind.GONE, self._end(machine))]

    def _check_intent(self, machine: Machine) -> Finding:
        try:
            found, look = self._resolve(machine, settle_s=0.0)
        except NotProvenGoneError as exc:
            return _finding(FindingKind.NOT_PROVEN, machine, str(exc))
        kind = FindingKind.ADOPTED if look.instance else FindingKind.NEVER_CREATED
        return _finding(kind, found, look.note)

    def _find_unrecorded(self, name: str, run_id: str | None) -> list[Finding]:
        """Look for machines with labels of ours that are on no live record."""
        backend = self._backend(name)
        if not isinstance(backend, SupportsListing):
            return []
        prefix = LABEL_PREFIX if run_id is None else f"{LABEL_PREFIX}{run_id}-"
        try:
            listed = backend.list_instances(label_prefix=prefix)
        except BackendError as exc:
            note = f"cannot be listed: {exc}"
            return [
                Finding(
                    kind=FindingKind.NOT_PROVEN,
                    label=f"{prefix}*",
                    backend=name,
                    instance=None,
                    note=note,
                )
            ]
        records = {machine.label: machine for machine in self._ledger.machines()}
        return [
            finding
            for instance in listed
            for finding in self._check_listed(instance, name, records.get(instance.label))
        ]

    def _check_listed(
        self, instance: InstanceHandle, name: str, record: Machine | None
    ) -> list[Finding]:
        if record is None:
            return [
                Finding(
                    kind=FindingKind.STRAY, label=instance.label, backend=name, instance=instance
                )
            ]
        if not is_over(record.state):
            return []
        if record.state is MachineState.NEVER_CREATED:
            return [_finding(FindingKind.CAME_BACK, self._take(record, instance))]
        # A listing may show for a while what is gone: only a read of the machine counts.
        if self._state_of(record) is InstanceState.DESTROYED:
            return []
        found = self._ledger.move(record, MachineState.ENDING)
        return [_finding(FindingKind.CAME_BACK, found)]

    def _end(self, machine: Machine, state: MachineState = MachineState.GONE) -> Machine:
        ended = self._ledger.move(machine, state, ended_at=self._clock.time())
        if state is MachineState.GONE:
            self._notify(
                "machine.destroyed",
                {
                    "role": ended.role,
                    "index": ended.index,
                    "backend": ended.backend,
                    "instance_id": ended.handle.instance_id,
                    "label": ended.label,
                },
            )
        return ended


def _lag_of(backend: BackendAdapter) -> float:
    return backend.listing_lag_s if isinstance(backend, SupportsListingLag) else _LISTING_LAG_S


def _finding(kind: FindingKind, machine: Machine, note: str = "") -> Finding:
    return Finding(
        kind=kind,
        label=machine.label,
        backend=machine.backend,
        instance=machine.instance,
        note=note,
    )


def _not_proven_gone(machine: Machine, why: str) -> NotProvenGoneError:
    name = machine.instance.instance_id if machine.instance else "id unknown"
    return NotProvenGoneError(
        f"machine {machine.label} ({name}) on {machine.backend} may still exist and cost "
        f"{machine.offer.dph:g} $/h: {why}. It stays on record; run `paceline gc`, or look at "
        "the provider's console"
    )
