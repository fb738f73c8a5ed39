"""In whatever order of renting, faults, crashes and clean-up: nothing bills that is off record.

A rule-based machine drives the real orchestrator over a fake provider with a bill. A crash can
strike before and after every call to the provider and every write to the store; what follows
is what the next process does with the same store.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.errors import PacelineError
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.drivers.looking import CREATE_S_MAX
from paceline.rental.ledger import Ledger
from paceline.rental.lifecycle import MachineState
from paceline.rental.orchestrator import Orchestrator, RentRequest
from paceline.store.memory import MemoryStore
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.backend import FakeBackend, Fault, ListingFakeBackend

_LAG_S = 20.0


class Crash(BaseException):
    """The process ends here, as by kill -9: nothing may catch this."""


class CrashingStore(MemoryStore):
    """A store in which the process can end just before or just after a write."""

    countdown: "Countdown"

    def commit(self, *, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        self.countdown.tick()
        super().commit(expect=expect, writes=writes)
        self.countdown.tick()


class Countdown:
    """Ends the process at the n-th point from now."""

    def __init__(self) -> None:
        self.left: int | None = None

    def tick(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise Crash


class RentingMachine(RuleBasedStateMachine):
    """One run on two providers: one lists its machines, late; one keeps to the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.countdown = Countdown()
        self.store = CrashingStore(clock=self.clock)
        self.store.countdown = self.countdown
        self.backends: dict[str, FakeBackend] = {
            "listing": ListingFakeBackend(
                clock=self.clock, name="listing", listing_lag_s=_LAG_S, dphs=(1.0, 1.5)
            ),
            "plain": FakeBackend(clock=self.clock, name="plain", dphs=(2.0,)),
        }
        for backend in self.backends.values():
            backend.before_call = backend.after_call = lambda _method: self.countdown.tick()
        self.nonces = iter(range(10_000))
        self.index = 0

    @property
    def orchestrator(self) -> Orchestrator:
        """A new process each time: nothing is remembered but the store."""
        return Orchestrator(
            store=self.store,
            backend=self._backend,
            clock=self.clock,
            nonce=lambda: f"{next(self.nonces):04x}",
            notify=lambda _name, _fields: None,
        )

    def _backend(self, name: str) -> BackendAdapter:
        return self.backends[name]

    @rule(
        faults=st.lists(st.sampled_from(Fault), max_size=3),
        name=st.sampled_from(["listing", "plain"]),
        crash_at=st.none() | st.integers(0, 12),
    )
    def rent(self, faults: list[Fault], name: str, crash_at: int | None) -> None:
        self.index += 1
        request = RentRequest(
            run_id="r1",
            role="rollout",
            index=self.index,
            gpu="fake-1x",
            backends=(name,),
            min_disk_gb=10,
            max_dph=None,
            image="",
            ssh_pubkey_path=Path("key.pub"),
            boot_timeout_s=60,
        )
        self.backends[name].faults[:] = faults
        self.countdown.left = crash_at
        try:
            machine = self.orchestrator.rent(request)
        except (PacelineError, ConnectionResetError, Crash):
            pass
        else:
            assert machine.label in {i.handle.label for i in self.backends[name].billing()}
        self._calm()

    @rule(data=st.data(), faults=st.lists(st.sampled_from(Fault), max_size=2))
    @precondition(lambda self: self.orchestrator.machines())
    def destroy(self, data: st.DataObject, faults: list[Fault]) -> None:
        machine = data.draw(st.sampled_from(self.orchestrator.machines()))
        self.backends[machine.backend].faults[:] = faults
        self.countdown.left = data.draw(st.none() | st.integers(0, 8))
        try:
            self.orchestrator.destroy(machine)
        except (PacelineError, Crash):
            pass
        else:
            assert machine.label not in {m.label for m in self.orchestrator.machines()}
        self._calm()

    @rule(crash_at=st.none() | st.integers(0, 8), is_unreachable=st.booleans())
    def reconcile(self, crash_at: int | None, is_unreachable: bool) -> None:
        self.backends["listing"].faults[:] = [Fault.UNREACHABLE] * is_unreachable
        self.countdown.left = crash_at
        before = len(self.backends["listing"].billing())
        with contextlib.suppress(Crash):
            self.orchestrator.reconcile()
        assert len(self.backends["listing"].billing()) == before
        self._calm()

    @rule(seconds=st.sampled_from([1.0, 25.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(data=st.data())
    @precondition(lambda self: self.backends["listing"].billing())
    def preempt(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(self.backends["listing"].billing()))
        instance.ended_at_s = self.clock.time()

    @invariant()
    def whatever_bills_is_on_record(self) -> None:
        on_record = {machine.label for machine in self.orchestrator.machines()}
        for backend in self.backends.values():
            assert {instance.handle.label for instance in backend.billing()} <= on_record

    @invariant()
    def our_cost_is_never_below_the_bill(self) -> None:
        """But for what was preempted before anybody could know that it had been created."""
        never = {
            machine.label
            for machine in Ledger(self.store).machines()
            if machine.state is MachineState.NEVER_CREATED
        }
        known_usd = sum(backend.bill_usd(without=never) for backend in self.backends.values())
        assert self.orchestrator.cost_usd("r1") >= known_usd - 1e-9

    def teardown(self) -> None:
        """In calm weather one reconcile and one destroy each leave nothing but plain intents."""
        self._calm()
        self.clock.advance(_LAG_S + CREATE_S_MAX)
        orchestrator = self.orchestrator
        orchestrator.reconcile()
        for machine in orchestrator.machines():
            if machine.instance is not None:
                orchestrator.destroy(machine)
        assert self.backends["listing"].billing() == []
        left = orchestrator.machines()
        assert {machine.backend for machine in left} <= {"plain"}
        assert all(machine.instance is None for machine in left)

    def _calm(self) -> None:
        self.countdown.left = None
        for backend in self.backends.values():
            backend.faults.clear()


RentingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
TestRenting = RentingMachine.TestCase
