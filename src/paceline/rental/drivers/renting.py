"""Rents: from an offer to a machine that is what was offered, or to the next offer.

The order of writes is the whole point. An intent with a unique label is in the store before
the create call is made, the id right after it is answered. Whatever was made for an attempt that
failed is seen gone before the next one begins.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.core.retry import RetryPolicy
from paceline.rental.backends.protocol import BackendAdapter, SupportsPorts, SupportsSpot
from paceline.rental.budget import Budget, affordable_s, assess, refuse_attempt
from paceline.rental.drivers.ending import Ender
from paceline.rental.drivers.looking import Looker
from paceline.rental.drivers.parts import POLL_S, RentalParts
from paceline.rental.drivers.searching import Searcher
from paceline.rental.errors import (
    BackendError,
    BudgetError,
    IllegalMoveError,
    ProvisionError,
    RentingStoppedError,
)
from paceline.rental.failover import (
    BUSY_S_MAX,
    RULES,
    Attempt,
    FailureKind,
    NextMove,
    kind_of,
    may_pass,
    rest_s,
    with_attempt,
)
from paceline.rental.lifecycle import MachineState
from paceline.rental.model import InstanceHandle, Offer
from paceline.rental.plan import (
    NextStep,
    RentPlan,
    RentRequest,
    after_failure,
    nothing_left,
)
from paceline.rental.reasons import Reasons
from paceline.rental.records import Machine, make_label, offer_summary
from paceline.store.protocol import StoreError

BOOT_SLICE_S = 300.0
"""For so long the money is not looked at while a machine boots; longer than keys may be refused."""
REST_SLICE_S = 5.0
"""So often whoever waits looks whether its run ends."""
SPOT_MARGIN = 1.25
"""What is bid where no limit is given, in shares of today's price: the least bid loses first."""
AGAIN = RetryPolicy(attempts=2**31, first_delay_s=30.0, delay_s_max=300.0, jitter=0.0)
"""How often is asked again where nothing can be had."""
_HISTORY_MAX = 50


