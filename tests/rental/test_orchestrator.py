"""Renting over a fake provider with a bill: order of writes, failures, proof of the end."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from paceline.core.errors import ExitStatus, UsageError
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.errors import (
    AttemptsFailedError,
    AuthError,
    BackendError,
    GoneUnrecordedError,
    IllegalMoveError,
    NeverReadyError,
    NoOffersError,
    NotProvenGoneError,
)
from paceline.rental.ledger import Ledger
from paceline.rental.lifecycle import MachineState
from paceline.rental.model import InstanceHandle, Offer, OfferConstraints
from paceline.rental.orchestrator import Orchestrator, RentRequest
from paceline.rental.records import FindingKind, Machine, RentedOffer
from paceline.store.memory import MemoryStore
from paceline.store.protocol import Record, StoreError
from paceline.telemetry.events import EVENT_FIELDS
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.backend import FakeBackend, Fault, ListingFakeBackend


class World:
    """A store, a clock, two providers and what the orchestrator told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(clock=self.clock)
        self.fake = ListingFakeBackend(clock=self.clock, listing_lag_s=10.0)
        self.plain = FakeBackend(clock=self.clock, name="plain", dphs=(0.5,))
        self.told: list[tuple[str, dict[str, object]]] = []
        self.num_labels = 0
        self.orchestrator = self.new_process()

    def new_process(self) -> Orchestrator:
        return Orchestrator(
            store=self.store,
            backend=self._backend,
            clock=self.clock,
            nonce=self._nonce,
            notify=lambda name, fields: self.told.append((name, fields)),
        )

    def _backend(self, name: str) -> BackendAdapter:
        return {"fake": self.fake, "plain": self.plain}[name]

    def _nonce(self) -> str:
        self.num_labels += 1
        return f"{self.num_labels:08x}"

    def rent(self, *backends: str, max_dph: float | None = None, index: int = 0) -> Machine:
        return self.orchestrator.rent(request(*backends, max_dph=max_dph, index=index))

    def states(self) -> list[MachineState]:
        return [machine.state for machine in self.orchestrator.machines()]


def request(*backends: str, max_dph: float | None = None, index: int = 0) -> RentRequest:
    return RentRequest(
        run_id="run-1",
        role="rollout",
        index=index,
        gpu="fake-1x",
        backends=backends or ("fake",),
        min_disk_gb=10,
        max_dph=max_dph,
        image="",
        ssh_pubkey_path=Path("key.pub"),
        boot_timeout_s=60,
    )


@pytest.fixture
def world() -> World:
    return World()


def test_the_intent_is_on_record_before_the_create_call(world: World) -> None:
    """When provision is called the store already knows the label, without an id."""
    seen: list[tuple[MachineState, InstanceHandle | None]] = []

    def look(method: str) -> None:
        if method == "provision":
            [machine] = world.orchestrator.machines()
            seen.append((machine.state, machine.instance))

    world.fake.before_call = look
    machine = world.rent()
    assert seen == [(MachineState.INTENDED, None)]
    assert machine.state is MachineState.RUNNING
    assert machine.label == "paceline-run-1-rollout-0-00000001"
    assert world.orchestrator.machines() == (machine,)


def test_a_life_is_told_in_events_with_their_fields(world: World) -> None:
    """Provisioned, running and destroyed are told once each, with every field listed for them."""
    world.orchestrator.destroy(world.rent())
    assert [name for name, _ in world.told] == [
        "machine.provisioned",
        "machine.running",
        "machine.destroyed",
    ]
    for name, fields in world.told:
        assert set(EVENT_FIELDS[name]) <= set(fields)
    assert world.orchestrator.machines() == ()
    assert world.fake.billing() == []


def test_the_cheapest_offer_over_all_backends_is_taken(world: World) -> None:
    """Plain costs half; at a limit below its price nothing is left and both say why."""
    assert world.rent("fake", "plain").backend == "plain"
    with pytest.raises(NoOffersError, match=r"fake: .*plain: ") as caught:
        world.rent("fake", "plain", max_dph=0.1)
    assert "allow another" in str(caught.value)
    assert len(world.orchestrator.machines()) == 1


def test_capacity_moves_on_and_leaves_nothing_behind(world: World) -> None:
    """The next offer is tried; the failed one is on record as never created."""
    world.fake.faults[:] = [Fault.NO_CAPACITY]
    assert world.rent().offer.dph == 2.0
    assert world.states() == [MachineState.RUNNING]
    world.clock.advance(60)
    world.fake.faults[:] = [Fault.NO_CAPACITY, Fault.NO_CAPACITY]
    with pytest.raises(AttemptsFailedError, match=r"Tried:\n  fake fake-0: .*\n  fake fake-1: "):
        world.rent()
    assert len(world.fake.billing()) == 1


