"""Whole runs by seed: rented, fought over, preempted, killed half-way and taken up again.

The orchestrator, the store's records and the runs' own decisions are real. Providers are fakes
with a bill, time is the scheduler's, and everything that goes wrong comes from the seed. After
every story: whatever was made is gone and was seen gone, or is on record; nothing cost more than
the hard cap and what one interval of looking burns; nothing waited past its deadline.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.rental import (
    BackendAdapter,
    InstanceHandle,
    NotAcceptedError,
    Offer,
    SshUnreachableError,
)
from paceline.rental.budget import Budget, Level
from paceline.rental.orchestrator import RECONCILE_EVERY_S, Orchestrator, RentRequest
from paceline.rental.records import Machine
from paceline.runs.cleaning import split
from paceline.runs.model import RestartMode, RoleKind, Slot
from paceline.runs.plan import Finish, Observation, Phase, Postpone, Retire, SlotView, Start, decide
from paceline.testing.fakes.backend import FakeInstance
from paceline.testing.scheduler import Countdown, Scheduler
from paceline.testing.simulated import SimBackend, SimStore

RUN_ID = "sim"
TICK_S = 10.0
BOOT_TIMEOUT_S = 600
RETRY_FOR_S = 1200.0
_RUN_S_MAX = 4 * 3600.0
_DESTROY_EVERY_S = 15.0
_END_S_MAX = BOOT_TIMEOUT_S + 900.0
_WAIT_SLACK_S = 60.0
"""What a wait may be late by: one slow call, one poll."""
_NUM_CLEANINGS = 6
_NUM_LIVES_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What happened in one seed."""

    seed: int
    digest: str
    """Of the log, line by line."""
    log: tuple[str, ...]
    num_created: int
    num_crashes: int
    num_deaths: int
    num_effects: int
    is_capped: bool
    spent_usd: float
    problems: tuple[str, ...]