class Renter:
    """Rents machines; several threads may use one."""

    def __init__(self, parts: RentalParts, searcher: Searcher) -> None:
        self._parts = parts
        self._searcher = searcher
        self._looker = Looker(parts)
        self._ender = Ender(parts)
        self._lock = Lock()
        self._stopped: set[str] = set()
        self._in_flight: set[str] = set()
        self._claimed: set[tuple[str, str]] = set()

    @property
    def in_flight(self) -> frozenset[str]:
        """Return the labels that a create call of this process may be under way for."""
        with self._lock:
            return frozenset(self._in_flight)

    def stop(self, run_id: str) -> None:
        """Begin no further attempt for a run; one that is under way ends, in a machine or not."""
        with self._lock:
            self._stopped.add(run_id)

    def rent(self, request: RentRequest) -> Machine:
        """Return a machine that runs and was accepted, from the first offer that becomes one."""
        clock = self._parts.clock
        until_s = clock.monotonic() + (request.retry_for_s or 0.0)
        history: list[Attempt] = []
        num_rounds = 0
        while True:
            self._go_on(request)
            is_first = num_rounds == 0
            plan = self._searcher.fresh_plan(request) if is_first else self._searcher.plan(request)
            Reasons(self._parts.store).record(request, plan, now_s=clock.time())
            machine = self._try_all(request, plan, history, None if is_first else until_s)
            if machine is not None:
                return machine
            num_rounds += 1
            wait_s = AGAIN.delay_s(num_rounds, chance=0.0) or 0.0
            if not _is_passing(plan, history) or clock.monotonic() + wait_s > until_s:
                raise nothing_left(request, plan, history)
            self._tell(request, "renting.waiting", wait_s=wait_s, num_tried=len(history))
            self._rest(request, wait_s)

    def _try_all(
        self,
        request: RentRequest,
        plan: RentPlan,
        history: list[Attempt],
        until_s: float | None,
    ) -> Machine | None:
        """Go through a plan; None when none of its offers became a machine, or time is up."""
        refusing: set[str] = set()
        for offer in plan.attempts:
            if until_s is not None and self._parts.clock.monotonic() > until_s:
                return None
            if offer.backend in refusing or self._is_blocked(offer):
                continue
            others = {one.backend for one in plan.attempts} - refusing - {offer.backend}
            busy_s = BUSY_S_MAX if others else request.boot_timeout_s
            busy_until_s = self._parts.clock.monotonic() + busy_s
            if until_s is not None:
                busy_until_s = min(until_s, busy_until_s)
            got = self._try(request, offer, history, busy_until_s=busy_until_s)
            if isinstance(got, Machine):
                return got
            if got is NextMove.NEXT_BACKEND:
                refusing.add(offer.backend)
        return None

    def _try(
        self,
        request: RentRequest,
        offer: Offer,
        history: list[Attempt],
        *,
        busy_until_s: float,
    ) -> Machine | NextMove:
        """Make one attempt; return what follows where it fails, raise where nothing does."""
        self._check(request, offer)
        before_usd = self._spent_on(request)
        with self._claim(offer) as is_ours:
            if not is_ours:
                history[:] = with_attempt(history, _taken_by_us(offer))
                return NextMove.NEXT_OFFER
            try:
                return self._patient_attempt(request, offer, history, until_s=busy_until_s)
            except PacelineError as exc:
                kind = kind_of(exc)
                if kind is None:
                    raise
                cost_usd = max(0.0, self._spent_on(request) - before_usd)
                self._note(request, offer, kind, exc, history=history, cost_usd=cost_usd)
                if RULES[kind].move is NextMove.STOP:
                    raise
                return RULES[kind].move

    def _patient_attempt(
        self, request: RentRequest, offer: Offer, history: list[Attempt], *, until_s: float
    ) -> Machine:
        """Make an attempt, again and again while its backend says that we call it too often."""
        clock = self._parts.clock
        while True:
            try:
                return self._attempt(request, offer)
            except ProvisionError as exc:
                wait_s = rest_s(exc, patience_s=until_s - clock.monotonic())
                if wait_s is None:
                    raise
                self._go_on(request)
                self._tell(
                    request,
                    "renting.waiting",
                    wait_s=wait_s,
                    num_tried=len(history),
                    backend=offer.backend,
                    reason=str(exc),
                )
                self._rest(request, wait_s)
            self._check(request, offer)

    def _note(
        self,
        request: RentRequest,
        offer: Offer,
        kind: FailureKind,
        failure: PacelineError,
        *,
        history: list[Attempt],
        cost_usd: float,
    ) -> None:
        """Put a failed attempt into the history, on record, and tell of it."""
        reason = str(failure)
        attempt = Attempt(
            backend=offer.backend, offer_id=offer.id, kind=kind, reason=reason, cost_usd=cost_usd
        )
        history[:] = with_attempt(history, attempt)[-_HISTORY_MAX:]
        self._parts.memory.remember_failure(
            offer, kind, reason=reason, now_s=self._parts.clock.time()
        )
        self._tell(
            request,
            "attempt.failed",
            backend=offer.backend,
            offer=offer.id,
            kind=kind.value,
            reason=reason,
            cost_usd=round(cost_usd, 6),
        )

    def _attempt(self, request: RentRequest, offer: Offer) -> Machine:
        """Create, boot, accept."""
        begun_s = self._parts.clock.monotonic()
        machine = self._create(request, offer)
        try:
            self._told(machine, "machine.provisioned", instance_id=machine.handle.instance_id)
            self._boot(machine, request)
            net = ""
            if self._parts.accept is not None:
                backend = self._parts.backend(machine.backend)
                net = self._parts.accept(backend, machine.handle, offer, request) or ""
            running = self._parts.ledger.move(machine, MachineState.RUNNING, net=net)
        except Exception as exc:
            self._give_up(machine, exc)
            raise
        boot_s = self._parts.clock.monotonic() - begun_s
        self._parts.memory.remember_use(offer, now_s=self._parts.clock.time(), boot_s=boot_s)
        measured = {"net": net} if net else {}
        self._told(running, "machine.running", boot_s=round(boot_s, 3), **measured)
        return running

    def _give_up(self, machine: Machine, failure: Exception) -> None:
        """Destroy what an attempt made; raises if somebody else has ended it on purpose."""
        is_ours = self._is_ours(machine)
        self._ender.destroy(machine)
        if not is_ours and not isinstance(failure, IllegalMoveError):
            raise RentingStoppedError(
                f"machine {machine.label} was ended while it started, by another order of ours"
            ) from failure

    def _is_ours(self, machine: Machine) -> bool:
        """Return whether nobody else has ended it; what cannot be read is taken to be ours."""
        try:
            state = self._parts.ledger.again(machine).state
        except StoreError:
            return True
        return state in (MachineState.CREATED, MachineState.RUNNING)

    def _boot(self, machine: Machine, request: RentRequest) -> None:
        """Wait until it runs, for as long as the request and the money allow."""
        clock = self._parts.clock
        backend = self._parts.backend(machine.backend)
        deadline = clock.monotonic() + request.boot_timeout_s
        while True:
            self._go_on(request)
            left_s = deadline - clock.monotonic()
            paid_s = self._paid_s(request)
            slice_s = max(1, int(min(left_s, paid_s, BOOT_SLICE_S)))
            try:
                backend.wait_running(machine.handle, timeout_s=slice_s)
            except BackendError as exc:
                if not may_pass(exc) or clock.monotonic() + POLL_S > deadline:
                    raise
                clock.sleep(POLL_S)
            except DeadlineExceededError as exc:
                if clock.monotonic() + 1 > deadline:
                    raise DeadlineExceededError(
                        f"{machine.label} did not run within {request.boot_timeout_s} s: {exc}"
                    ) from exc
                if self._paid_s(request) < 1:
                    raise BudgetError(
                        f"the hard cap of {request.hard_usd} USD is reached while {machine.label} "
                        "starts; raise budget.hard_usd to go further"
                    ) from exc
            else:
                return

    def _create(self, request: RentRequest, offer: Offer) -> Machine:
        """Write the intent, create, write the id."""
        dph = bid_for(offer, request)
        with self._flying(self._intend(request, offer, dph)) as machine:
            try:
                handle = self._provision(request, offer, label=machine.label, dph=dph)
            except Exception as exc:  # noqa: BLE001 - whatever an adapter raises, it may have created
                return self._after_failed_create(machine, exc)
            try:
                return self._parts.take(machine, handle)
            except Exception as exc:
                self._ender.discard(machine, handle, exc)
                raise

    def _provision(
        self, request: RentRequest, offer: Offer, *, label: str, dph: float
    ) -> InstanceHandle:
        backend: BackendAdapter = self._parts.backend(offer.backend)
        if request.ports and isinstance(backend, SupportsPorts):
            backend = backend.with_ports(request.ports)
        if offer.is_spot and isinstance(backend, SupportsSpot):
            return backend.provision_spot(
                offer.id,
                disk_gb=request.min_disk_gb,
                image=request.image,
                ssh_pubkey_path=request.ssh_pubkey_path,
                label=label,
                max_dph=dph,
            )
        return backend.provision(
            offer.id,
            disk_gb=request.min_disk_gb,
            image=request.image,
            ssh_pubkey_path=request.ssh_pubkey_path,
            label=label,
        )

    def _intend(self, request: RentRequest, offer: Offer, dph: float) -> Machine:
        label = make_label(
            run_id=request.run_id,
            role=request.role,
            index=request.index,
            nonce=self._parts.nonce(),
        )
        machine = Machine(
            label=label,
            run_id=request.run_id,
            role=request.role,
            index=request.index,
            backend=offer.backend,
            offer=offer_summary(offer, dph=dph),
            state=MachineState.INTENDED,
            intended_at=self._parts.clock.time(),
        )
        self._parts.ledger.add(machine)
        return machine

    def _after_failed_create(self, machine: Machine, failure: Exception) -> Machine:
        """Return the machine if it exists after all; else raise, with the record telling why."""
        if after_failure(failure) is NextStep.LOOK_AND_STOP:
            found, look = self._looker.resolve(
                machine, waits=True, failure=failure, asked_until_s=self._parts.clock.time()
            )
            if look.instance is not None:
                return found
            raise failure
        leaked = failure.leaked if isinstance(failure, ProvisionError) else None
        # A provider that answers "no" and creates nevertheless has been seen: look once.
        instance = leaked or self._looker.look(machine).instance
        if instance is None:
            self._parts.end(machine, MachineState.NEVER_CREATED)
        else:
            self._ender.destroy(self._parts.take(machine, instance))
        raise failure

    @contextmanager
    def _flying(self, machine: Machine) -> Iterator[Machine]:
        """Know, while inside, that nobody can say yet what became of an intent."""
        with self._lock:
            self._in_flight.add(machine.label)
        try:
            yield machine
        finally:
            with self._lock:
                self._in_flight.discard(machine.label)

    @contextmanager
    def _claim(self, offer: Offer) -> Iterator[bool]:
        """Yield whether no other thread tries this offer now, where there is one machine behind."""
        key = (offer.backend, offer.id)
        with self._lock:
            is_ours = not offer.host or key not in self._claimed
            if is_ours:
                self._claimed.add(key)
        try:
            yield is_ours
        finally:
            if is_ours:
                with self._lock:
                    self._claimed.discard(key)

    def _rest(self, request: RentRequest, wait_s: float) -> None:
        """Wait, but no longer than the run goes on."""
        until_s = self._parts.clock.monotonic() + wait_s
        while (left_s := until_s - self._parts.clock.monotonic()) > 0:
            self._parts.clock.sleep(min(REST_SLICE_S, left_s))
            self._go_on(request)

    def _go_on(self, request: RentRequest) -> None:
        with self._lock:
            is_stopped = request.run_id in self._stopped
        if is_stopped:
            raise RentingStoppedError(
                f"no machine is rented for {request.slot} any more: the run {request.run_id} ends"
            )

    def _is_blocked(self, offer: Offer) -> bool:
        """Return whether something that failed meanwhile, in any run, speaks against an offer."""
        now_s = self._parts.clock.time()
        blocks = self._parts.memory.blocks(now_s=now_s)
        return any(block.covers(offer, now_s=now_s) for block in blocks)

    def _check(self, request: RentRequest, offer: Offer) -> None:
        """Raise where no attempt is to be begun: the run ends, or cannot pay for it."""
        self._go_on(request)
        if request.hard_usd is None:
            return
        refusal = refuse_attempt(
            dph=bid_for(offer, request),
            boot_timeout_s=request.boot_timeout_s,
            hard_usd=request.hard_usd,
            now=assess(
                self._parts.ledger.machines(request.run_id),
                now_s=self._parts.clock.time(),
                caps=Budget(soft_usd=request.hard_usd, hard_usd=request.hard_usd),
            ),
        )
        if refusal is not None:
            raise BudgetError(f"{request.slot}: {refusal}")

    def _paid_s(self, request: RentRequest) -> float:
        """Return for how many seconds the hard cap pays for all that burns now."""
        if request.hard_usd is None:
            return float("inf")
        machines = self._parts.ledger.machines(request.run_id)
        now = assess(machines, now_s=self._parts.clock.time(), caps=None)
        left_s = affordable_s(
            hard_usd=request.hard_usd, spent_usd=now.spent_usd, burn_dph=now.burn_dph
        )
        return float("inf") if left_s is None else left_s

    def _spent_on(self, request: RentRequest) -> float:
        """Return what this slot has cost so far."""
        now_s = self._parts.clock.time()
        return sum(
            machine.cost_usd(now_s=now_s)
            for machine in self._parts.ledger.machines(request.run_id)
            if (machine.role, machine.index) == (request.role, request.index)
        )

    def _told(self, machine: Machine, name: str, **fields: object) -> None:
        told = {"role": machine.role, "index": machine.index, "label": machine.label}
        spot = {"spot": True} if machine.offer.is_spot else {}
        self._parts.notify(name, {**told, "backend": machine.backend, **spot, **fields})

    def _tell(self, request: RentRequest, name: str, **fields: object) -> None:
        self._parts.notify(name, {"role": request.role, "index": request.index, **fields})


def bid_for(offer: Offer, request: RentRequest) -> float:
    """Return the most that a machine of this offer may cost an hour."""
    if not offer.is_spot:
        return offer.dph
    bid = offer.dph * SPOT_MARGIN
    return bid if request.max_dph is None else min(bid, request.max_dph)


def _taken_by_us(offer: Offer) -> Attempt:
    return Attempt(
        backend=offer.backend,
        offer_id=offer.id,
        kind=FailureKind.CAPACITY,
        reason="another machine is being made of it just now",
    )


def _is_passing(plan: RentPlan, history: list[Attempt]) -> bool:
    """Return whether waiting can help: not if every backend has refused us, or is wrong to ask."""
    if plan.is_hopeless:
        return False
    latest = {attempt.backend: attempt for attempt in history}
    if not latest:
        return True
    asked = {offer.backend for offer in plan.attempts} | {left.backend for left in plan.passed_over}
    return any(name not in latest or RULES[latest[name].kind].is_passing for name in asked)