def test_a_leaked_machine_is_destroyed_before_the_next_is_tried(world: World) -> None:
    """Exactly one machine bills afterwards, and it is the one that was returned."""
    world.fake.faults[:] = [Fault.LEAKED]
    machine = world.rent()
    assert [one.handle.label for one in world.fake.billing()] == [machine.label]
    assert world.fake.calls.index("teardown") < len(world.fake.calls) - world.fake.calls[
        ::-1
    ].index("provision")


@pytest.mark.parametrize("fault", [Fault.LOST_CREATE_REPLY, Fault.ERROR_BUT_CREATED])
def test_a_lost_machine_is_found_by_its_label(world: World, fault: Fault) -> None:
    """It is looked for until the listing shows it, adopted, and never created twice."""
    world.fake.faults[:] = [fault]
    machine = world.rent()
    assert machine.state is MachineState.RUNNING
    assert world.fake.calls.count("provision") == 1
    assert [one.handle.label for one in world.fake.billing()] == [machine.label]


def test_an_error_that_created_nothing_is_raised_once_that_is_proven(world: World) -> None:
    """After the listing's lag the record says never created, and the first error comes out."""
    world.fake.faults[:] = [Fault.REFUSED]
    with pytest.raises(BackendError, match="418"):
        world.rent()
    assert world.orchestrator.machines() == ()
    assert world.fake.calls.count("provision") == 1


def test_without_a_listing_an_ambiguous_create_stays_on_record(world: World) -> None:
    """Nobody can prove anything: it stays, is named, and only the operator can take it off."""
    world.plain.faults[:] = [Fault.LOST_CREATE_REPLY]
    with pytest.raises(NotProvenGoneError, match="cannot list machines"):
        world.rent("plain")
    [machine] = world.orchestrator.machines()
    assert machine.state is MachineState.INTENDED
    world.clock.advance(100_000)
    [finding] = world.orchestrator.reconcile()
    assert finding.kind is FindingKind.NOT_PROVEN
    with pytest.raises(NotProvenGoneError):
        world.orchestrator.destroy(machine.label)
    world.orchestrator.forget(machine.label)
    assert world.orchestrator.machines() == ()


def test_what_never_boots_is_destroyed(world: World) -> None:
    """The wait ends at its deadline, and the next offer is tried when nothing bills."""
    world.fake.faults[:] = [Fault.NEVER_BOOTS]
    machine = world.rent()
    assert machine.offer.dph == 2.0
    assert [one.handle.label for one in world.fake.billing()] == [machine.label]
    world.orchestrator.destroy(machine)
    world.fake.faults[:] = [Fault.NEVER_BOOTS]
    with pytest.raises(NeverReadyError, match=r"fake-1: boot_late, 0\.033 USD: ") as caught:
        world.rent()
    assert caught.value.exit_status is ExitStatus.NOT_READY
    assert world.fake.billing() == []
    assert world.orchestrator.machines() == ()


def test_gone_is_believed_only_when_it_was_seen(world: World) -> None:
    """Orders that are ignored again and again are an error; a later destroy works."""
    machine = world.rent()
    world.fake.faults[:] = [Fault.IGNORED_TEARDOWN] * 10
    with pytest.raises(NotProvenGoneError, match=r"1 \$/h: last read: state running"):
        world.orchestrator.destroy(machine)
    assert world.fake.calls.count("teardown") > 3, "the order is given again"
    assert world.states() == [MachineState.ENDING]
    world.fake.faults.clear()
    world.orchestrator.destroy(machine)
    assert world.states() == []
    assert world.fake.billing() == []


def test_a_teardown_without_answer_stays_on_record_until_it_is_seen(world: World) -> None:
    """An answer that was lost is no failure; a refused key is, until the next look."""
    machine = world.rent(index=1)
    world.fake.faults[:] = [Fault.LOST_TEARDOWN_REPLY]
    world.orchestrator.destroy(machine)
    assert world.states() == []
    machine = world.rent()

    def refuse(method: str) -> None:
        if method == "teardown":
            raise AuthError("status 401: the key is wrong")

    world.fake.before_call = refuse
    with pytest.raises(NotProvenGoneError, match="the key is wrong"):
        world.orchestrator.destroy(machine)
    world.fake.before_call = lambda _method: None
    world.fake.teardown(machine.handle)
    [finding] = world.new_process().reconcile()
    assert (finding.kind, finding.label) == (FindingKind.GONE, machine.label)
    assert world.orchestrator.machines() == ()