class Simulation:
    """One story; ``run`` is called once."""

    def __init__(self, seed: int, *, keeps_log: bool = False) -> None:
        self._seed = seed
        self._rng = random.Random(seed)  # noqa: S311 - a simulation, repeatable
        self._keeps_log = keeps_log
        self._log: list[str] = []
        self._hash = hashlib.sha256()
        self._problems: list[str] = []
        self._countdown = Countdown()
        self._clock = Scheduler(self._countdown)
        self._store = SimStore(clock=self._clock)
        self._store.countdown = self._countdown
        self._backends = {name: self._backend(name) for name in ("north", "south", "west")}
        self._caps = Budget(soft_usd=3.0, hard_usd=self._rng.choice((2.0, 6.0, 40.0)))
        self._num_nonces = 0
        self._num_crashes = 0
        self._num_deaths = 0
        self._burn_max = 0.0
        self._away_s = 0.0
        """For how long nobody was there, or awake, to act."""
        self._is_capped = False
        self._life: _Life | None = None

    def run(self) -> Story:
        """Live: a run, up to two crashes, and the clean-up of whoever comes next."""
        num_lives = self._rng.choice((1, 2, 2, _NUM_LIVES_MAX))
        for number in range(num_lives):
            is_last = number == num_lives - 1
            reach = self._rng.choice((40, 150, 600))
            self._countdown.left = None if is_last else self._rng.randrange(reach)
            if not self._live(adopts=self._rng.random() < 0.5):
                break
        self._clean_up()
        self._judge()
        return Story(
            seed=self._seed,
            digest=self._hash.hexdigest(),
            log=tuple(self._log),
            num_created=len(self._instances()),
            num_crashes=self._num_crashes,
            num_deaths=self._num_deaths,
            num_effects=self._countdown.num_effects,
            is_capped=self._is_capped,
            spent_usd=self._bill_usd(),
            problems=tuple(self._problems),
        )

    def _live(self, *, adopts: bool) -> bool:
        """Have one process drive the run; return whether it was killed."""
        self._life = _Life(self, self._process(), adopts=adopts)
        self._clock.spawn(self._life.drive)
        self._clock.spawn(self._play_nature)
        self._clock.run()
        if not self._countdown.is_dead:
            return False
        self._num_crashes += 1
        self._tell("crash")
        self._countdown.is_dead = False
        self._countdown.left = None
        away_s = self._rng.uniform(0.0, RECONCILE_EVERY_S)
        self._away_s += away_s
        self._clock.sleep(away_s)
        return True

    def _process(self) -> Orchestrator:
        """Return a process that remembers nothing but the store."""
        return Orchestrator(
            store=self._store,
            backend=self._backend_of,
            clock=self._clock,
            nonce=self._nonce,
            notify=self._hear,
            accept=self._accept,
            ask_all=lambda ask, names: [ask(name) for name in names],
        )

    def _hear(self, name: str, fields: dict[str, object]) -> None:
        self._tell(f"{name} {sorted(fields.items())}")
        if self._life is not None:
            self._life.has_heard = True

    def _backend_of(self, name: str) -> BackendAdapter:
        return self._backends[name]

    def _backend(self, name: str) -> SimBackend:
        def call(method: str) -> None:
            self._countdown.tick()
            self._tell(f"{name} {method}")
            self._clock.sleep(backend.rng.choice((0.1, 0.5, 3.0)))

        backend = SimBackend(
            clock=self._clock,
            name=name,
            dphs=tuple(self._rng.choice((0.4, 1.0, 2.5)) for _ in range(3)),
            boot_s=self._rng.choice((20.0, 90.0, 400.0)),
            listing_lag_s=self._rng.choice((0.0, 20.0, 60.0)),
            before_call=call,
            after_call=lambda _method: self._countdown.tick(),
            rng=random.Random(self._rng.randrange(2**32)),  # noqa: S311
            fault_chance=self._rng.choice((0.0, 0.05, 0.25)),
        )
        return backend

    def _nonce(self) -> str:
        self._num_nonces += 1
        return f"{self._num_nonces:04x}"

    def _accept(
        self, backend: BackendAdapter, machine: InstanceHandle, offer: Offer, request: RentRequest
    ) -> None:
        self._countdown.tick()
        boot_s = self._clock.time() - machine.created_at - self._away_s
        if boot_s > BOOT_TIMEOUT_S + _WAIT_SLACK_S:
            self._problem(f"{machine.label} was waited for {boot_s:.0f} s")
        self._clock.sleep(5.0)
        chance = self._rng.random()
        if chance < 0.06:
            raise NotAcceptedError(f"{machine.instance_id}: 0 of 1 GPUs answer")
        if chance < 0.08:
            raise SshUnreachableError(f"{machine.instance_id}: connection refused")

    def _play_nature(self) -> None:
        """Take machines back, break them, and let the laptop sleep, as long as somebody drives."""
        mood = self._rng.choice((1800.0, 7200.0, 1e9))
        while self._life is not None and not self._life.is_over:
            self._clock.sleep(60.0)
            self._watch_invariants()
            if self._rng.random() >= 60.0 / mood:
                continue
            billing = self._billing()
            if billing:
                self._num_deaths += 1
                self._strike(self._rng.choice(billing))

    def _strike(self, instance: FakeInstance) -> None:
        kind = self._rng.choice(("preempt", "break", "suspend"))
        self._tell(f"{kind} {instance.handle.instance_id}")
        if kind == "preempt":
            instance.ended_at_s = self._clock.time()
        elif kind == "break":
            instance.boots = False
        else:
            self._away_s += 3600.0
            self._clock.suspend(3600.0)

    def _watch_invariants(self) -> None:
        billing = self._billing()
        self._burn_max = max(self._burn_max, sum(one.dph for one in billing))
        on_record = {one.label for one in self._process().machines()}
        for instance in billing:
            if instance.handle.label not in on_record:
                self._problem(f"{instance.handle.label} bills and is on no record")

    def _clean_up(self) -> None:
        """Do what the next call does, in calm weather: look, and end what is there."""
        self._countdown.left = None
        for backend in self._backends.values():
            backend.fault_chance = 0.0
        for _ in range(_NUM_CLEANINGS):
            rental = self._process()
            rental.reconcile(backends=self._backends)
            for machine in rental.machines():
                try:
                    rental.destroy(machine)
                except PacelineError as exc:
                    self._tell(f"clean-up: {exc}")
            if not rental.machines():
                return
            self._clock.sleep(60.0)

    def _judge(self) -> None:
        """Compare the providers' books with the record and the cap."""
        left = {machine.label: machine for machine in self._process().machines()}
        for instance in self._billing():
            known = left.get(instance.handle.label)
            if known is None or known.instance is None:
                self._problem(f"{instance.handle.label} bills in the end, without a handle")
        if left:
            self._problem(f"in the end on record: {sorted(left)}")
        spent_usd = self._bill_usd()
        if self._burn_max == 0.0:
            self._burn_max = sum(instance.dph for instance in self._instances())
        grace_usd = self._burn_max * (RECONCILE_EVERY_S + self._away_s) / 3600
        if spent_usd > self._caps.hard_usd + grace_usd:
            self._problem(
                f"spent {spent_usd:.2f}, cap {self._caps.hard_usd:.2f}, grace {grace_usd:.2f} USD"
            )

    def _instances(self) -> list[FakeInstance]:
        return [one for backend in self._backends.values() for one in backend.instances]

    def _billing(self) -> list[FakeInstance]:
        return [one for backend in self._backends.values() for one in backend.billing()]

    def _bill_usd(self) -> float:
        return sum(backend.bill_usd() for backend in self._backends.values())

    def _tell(self, text: str) -> None:
        line = f"{self._clock.monotonic():.3f} {text}"
        self._hash.update(line.encode())
        if self._keeps_log:
            self._log.append(line)

    def _problem(self, text: str) -> None:
        self._tell(f"PROBLEM {text}")
        if text not in self._problems:
            self._problems.append(text)

    def timed(self, what: str, limit_s: float, work: Callable[[], object]) -> object:
        """Do something that has a deadline, and note when it takes longer."""
        begun_s = self._clock.monotonic()
        try:
            return work()
        finally:
            took_s = self._clock.monotonic() - begun_s
            if took_s > limit_s and not self._countdown.is_dead:
                self._problem(f"{what} took {took_s:.0f} s, its limit is {limit_s:.0f} s")

    # what a life works with

    @property
    def clock(self) -> Scheduler:
        """The scheduler, as a clock."""
        return self._clock

    @property
    def rng(self) -> random.Random:
        """Where chance comes from."""
        return self._rng

    @property
    def caps(self) -> Budget:
        """What the run may cost."""
        return self._caps

    @property
    def backends(self) -> tuple[str, ...]:
        """Who rents machines."""
        return tuple(self._backends)

    def state_of(self, machine: Machine) -> str:
        """Ask a backend how a machine is."""
        return self._backends[machine.backend].status(machine.handle).state

    def tell(self, text: str) -> None:
        """Put a line into the log."""
        self._tell(text)

    def note_cap(self) -> None:
        """Remember that the cap ended the run."""
        self._is_capped = True


