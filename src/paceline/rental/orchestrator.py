"""Rents and ends machines so that nothing bills that is not on record: the door to the drivers.

An intent with a unique label is in the store before the create call is made, the id right after
it is answered. A crash between the two leaves an intent, and `reconcile` looks for its label at
the provider. A machine leaves the list of `machines` only when a read has shown that it is gone,
or that it never was.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from paceline.core.clock import Clock
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.budget import Budget, Spending, assess
from paceline.rental.costs import Billed, By, CostRow, cost_rows
from paceline.rental.death import Death
from paceline.rental.drivers.billing import billed
from paceline.rental.drivers.ending import Ender, Proof
from paceline.rental.drivers.parts import Acceptor, AskAll, RentalParts, each_at_once
from paceline.rental.drivers.reconciling import Reconciler
from paceline.rental.drivers.renting import Renter
from paceline.rental.drivers.searching import Plans, Searcher
from paceline.rental.lifecycle import MachineState, is_over
from paceline.rental.memory import HostMemory
from paceline.rental.model import InstanceHandle
from paceline.rental.plan import BackendAnswer, PastFailure, RentPlan, RentRequest
from paceline.rental.reasons import Reasons
from paceline.rental.records import Finding, Machine, RentedOffer
from paceline.store.protocol import Store

__all__ = ["Orchestrator", "RentRequest", "Tick"]

STRAY = "stray"
"""The run under which a machine is put on record that was on none."""
RECONCILE_EVERY_S = 300.0
"""How often the record of a run that is driven is compared with what backends say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """How a run stands: its money, and what was found if it was time to look."""

    spending: Spending
    findings: tuple[Finding, ...] = ()