def test_destroying_twice_and_something_unknown(world: World) -> None:
    """What is over is left alone; what was never there is the caller's mistake."""
    machine = world.rent()
    world.orchestrator.destroy(machine.label)
    num_calls = len(world.fake.calls)
    world.orchestrator.destroy(machine)
    assert len(world.fake.calls) == num_calls
    with pytest.raises(UsageError, match="paceline ls"):
        world.orchestrator.destroy("paceline-none")


class SlowListing(ListingFakeBackend):
    """A provider after whose answer somebody else is quicker than whoever asked."""

    meanwhile: list[Callable[[], object]]

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        found = super().list_instances(label_prefix=label_prefix)
        while self.meanwhile:
            self.meanwhile.pop()()
        return found


@pytest.mark.parametrize("exists", [False, True])
def test_two_who_end_an_intent_at_once_are_both_right(world: World, *, exists: bool) -> None:
    """Between the look and the record somebody else was quicker: it is over, and no failure."""
    world.fake = fake = SlowListing(clock=world.clock)
    fake.meanwhile = []
    label = "paceline-run-1-rollout-0-ff"
    offer = RentedOffer(id="fake-0", gpu_name="fake", num_gpus=1, dph=1.0)
    Ledger(world.store).add(
        Machine(
            label=label,
            run_id="run-1",
            role="rollout",
            index=0,
            backend="fake",
            offer=offer,
            state=MachineState.INTENDED,
            intended_at=world.clock.time(),
        )
    )
    if exists:
        fake.provision("fake-0", disk_gb=1, image="", ssh_pubkey_path=Path("k"), label=label)
    world.clock.advance(3600)
    fake.meanwhile.append(lambda: world.new_process().destroy(label))
    assert world.orchestrator.destroy(label) is None
    assert fake.meanwhile == []
    assert world.orchestrator.machines() == ()
    assert fake.billing() == []


def test_an_intent_of_a_dead_process_is_adopted(world: World) -> None:
    """A crash after the create call: the next process finds the machine and can end it."""

    class CrashError(BaseException):
        """The process ends here."""

    def crash(method: str) -> None:
        raise CrashError(method)

    world.fake.after_call = crash
    with pytest.raises(CrashError):
        world.rent()
    world.fake.after_call = lambda _method: None
    [early] = world.new_process().reconcile()
    assert early.kind is FindingKind.NOT_PROVEN
    world.clock.advance(10)
    [finding] = world.new_process().reconcile(run_id="run-1")
    assert finding.kind is FindingKind.ADOPTED
    assert finding.instance is not None
    [machine] = world.orchestrator.machines("run-1")
    assert machine.handle == finding.instance
    world.orchestrator.destroy(machine)
    assert world.fake.billing() == []


def test_a_stray_is_reported_and_left_alone(world: World) -> None:
    """A label of ours that is on no record may be a colleague's: it is named, not destroyed."""
    world.fake.provision(
        "fake-0",
        disk_gb=1,
        image="",
        ssh_pubkey_path=Path("k"),
        label="paceline-other-trainer-0-ff",
    )
    world.clock.advance(10)
    [finding] = world.orchestrator.reconcile(backends=["fake"])
    assert (finding.kind, finding.label) == (FindingKind.STRAY, "paceline-other-trainer-0-ff")
    assert len(world.fake.billing()) == 1
    assert world.orchestrator.reconcile(run_id="run-1", backends=["fake"]) == ()


def test_cost_is_price_times_our_own_clock(world: World) -> None:
    """It runs from the intent to the moment the end was seen, for every machine of the run."""
    machine = world.rent()
    world.clock.advance(3600 - world.clock.monotonic())
    assert world.orchestrator.cost_usd("run-1") == pytest.approx(1.0)
    world.orchestrator.destroy(machine)
    world.clock.advance(7200)
    assert world.orchestrator.cost_usd("run-1") == pytest.approx(1.0)
    assert world.orchestrator.cost_usd("run-2") == 0.0


def test_one_backend_that_fails_does_not_hide_the_others(world: World) -> None:
    """Its refusal is in the plan, the others' offers are tried."""

    def refuse(method: str) -> None:
        raise BackendError("status 401: the key is wrong")

    world.fake.before_call = refuse
    plan = world.orchestrator.plan(request("fake", "plain"))
    assert [offer.backend for offer in plan.attempts] == ["plain"]
    assert plan.explain() == "fake: status 401: the key is wrong"


def test_backends_are_asked_at_the_same_time(world: World) -> None:
    """Neither answers before both have been asked."""
    both = threading.Barrier(2, timeout=20)

    def meet(method: str) -> None:
        both.wait()

    world.fake.before_call = world.plain.before_call = meet
    assert len(world.orchestrator.plan(request("fake", "plain")).attempts) == 3


