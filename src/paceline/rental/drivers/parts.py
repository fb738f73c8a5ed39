"""What the drivers work with: the record, backends by name, clock, and who is told."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Protocol, TypeVar

from paceline.core.clock import Clock
from paceline.rental.backends.protocol import BackendAdapter, SupportsListingLag
from paceline.rental.errors import NotProvenGoneError
from paceline.rental.ledger import Ledger
from paceline.rental.lifecycle import MachineState
from paceline.rental.memory import HostMemory
from paceline.rental.model import InstanceHandle, Offer
from paceline.rental.plan import BackendAnswer, RentRequest
from paceline.rental.records import Machine
from paceline.store.protocol import Store

LISTING_LAG_S = 900.0
"""How late a listing may be where the backend does not say; longer than any seen."""
SETTLE_S = 30.0
"""How long renting waits for a lost machine to turn up in a listing before it gives up."""
SETTLE_S_MAX = 120.0
"""How long it waits where that is enough for the listing to prove that there is none."""
POLL_S = 2.0
_T = TypeVar("_T")
_In = TypeVar("_In")


class Acceptor(Protocol):
    """Looks at a machine that has just come up."""

    def __call__(
        self, backend: BackendAdapter, machine: InstanceHandle, offer: Offer, request: RentRequest
    ) -> str | None:
        """Return, once it is what was offered, what was seen of its network.

        Raises NotAcceptedError if it is not, or BackendError.
        """
        ...


AskAll = Callable[[Callable[[str], BackendAnswer], Sequence[str]], list[BackendAnswer]]
"""(question, backends) -> their answers, in that order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalParts:
    """The surroundings of the drivers."""

    store: Store
    backend: Callable[[str], BackendAdapter]
    clock: Clock
    nonce: Callable[[], str]
    notify: Callable[[str, dict[str, object]], None]
    accept: Acceptor | None
    """None: whatever runs is taken as it is."""
    ask_all: AskAll

    @property
    def ledger(self) -> Ledger:
        """Machines on record."""
        return Ledger(self.store)

    @property
    def memory(self) -> HostMemory:
        """What is remembered of hosts."""
        return HostMemory(self.store)

    def take(self, machine: Machine, instance: InstanceHandle) -> Machine:
        """Put the id on record, under the names by which this record knows the machine."""
        handle = InstanceHandle(
            machine.backend, instance.instance_id, machine.label, instance.created_at
        )
        return self.ledger.move(machine, MachineState.CREATED, instance=handle)

    def end(self, machine: Machine, state: MachineState = MachineState.GONE) -> Machine:
        """Put on record that nothing bills any more, and tell so."""
        ended = self.ledger.move(machine, state, ended_at=self.clock.time())
        if state is MachineState.GONE:
            self.notify(
                "machine.destroyed",
                {
                    "role": ended.role,
                    "index": ended.index,
                    "backend": ended.backend,
                    "instance_id": ended.handle.instance_id,
                    "label": ended.label,
                    "cost_usd": round(ended.cost_usd(now_s=self.clock.time()), 6),
                },
            )
        return ended


def each_at_once(ask: Callable[[_In], _T], items: Sequence[_In]) -> list[_T]:
    """Return the answers in the order of ``items``; raises the first failure in that order.

    Ctrl-C is heard while a provider hangs: what is asked goes on in a thread that ends with the
    process, and nobody waits for it.
    """
    answers: list[Future[_T]] = [Future() for _ in items]

    def work(answer: Future[_T], item: _In) -> None:
        try:
            answer.set_result(ask(item))
        except BaseException as exc:  # noqa: BLE001 - raised on by whoever asked
            answer.set_exception(exc)

    for answer, item in zip(answers, items, strict=True):
        Thread(target=work, args=(answer, item), name="ask", daemon=True).start()
    return [answer.result() for answer in answers]


def lag_of(backend: BackendAdapter) -> float:
    """Return how late a backend's listing may be."""
    return backend.listing_lag_s if isinstance(backend, SupportsListingLag) else LISTING_LAG_S


def not_proven_gone(machine: Machine, why: str) -> NotProvenGoneError:
    """Return the error that names a machine which may bill."""
    name = machine.instance.instance_id if machine.instance else "id unknown"
    return NotProvenGoneError(
        f"machine {machine.label} ({name}) on {machine.backend} may still exist and cost "
        f"{machine.offer.dph:g} $/h: {why}. It stays on record; run `paceline gc`, or look at "
        "the provider's console"
    )