class _Life:
    """One process that drives the run: rents, watches, replaces, tears down."""

    def __init__(self, world: Simulation, rental: Orchestrator, *, adopts: bool) -> None:
        self._world = world
        self._rental = rental
        self._adopts = adopts
        self._machines: dict[Slot, Machine] = {}
        self._views: dict[Slot, SlotView] = {}
        self._busy: set[Slot] = set()
        self._failure: str | None = None
        self._destroying: set[str] = set()
        self.is_over = False
        self.has_heard = False
        """Something has become of an order of this life."""

    def drive(self) -> None:
        """Run to the end, whatever it is, and tear everything down."""
        clock = self._world.clock
        try:
            self._begin()
            until_s = clock.monotonic() + _RUN_S_MAX
            while not self._is_done(until_s):
                clock.sleep(TICK_S)
            self._world.timed("the end", _END_S_MAX + _WAIT_SLACK_S, self._wind_down)
        finally:
            self.is_over = True

    def _begin(self) -> None:
        """Take up what is on record, or end it, and rent what is missing."""
        known = self._rental.machines(RUN_ID)
        first, later = split(self._world.backends, known)
        if first:
            self._rental.reconcile(backends=first)
        self._world.clock.spawn(partial(self._look_later, later))
        for role, kind, count in (
            ("trainer", RoleKind.TRAINER, 1),
            ("rollout", RoleKind.ROLLOUT, 2),
        ):
            for index in range(count):
                slot = Slot(role=role, index=index)
                self._views[slot] = SlotView(
                    slot=slot,
                    kind=kind,
                    restart=RestartMode.ON_FAILURE,
                    max_restarts=3,
                    phase=Phase.RUNNING,
                )
                mine = [one for one in known if (one.role, one.index) == (role, index)]
                running = [one for one in mine if one.state == "running"]
                if self._adopts and running:
                    self._machines[slot] = running[0]
                    mine.remove(running[0])
                self._spawn(slot, partial(self._fill, slot, mine))

    def _look_later(self, names: list[str]) -> None:
        """List backends with nothing on record once the first machine has been ordered."""
        clock = self._world.clock
        until_s = clock.monotonic() + BOOT_TIMEOUT_S
        while not self.has_heard and not self.is_over and clock.monotonic() < until_s:
            clock.sleep(TICK_S)
        if names:
            found = self._rental.reconcile(backends=names)
            self._world.tell(f"looked at {names} later: {[one.kind.value for one in found]}")

    def _fill(self, slot: Slot, leftovers: list[Machine]) -> None:
        """End what is in the way, rent if there is nothing, and run."""
        for machine in leftovers:
            self._destroy(machine)
        if slot not in self._machines:
            self._rent(slot)
        self._work(slot)

    def _spawn(self, slot: Slot, work: Callable[[], None]) -> None:
        self._busy.add(slot)

        def carried_out() -> None:
            try:
                work()
            except (PacelineError, ConnectionResetError) as exc:
                self._world.tell(f"{slot} failed: {exc}")
                self._failure = self._failure or f"{slot}: {exc}"
            finally:
                self._busy.discard(slot)

        self._world.clock.spawn(carried_out)

    def _rent(self, slot: Slot) -> None:
        request = RentRequest(
            run_id=RUN_ID,
            role=slot.role,
            index=slot.index,
            gpu="fake-1x",
            backends=self._world.backends,
            min_disk_gb=10,
            max_dph=None,
            image="",
            ssh_pubkey_path=Path("key.pub"),
            boot_timeout_s=BOOT_TIMEOUT_S,
            is_spot=slot.role == "rollout",
            hard_usd=self._world.caps.hard_usd,
            retry_for_s=RETRY_FOR_S,
        )
        self._machines[slot] = self._rental.rent(request)

    def _work(self, slot: Slot) -> None:
        """Have the role's command run, until it ends or its machine is missed."""
        clock = self._world.clock
        ends_s = clock.monotonic() + self._world.rng.choice((600.0, 3600.0, 10_000.0))
        machine = self._machines[slot]
        while not self.is_over:
            clock.sleep(20.0)
            if clock.monotonic() >= ends_s:
                self._move(slot, Phase.EXITED, code=0)
                return
            try:
                answers = self._world.state_of(machine) == "running"
            except PacelineError:
                continue  # the provider does not answer; the machine may
            if not answers:
                death = self._rental.autopsy(machine)
                self._world.tell(f"{slot} lost: {death and death.cause}")
                self._move(slot, Phase.LOST)
                return

    def _move(self, slot: Slot, phase: Phase, code: int | None = None) -> None:
        self._views[slot] = replace(self._views[slot], phase=phase, code=code)

    def _is_done(self, until_s: float) -> bool:
        """Look once; do what the runs' plan says, and return whether it says: end."""
        clock, caps = self._world.clock, self._world.caps
        spending = self._rental.tick(RUN_ID, caps).spending
        if spending.level is Level.HARD:
            self._world.note_cap()
        seen = Observation(
            now_s=clock.monotonic(),
            slots=tuple(self._views.values()),
            signal="SIGTERM" if clock.monotonic() > until_s or self._failure else None,
            spent_usd=spending.spent_usd,
            burn_dph=spending.burn_dph,
            budget=caps,
        )
        for action in decide(seen):
            match action:
                case Finish():
                    self._world.tell(f"ends: {action.reason}")
                    return True
                case Postpone():
                    view = self._views[action.slot]
                    self._views[action.slot] = replace(
                        view,
                        phase=Phase.WAITING,
                        restarts=view.restarts + 1,
                        due_s=clock.monotonic() + action.delay_s,
                        machine_lost=action.replace,
                    )
                case Start():
                    self._move(action.slot, Phase.RUNNING)
                    self._start(action.slot, replace_machine=action.replace)
                case Retire():
                    self._move(action.slot, Phase.DONE)
        return False

    def _start(self, slot: Slot, *, replace_machine: bool) -> None:
        def work() -> None:
            if replace_machine:
                self._destroy(self._machines.pop(slot))
                self._rent(slot)
            self._work(slot)

        self._spawn(slot, work)

    def _destroy(self, machine: Machine) -> None:
        self._world.timed(f"destroy {machine.label}", 300.0, lambda: self._rental.destroy(machine))

    def _wind_down(self) -> None:
        """End every machine of the run, again and again until it is seen gone."""
        self.is_over = True
        self._rental.stop_renting(RUN_ID)
        clock = self._world.clock
        until_s = clock.monotonic() + _END_S_MAX
        while self._left() and clock.monotonic() < until_s:
            for machine in self._rental.machines(RUN_ID):
                is_known = machine.instance is not None
                slot = Slot(role=machine.role, index=machine.index)
                if (is_known or slot not in self._busy) and machine.label not in self._destroying:
                    self._destroying.add(machine.label)
                    clock.spawn(partial(self._end, machine))
            clock.sleep(_DESTROY_EVERY_S)

    def _left(self) -> bool:
        return bool(self._rental.machines(RUN_ID) or self._busy)

    def _end(self, machine: Machine) -> None:
        try:
            self._destroy(machine)
        except PacelineError as exc:
            self._world.tell(f"not ended: {exc}")
        finally:
            self._destroying.discard(machine.label)