def test_a_request_that_makes_no_sense_creates_nothing(world: World) -> None:
    """No backend, or a name that cannot be in a label, is a usage error before any call."""
    with pytest.raises(UsageError, match="no backend"):
        world.orchestrator.plan(
            RentRequest(
                run_id="r",
                role="x",
                index=0,
                gpu="fake-1x",
                backends=(),
                min_disk_gb=1,
                max_dph=None,
                image="",
                ssh_pubkey_path=Path("k"),
            )
        )
    assert world.fake.calls == []


def test_a_machine_that_was_ended_while_it_booted_is_not_called_running(world: World) -> None:
    """Somebody else's destroy wins: rent raises and does not bring the record back."""

    def end_it(method: str) -> None:
        if method == "status" and world.clock.monotonic() >= 30:
            world.fake.before_call = lambda _method: None
            world.new_process().destroy(world.orchestrator.machines()[0])

    world.fake.before_call = end_it
    with pytest.raises(BackendError):
        world.rent()
    assert world.states() == []
    assert world.fake.billing() == []


def test_forget_refuses_a_machine_that_is_known(world: World) -> None:
    """Only an intent without an id can be taken off on the operator's word."""
    machine = world.rent()
    with pytest.raises(IllegalMoveError):
        world.orchestrator.forget(machine.label)


def test_parallel_rents_give_different_machines(world: World) -> None:
    """Roles rented at the same time from threads get a machine and a record each."""
    machines: list[Machine] = []
    threads = [
        threading.Thread(target=lambda n=n: machines.append(world.rent(index=n))) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({machine.label for machine in machines}) == 4
    assert len({machine.handle.instance_id for machine in machines}) == 4
    assert sorted(world.orchestrator.machines(), key=lambda one: one.label) == sorted(
        machines, key=lambda one: one.label
    )


class SeedOnly:
    """Somebody's adapter with the eight methods by delegation and no attribute more."""

    def __init__(self, inner: FakeBackend) -> None:
        self.name = inner.name
        self._inner = inner

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        return self._inner.search_offers(c)

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name not in {"provision", "wait_running", "status", "teardown"}:
            raise AttributeError(name)
        method: Callable[..., object] = getattr(self._inner, name)
        return method


def test_an_adapter_written_against_the_seed_alone_works(world: World) -> None:
    """Nothing beyond the eight methods is asked of it."""
    orchestrator = Orchestrator(
        store=world.store,
        backend=lambda _name: SeedOnly(world.plain),  # type: ignore[arg-type,return-value]
        clock=world.clock,
        nonce=lambda: "aa",
        notify=lambda _name, _fields: None,
    )
    machine = orchestrator.rent(request("plain"))
    assert orchestrator.reconcile() == ()
    orchestrator.destroy(machine)
    assert orchestrator.machines() == ()


class FailingStore(MemoryStore):
    """A store whose disk is full, and then gone, when a test says so."""

    is_full = False
    is_gone = False

    def list(self, prefix: str) -> Sequence[Record]:
        if self.is_gone:
            raise StoreError("the disk is gone")
        return super().list(prefix)

    def commit(self, *, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        if self.is_full:
            raise StoreError("the disk is full")
        super().commit(expect=expect, writes=writes)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_record_that_fails_keeps_no_machine_billing(world: World, *, is_gone: bool) -> None:
    """The machine goes and is seen gone; what is left is a record to mend, and gc mends it."""
    store = FailingStore(clock=world.clock)
    world.store = store
    world.orchestrator = world.new_process()
    machine = world.rent()
    store.is_full, store.is_gone = True, is_gone
    with pytest.raises(GoneUnrecordedError, match="gone, but that is not on record"):
        world.orchestrator.destroy(machine)
    assert world.fake.billing() == []
    store.is_full = store.is_gone = False
    assert world.states() == [MachineState.RUNNING]
    world.clock.sleep(1000)
    world.orchestrator.reconcile(run_id="run-1")
    assert world.orchestrator.machines() == ()


class SeeingBackend(ListingFakeBackend):
    """Reads after its order to destroy."""

    sees_gone = True


@pytest.mark.parametrize(
    ("kind", "fault", "reads"),
    [
        (ListingFakeBackend, None, 1),
        (SeeingBackend, None, 0),
        (SeeingBackend, Fault.LOST_TEARDOWN_REPLY, 1),
    ],
)
def test_who_sees_a_machine_gone_is_not_asked_again(
    world: World, kind: type[ListingFakeBackend], fault: Fault | None, reads: int
) -> None:
    """Only an adapter that reads itself, and only where its order raised nothing, is believed."""
    world.fake = kind(clock=world.clock, listing_lag_s=10.0)
    machine = world.rent()
    world.fake.faults[:] = [fault] if fault else []
    world.fake.calls.clear()
    assert world.orchestrator.destroy(machine) is not None
    assert world.fake.calls.count("status") == reads
    assert world.states() == []