class Orchestrator:
    """Drives plan and lifecycle over backends, store and clock; several threads may use it."""

    def __init__(  # noqa: PLR0913 - the composition root's one list of parts
        self,
        *,
        store: Store,
        backend: Callable[[str], BackendAdapter],
        clock: Clock,
        nonce: Callable[[], str],
        notify: Callable[[str, dict[str, object]], None],
        accept: Acceptor | None = None,
        ask_all: AskAll | None = None,
        plans: Plans | None = None,
    ) -> None:
        self._parts = RentalParts(
            store=store,
            backend=backend,
            clock=clock,
            nonce=nonce,
            notify=notify,
            accept=accept,
            ask_all=ask_all or at_once,
        )
        self._plans = plans or Plans()
        self._searcher = Searcher(self._parts, self._plans)
        self._renter = Renter(self._parts, self._searcher)
        self._ender = Ender(self._parts)
        self._reconciler = Reconciler(self._parts)
        self._looked_at_s: dict[str, float] = {}
        self._lock = Lock()

    def telling(self, notify: Callable[[str, dict[str, object]], None]) -> "Orchestrator":
        """Return one that tells somebody else, over the same backends, record and fresh plans."""
        parts = self._parts
        return Orchestrator(
            store=parts.store,
            backend=parts.backend,
            clock=parts.clock,
            nonce=parts.nonce,
            notify=notify,
            accept=parts.accept,
            ask_all=parts.ask_all,
            plans=self._plans,
        )

    @property
    def memory(self) -> HostMemory:
        """What is remembered of hosts, and what is passed over for it."""
        return self._parts.memory

    def plan(
        self, request: RentRequest, failures: Iterable[PastFailure] = (), *, explain: bool = False
    ) -> RentPlan:
        """Ask all backends of the request at once and order what they have. Creates nothing."""
        return self._searcher.plan(request, failures=failures, explain=explain)

    def heard(self, name: str, failure: Exception) -> None:
        """Take note that a backend could not be reached, so that a plan need not find it out."""
        self._searcher.heard(name, failure)

    def is_down(self, name: str) -> bool:
        """Return whether a backend gave no answer just now; asking again costs seconds."""
        return self._searcher.is_down(name)

    def rent(self, request: RentRequest) -> Machine:
        """Return a machine that runs and was accepted, from the first offer that becomes one.

        Raises:
            NoOffersError: nothing on offer fits; AttemptsFailedError, NeverReadyError: none of
                what fits became a machine, with one line for every attempt; AllRefusedError: no
                key, account or setting of ours is taken anywhere.
            ProvisionError, BootFailedError, SshKeyError: what is asked for is wrong wherever it
                is asked; nothing more was tried.
            BudgetError: the hard cap does not pay for another attempt.
            RentingStoppedError: ``stop_renting`` was called, or somebody ended the machine.
            NotProvenGoneError: a machine may exist that could not be proven gone; it stays
                on record, and nothing more was tried.
        """
        return self._renter.rent(request)

    def stop_renting(self, run_id: str) -> None:
        """Begin no further attempt for a run; what waits for one ends in RentingStoppedError."""
        self._renter.stop(run_id)

    def destroy(self, machine: Machine | str, *, is_thorough: bool = False) -> Proof | None:
        """End a machine on record and see it gone; None for one that is over already.

        ``is_thorough`` reads more than the machine's state: the listing, disks it may have left.

        Raises:
            UsageError: no such machine on record.
            NotProvenGoneError: it may still bill; it stays on record and destroying again is safe.
            GoneUnrecordedError: it is gone, and only the record does not say so yet.
            StoreError: the record cannot be read, and only a label was given.
        """
        return self._ender.destroy(machine, is_thorough=is_thorough)

    def machines(self, run_id: str | None = None) -> tuple[Machine, ...]:
        """Return everything on record that is not proven gone, oldest first."""
        alive = [one for one in self._parts.ledger.machines(run_id) if not is_over(one.state)]
        return tuple(sorted(alive, key=lambda machine: (machine.intended_at, machine.label)))

    def history(self, run_id: str | None = None) -> tuple[Machine, ...]:
        """Return every machine that was ever on record, oldest first."""
        found = self._parts.ledger.machines(run_id)
        return tuple(sorted(found, key=lambda machine: (machine.intended_at, machine.label)))

    def reconcile(
        self, *, run_id: str | None = None, backends: Iterable[str] = ()
    ) -> tuple[Finding, ...]:
        """Compare the record with what the backends say, and mend the record. Destroys nothing.

        Asked are the backends on record and those named. What this process rents just now is
        left out; what another process rents is not known here, so call it for runs that nobody
        else drives.
        """
        return self._reconciler.reconcile(
            run_id=run_id, backends=backends, without=self._renter.in_flight
        )

    def tick(self, run_id: str, caps: Budget | None) -> Tick:
        """Return how a run that is driven here stands; call it as often as you like.

        Costs one read of the record, and every RECONCILE_EVERY_S a call per machine.
        """
        now_s = self._parts.clock.monotonic()
        with self._lock:
            last_s = self._looked_at_s.setdefault(run_id, now_s)
            is_due = now_s - last_s >= RECONCILE_EVERY_S
            if is_due:
                self._looked_at_s[run_id] = now_s
        findings = self.reconcile(run_id=run_id) if is_due else ()
        return Tick(spending=self.spending(run_id, caps), findings=findings)

    def spending(self, run_id: str, caps: Budget | None = None) -> Spending:
        """Return what a run has cost, what it burns, and how far its caps are."""
        machines = self._parts.ledger.machines(run_id)
        return assess(machines, now_s=self._parts.clock.time(), caps=caps)

    def autopsy(self, machine: Machine, *, answers: bool = False) -> Death | None:
        """Return why a machine is missed; None where it lives, or where its end was our order.

        ``answers`` says whether it was reached just now. A host that is to blame is remembered.
        """
        return self._reconciler.autopsy(machine, answers=answers)

    def forget(self, label: str) -> None:
        """Take the operator's word that an intent without id came to nothing.

        Raises:
            IllegalMoveError: its machine is known; destroy it instead.
        """
        self._parts.end(self._parts.ledger.find(label), MachineState.NEVER_CREATED)

    def cost_usd(self, run_id: str) -> float:
        """Return what all machines of a run have cost at most, by price and our own clock."""
        return self.spending(run_id).spent_usd

    def cost_rows(self, by: By, run_id: str | None = None) -> list[CostRow]:
        """Return what machines have cost at most, added up over runs, roles, backends or days."""
        return cost_rows(self.history(run_id), by, now_s=self._parts.clock.time())

    def billed(self, run_id: str) -> list[Billed]:
        """Return what the providers have billed for a run's machines, beside our own reckoning."""
        return billed(self._parts, self.history(run_id))

    def adopt(self, instance: InstanceHandle) -> Machine:
        """Put a machine on record that bears our label and is on none, so that it can be ended."""
        machine = Machine(
            label=instance.label,
            run_id=STRAY,
            role=STRAY,
            index=0,
            backend=instance.backend,
            offer=RentedOffer(id="", gpu_name="", num_gpus=0, dph=0.0),
            state=MachineState.CREATED,
            intended_at=instance.created_at,
            instance=instance,
        )
        self._parts.ledger.add(machine)
        return machine

    def why(self, run_id: str) -> list[dict[str, object]]:
        """Return, by slot, the plan from which a run's machines were taken."""
        return Reasons(self._parts.store).of(run_id)


def at_once(ask: Callable[[str], BackendAnswer], names: Sequence[str]) -> list[BackendAnswer]:
    """Ask all backends at the same time and return their answers in the order of ``names``."""
    return each_at_once(ask, names)
