"""From a failed attempt to the next: what is tried, what is not, what stops, what is remembered."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import DeadlineExceededError, ExitStatus
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.drivers.renting import REST_SLICE_S
from paceline.rental.drivers.searching import DOWN_S
from paceline.rental.errors import (
    AllRefusedError,
    AmbiguousError,
    ApiError,
    AttemptsFailedError,
    AuthError,
    BackendError,
    BalanceError,
    BootFailedError,
    BudgetError,
    CapacityError,
    HostKeyChangedError,
    InstanceNotFoundError,
    NeverReadyError,
    NoAnswerError,
    NobodyAnsweredError,
    NoOffersError,
    NotAcceptedError,
    ProvisionError,
    RateLimitError,
    RentingStoppedError,
    RequestError,
    Silence,
    SshDeniedError,
    SshKeyError,
)
from paceline.rental.failover import (
    BUSY_S_MAX,
    OF_MACHINES,
    RULES,
    Block,
    FailureKind,
    NextMove,
    Scope,
    bad_place,
    block_for,
    kind_of,
)
from paceline.rental.hosts import (
    NUM_OUTCOMES_MAX,
    REMEMBERED_S,
    HostRecord,
    Outcome,
    first_hour_usd,
    parse_block,
    parse_host,
    render_block,
    render_host,
)
from paceline.rental.model import InstanceHandle, Offer, OfferConstraints
from paceline.rental.orchestrator import Orchestrator, RentRequest
from paceline.rental.records import Machine
from paceline.store.memory import MemoryStore
from paceline.telemetry.events import EVENT_FIELDS
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.backend import FakeBackend, Fault, ListingFakeBackend


def provision_error(cause: ApiError | None = None, *, wide: bool = False) -> ProvisionError:
    error = ProvisionError("no", is_backend_wide=wide)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (provision_error(CapacityError("taken")), FailureKind.CAPACITY),
        (provision_error(), FailureKind.CAPACITY),
        (NoOffersError("none"), FailureKind.CAPACITY),
        (provision_error(RequestError("no such image"), wide=True), FailureKind.REQUEST),
        (provision_error(RequestError("not this one")), FailureKind.CAPACITY),
        (provision_error(AuthError("401"), wide=True), FailureKind.ACCOUNT),
        (provision_error(BalanceError("quota"), wide=True), FailureKind.ACCOUNT),
        (provision_error(wide=True), FailureKind.ACCOUNT),
        (provision_error(RateLimitError("429")), FailureKind.BUSY),
        (BootFailedError("manifest unknown: nope"), FailureKind.REQUEST),
        (BootFailedError("oci runtime create failed"), FailureKind.BOOT_FAILED),
        (DeadlineExceededError("late"), FailureKind.BOOT_LATE),
        (InstanceNotFoundError("gone"), FailureKind.VANISHED),
        (SshDeniedError("publickey"), FailureKind.ACCESS),
        (HostKeyChangedError("other"), FailureKind.ACCESS),
        (SshKeyError("ours"), FailureKind.REQUEST),
        (NotAcceptedError("7 of 8 GPUs"), FailureKind.REJECTED),
        (AmbiguousError("500"), FailureKind.UNSURE),
        (KeyError("bug"), None),
    ],
)
def test_failures_are_told_apart(failure: Exception, kind: FailureKind | None) -> None:
    """By their type and what caused them, not by where they were raised."""
    assert kind_of(failure) is kind


def test_every_kind_has_a_rule() -> None:
    """Requests stop, accounts rule out a backend, machines speak against their hosts for long."""
    assert set(RULES) == set(FailureKind)
    assert [kind for kind in RULES if RULES[kind].move is NextMove.STOP] == [FailureKind.REQUEST]
    assert all(RULES[kind].scope is Scope.HOST for kind in OF_MACHINES)
    assert all(RULES[kind].block_s >= 3600 for kind in OF_MACHINES)


def offer(number: int = 0, *, host: str = "", dph: float = 1.0, place: str = "DE") -> Offer:
    return Offer("b", f"o{number}", "g", 1, 24, dph, 0.99, 1000.0, 500.0, place, {}, host=host)


def test_a_block_covers_its_scope_until_its_time() -> None:
    """A host's block covers all its offers; without a host the offer alone, and not for long."""
    of_host = block_for(FailureKind.REJECTED, offer(1, host="h"), reason="dead", now_s=100.0)
    assert of_host.covers(offer(2, host="h"), now_s=100.0)
    assert not of_host.covers(offer(1, host="other"), now_s=100.0)
    assert not of_host.covers(replace(offer(2, host="h"), backend="c"), now_s=100.0)
    assert not of_host.covers(offer(2, host="h"), now_s=of_host.until_s)
    unnamed = block_for(FailureKind.REJECTED, offer(1), reason="dead", now_s=100.0)
    assert (unnamed.scope, unnamed.name) == (Scope.OFFER, "o1")
    assert unnamed.until_s - 100.0 < 3600
    assert parse_block(render_block(of_host)) == of_host


def test_a_place_where_machines_fail_again_and_again_is_left() -> None:
    """Three hosts of one kind in one region; capacity does not count."""
    blocks: list[Block] = []
    for number in range(3):
        new = block_for(FailureKind.ACCESS, offer(host=f"h{number}"), reason="no", now_s=0.0)
        found = bad_place(blocks, new, now_s=0.0)
        blocks.append(new)
    assert found is not None
    assert found.covers(offer(9, host="unknown"), now_s=1.0)
    assert not found.covers(offer(9, host="unknown", place="FR"), now_s=1.0)
    taken = block_for(FailureKind.CAPACITY, offer(4), reason="taken", now_s=0.0)
    assert bad_place(blocks, taken, now_s=0.0) is None


def test_what_is_known_of_a_host_weighs_into_its_price() -> None:
    """Failures and slow boots make it dearer, use makes it cheaper, and age wears it off."""
    record = HostRecord(backend="b", host="h")
    bad = record.with_outcome(Outcome(at_s=0.0, failure=FailureKind.BOOT_LATE, reason="x" * 999))
    good = record.with_outcome(Outcome(at_s=0.0, failure=None, boot_s=60.0))

    def usd(known: HostRecord | None, now_s: float = 1.0) -> float:
        hosts = {} if known is None else {("b", "h"): known}
        return first_hour_usd(offer(host="h"), hosts, now_s)

    assert usd(good) < usd(None) < usd(bad)
    assert usd(bad, REMEMBERED_S + 1) == usd(None)
    assert parse_host(render_host(bad)) == bad
    assert len(bad.outcomes[0].reason) == 300
    for number in range(NUM_OUTCOMES_MAX + 5):
        good = good.with_outcome(Outcome(at_s=float(number), failure=None))
    assert len(good.outcomes) == NUM_OUTCOMES_MAX


# the drivers, over fake providers with a bill


class World:
    """Two providers, a store and an acceptor that refuses what a test names."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(clock=self.clock)
        self.first = HostedBackend(clock=self.clock, name="first", dphs=(1.0, 1.5))
        self.second = HostedBackend(clock=self.clock, name="second", dphs=(3.0,))
        self.told: list[tuple[str, dict[str, object]]] = []
        self.refused: set[str] = set()
        self.num_nonces = 0
        self.orchestrator = self.new_process()

    def new_process(self) -> Orchestrator:
        return Orchestrator(
            store=self.store,
            backend=self._backend,
            clock=self.clock,
            nonce=self._nonce,
            notify=lambda name, fields: self.told.append((name, fields)),
            accept=self._accept,
        )

    def _backend(self, name: str) -> BackendAdapter:
        return {"first": self.first, "second": self.second}[name]

    def _nonce(self) -> str:
        self.num_nonces += 1
        return f"{self.num_nonces:04x}"

    def _accept(
        self, backend: BackendAdapter, machine: InstanceHandle, offer: Offer, request: RentRequest
    ) -> None:
        if offer.id in self.refused:
            raise NotAcceptedError(f"{machine.instance_id}: 0 of 1 GPUs answer")

    def rent(self, **changes: object) -> Machine:
        return self.orchestrator.rent(replace(REQUEST, **changes))  # type: ignore[arg-type]

    def events(self, name: str) -> list[dict[str, object]]:
        return [fields for told, fields in self.told if told == name]

    def bills(self) -> list[str]:
        return [
            one.handle.label for backend in (self.first, self.second) for one in backend.billing()
        ]


class HostedBackend(ListingFakeBackend):
    """A provider that tells which host is behind an offer, and refuses creates on command."""

    refusal: Exception | None = None
    num_busy = 0
    """So many creates more come too early for it."""

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        found = super().search_offers(c)
        return [replace(one, host=f"host-of-{one.id}") for one in found]

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        if self.num_busy:
            self.num_busy -= 1
            raise provision_error(RateLimitError("429", pace_s=12.0))
        if self.refusal is not None:
            raise self.refusal
        return super().provision(
            offer_id, disk_gb=disk_gb, image=image, ssh_pubkey_path=ssh_pubkey_path, label=label
        )


REQUEST = RentRequest(
    run_id="run-1",
    role="trainer",
    index=0,
    gpu="fake-1x",
    backends=("first", "second"),
    min_disk_gb=10,
    max_dph=None,
    image="",
    ssh_pubkey_path=Path("key.pub"),
    boot_timeout_s=600,
)


@pytest.fixture
def world() -> World:
    return World()


def test_a_machine_that_is_not_accepted_is_destroyed_and_its_host_left_alone(world: World) -> None:
    """The next offer is taken; another run that comes later does not try the host either."""
    world.refused = {"first-0"}
    machine = world.rent()
    assert (machine.backend, machine.offer.id) == ("first", "first-1")
    assert world.bills() == [machine.label]
    [failed] = world.events("attempt.failed")
    assert (failed["kind"], failed["offer"]) == ("rejected", "first-0")
    assert set(EVENT_FIELDS["attempt.failed"]) <= set(failed)
    assert float(str(failed["cost_usd"])) == pytest.approx(30 / 3600, rel=0.2)
    world.refused = set()
    later = world.new_process().rent(replace(REQUEST, run_id="run-2"))
    assert later.offer.id == "first-1"
    plan = world.orchestrator.plan(REQUEST)
    assert "host is passed over" in plan.explain()
    world.clock.advance(8 * 86_400)
    assert world.orchestrator.plan(REQUEST).passed_over == ()


def test_failover_goes_from_offer_to_offer_to_backend(world: World) -> None:
    """Both hosts of the first backend fail; the second one serves."""
    world.refused = {"first-0"}
    world.first.faults[:] = [Fault.NEVER_BOOTS, Fault.NEVER_BOOTS]
    machine = world.rent()
    assert machine.backend == "second"
    assert [one["kind"] for one in world.events("attempt.failed")] == ["boot_late", "boot_late"]
    assert world.bills() == [machine.label]


def test_a_wrong_request_stops_at_once_with_its_cause(world: World) -> None:
    """Nothing else is tried, on no backend: it would be as wrong there."""
    world.first.refusal = provision_error(RequestError("image: no such thing"), wide=True)
    with pytest.raises(ProvisionError) as caught:
        world.rent(retry_for_s=3600.0)
    assert isinstance(caught.value.__cause__, RequestError)
    assert world.bills() == []
    assert world.second.calls.count("provision") == 0
    assert world.clock.monotonic() < 60


def test_a_refused_account_rules_out_its_backend_and_no_other(world: World) -> None:
    """One try there; where no other backend is named it is not asked again."""
    world.first.refusal = provision_error(BalanceError("quota exceeded"), wide=True)
    assert world.rent().backend == "second"
    assert len(world.events("attempt.failed")) == 1
    with pytest.raises(AllRefusedError, match="account") as caught:
        world.rent(backends=("first",), retry_for_s=3600.0)
    assert caught.value.exit_status is ExitStatus.PREFLIGHT
    assert world.events("renting.waiting") == []


def test_a_create_that_came_too_early_is_made_again(world: World) -> None:
    """The account is shared with other processes: nothing was made, so it is only a matter of time.

    What is waited for is told, and nothing is held against the offer or its backend.
    """
    world.first.num_busy = 3
    machine = world.rent()
    assert (machine.backend, machine.offer.id) == ("first", "first-0")
    waits = world.events("renting.waiting")
    assert [(one["wait_s"], one["backend"], one["reason"]) for one in waits] == [
        (12.0, "first", "no")
    ] * 3
    assert set(EVENT_FIELDS["renting.waiting"]) <= set(waits[0])
    assert world.clock.monotonic() >= 36
    assert world.events("attempt.failed") == []
    assert world.orchestrator.memory.blocks(now_s=world.clock.time()) == []
    assert [one.label for one in world.orchestrator.machines()] == [machine.label]


def test_a_backend_that_stays_busy_is_waited_for_no_longer_than_allowed(world: World) -> None:
    """A minute where another backend can be tried; else as long as a machine may take to boot."""
    world.first.num_busy = 10**6
    assert world.rent().backend == "second"
    assert BUSY_S_MAX - 24 < 12 * len(world.events("renting.waiting")) <= BUSY_S_MAX
    begun_s = world.clock.monotonic()
    with pytest.raises(AttemptsFailedError, match="busy"):
        world.rent(backends=("first",), boot_timeout_s=300)
    assert 300 - 24 < world.clock.monotonic() - begun_s <= 300
    assert [one["kind"] for one in world.events("attempt.failed")] == ["busy", "busy"]


def test_waiting_for_a_busy_backend_ends_with_its_run(world: World) -> None:
    """Told while it waits: no further create is made."""
    world.first.num_busy = 10**6

    def end_it(method: str) -> None:
        if method == "list_instances":  # comes right after the refusal
            world.orchestrator.stop_renting("run-1")

    world.first.before_call = end_it
    with pytest.raises(RentingStoppedError):
        world.rent()
    assert world.first.num_busy == 10**6 - 1


def test_retry_until_up_asks_again_until_its_deadline(world: World) -> None:
    """Waits grow, the history holds every attempt, and after the deadline nothing is begun."""
    sold_out = provision_error(CapacityError("sold out"))
    world.first.refusal = world.second.refusal = sold_out
    with pytest.raises(AttemptsFailedError, match="Tried") as caught:
        world.rent(retry_for_s=1000.0)
    assert world.clock.monotonic() <= 1000.0
    waits = [float(str(one["wait_s"])) for one in world.events("renting.waiting")]
    assert waits == sorted(waits)
    assert len(waits) >= 5
    [line, *_] = str(caught.value).splitlines()[1:]
    assert line.startswith("  first first-0: capacity, ")
    assert f"{len(waits) + 1} times, 0.000 USD: no" in line


def test_retry_until_up_takes_what_turns_up(world: World) -> None:
    """Capacity comes back after ten minutes, and the machine is rented then."""
    world.first.refusal = world.second.refusal = provision_error(CapacityError("sold out"))

    def come_back(method: str) -> None:
        if world.clock.monotonic() > 600:
            world.first.refusal = None

    world.first.before_call = come_back
    assert world.rent(retry_for_s=3600.0).backend == "first"


def test_an_account_that_was_refused_long_ago_does_not_stop_the_waiting(world: World) -> None:
    """One backend has no credit, the other no capacity: it is the other that is waited for."""
    world.first.refusal = provision_error(BalanceError("empty"), wide=True)
    world.second.refusal = provision_error(CapacityError("sold out"))
    with pytest.raises(AttemptsFailedError):
        world.rent(retry_for_s=300.0)
    assert world.events("renting.waiting") != []


@pytest.mark.parametrize("num_busy", [0, 10**6])
def test_whoever_waits_hears_soon_that_its_run_ends(world: World, num_busy: int) -> None:
    """Ctrl-C is not held up by a wait of minutes, whatever is waited for."""
    world.first.refusal = provision_error(CapacityError("sold out"))
    world.first.num_busy = num_busy
    sleep = world.clock.sleep

    def sleep_or_stop(seconds: float) -> None:
        sleep(seconds)
        if world.clock.monotonic() > 100:
            world.orchestrator.stop_renting("run-1")

    world.clock.sleep = sleep_or_stop  # type: ignore[method-assign]
    with pytest.raises(RentingStoppedError):
        world.rent(backends=("first",), retry_for_s=3600.0)
    assert world.clock.monotonic() <= 100 + REST_SLICE_S + 1


def test_a_run_that_ends_stops_its_renting(world: World) -> None:
    """Whatever waits for capacity ends, and nothing more is created."""
    world.first.refusal = world.second.refusal = provision_error(CapacityError("sold out"))

    def end_it(method: str) -> None:
        if world.clock.monotonic() > 100:
            world.orchestrator.stop_renting("run-1")

    world.first.before_call = end_it
    with pytest.raises(RentingStoppedError, match="trainer-0"):
        world.rent(retry_for_s=3600.0)
    assert world.orchestrator.machines() == ()


def test_no_attempt_is_begun_that_the_hard_cap_does_not_pay_for(world: World) -> None:
    """A boot that fails costs too; the next attempt would go beyond the cap."""
    world.first.dphs = world.second.dphs = (1.0,)
    world.first.faults[:] = [Fault.NEVER_BOOTS]
    with pytest.raises(BudgetError, match=r"hard cap of 1\.10 USD"):
        world.rent(hard_usd=1.1, boot_timeout_s=3600)
    assert world.bills() == []
    assert world.orchestrator.cost_usd("run-1") <= 1.1


def test_a_boot_ends_when_the_money_does(world: World) -> None:
    """Another machine of the run burns meanwhile, more than was known when the boot began."""
    world.first.dphs = (1.0,)
    world.first.faults[:] = [Fault.NEVER_BOOTS]

    def rent_beside(method: str) -> None:
        if method == "status" and world.clock.monotonic() >= 100:
            world.first.before_call = lambda _method: None
            world.orchestrator.rent(replace(REQUEST, index=1, backends=("second",)))

    world.first.before_call = rent_beside
    with pytest.raises(BudgetError, match=r"while .* starts"):
        world.rent(hard_usd=1.3, boot_timeout_s=3600, backends=("first",))
    assert world.first.billing() == []
    # one slice of the boot, at what both machines cost, is what it may be late
    assert world.orchestrator.cost_usd("run-1") <= 1.3 + 4.0 * 300 / 3600


def test_hosts_are_remembered_and_can_be_forgotten(world: World) -> None:
    """A used host and a failed one are there for the next process, until somebody forgets them."""
    world.refused = {"first-0"}
    world.rent()
    memory = world.new_process().memory
    known = {host: record.outcomes[-1].failure for (_, host), record in memory.hosts().items()}
    assert known == {
        "host-of-first-0": FailureKind.REJECTED,
        "host-of-first-1": None,
    }
    assert len(memory.blocks(now_s=world.clock.time())) == 1
    assert memory.forget(backend="first", host="host-of-first-0") == 2
    assert memory.blocks(now_s=world.clock.time()) == []
    assert memory.forget() == 1
    assert memory.hosts() == {}


def test_a_machine_that_is_missed_speaks_against_its_host(world: World) -> None:
    """It is said to run and does not answer: lost with its host, which is passed over."""
    machine = world.rent()
    assert world.orchestrator.autopsy(machine, answers=True) is None
    death = world.orchestrator.autopsy(machine)
    assert death is not None
    assert (death.cause, death.bills) == ("host_lost", True)
    assert "host is passed over" in world.orchestrator.plan(REQUEST).explain()
    world.orchestrator.destroy(machine)
    assert world.bills() == []


class SpotBackend(ListingFakeBackend):
    """The fake provider with a second market."""

    bids: Sequence[float] = ()

    def search_spot_offers(self, c: OfferConstraints) -> list[Offer]:
        found = super().search_offers(replace(c, max_dph=None))
        return [replace(one, dph=one.dph / 2) for one in found]

    def provision_spot(
        self,
        offer_id: str,
        *,
        disk_gb: int,
        image: str,
        ssh_pubkey_path: Path,
        label: str,
        max_dph: float,
    ) -> InstanceHandle:
        self.bids = (*self.bids, max_dph)
        return self.provision(
            offer_id, disk_gb=disk_gb, image=image, ssh_pubkey_path=ssh_pubkey_path, label=label
        )


def test_spot_is_asked_for_bid_for_and_known_as_such(world: World) -> None:
    """The bid is above today's price, below the limit, and what the machine costs at most."""
    spot = SpotBackend(clock=world.clock, name="second", dphs=(2.0,))
    world.second = spot  # type: ignore[assignment]
    machine = world.rent(is_spot=True)
    assert machine.offer.is_spot
    assert spot.bids == (1.25,)
    assert machine.offer.dph == 1.25
    limited = world.rent(is_spot=True, max_dph=1.1, index=1)
    assert limited.offer.dph == 1.1
    [told, _] = world.events("machine.running")
    assert told["spot"] is True
    reasons = world.orchestrator.plan(replace(REQUEST, is_spot=True)).explain()
    assert reasons == "first: rents nothing as spot; say spot: false to rent there"


def test_what_was_passed_over_is_on_record_with_the_run(world: World) -> None:
    """The plan that a slot's machine was taken from can be read afterwards."""
    world.refused = {"first-0"}
    world.orchestrator.plan(replace(REQUEST, max_dph=2.0), explain=True)
    world.rent(max_dph=2.0)
    [why] = world.new_process().why("run-1")
    assert why["slot"] == "trainer-0"
    assert [one["offer"] for one in why["attempts"]] == ["first-0", "first-1"]  # type: ignore[attr-defined]
    [left] = [one for one in why["passed_over"] if one["offer"] is not None]  # type: ignore[attr-defined]
    assert left["reasons"] == ["costs 3 $/h, the limit is 2.0 $/h"]


def test_nothing_fits_and_the_error_names_what_is_nearest(world: World) -> None:
    """Cheapest above the limit, and what the limit would have to be."""
    with pytest.raises(NoOffersError, match=r"nearest: first first-0 at 1\.000 \$/h with max_"):
        world.rent(max_dph=0.5)


def test_one_that_does_not_answer_is_asked_once_and_said_to_be_down(world: World) -> None:
    """Other machines, and the question what would fit instead, do not wait for it again."""
    asked: list[str] = []

    def is_down(method: str) -> None:
        asked.append(method)
        raise NoAnswerError("first: cannot connect", was_sent=False)

    world.first.before_call = is_down
    alone = replace(REQUEST, backends=("first",))
    for index in range(2):
        with pytest.raises(NobodyAnsweredError, match=r"nobody could say .*cannot connect"):
            world.orchestrator.rent(replace(alone, index=index))
    assert asked == ["search_offers"]
    world.clock.sleep(DOWN_S)
    world.first.before_call = lambda _method: None
    assert world.orchestrator.rent(alone).backend == "first"


def test_a_listing_that_reached_nobody_saves_a_plan_the_question(world: World) -> None:
    """Only what never arrived: an answer that was lost says nothing of the next."""
    world.orchestrator.heard("first", NoAnswerError("first: reset", was_sent=True))
    assert not world.orchestrator.plan(REQUEST).silent
    world.orchestrator.heard("first", NoAnswerError("first: no route", was_sent=False))
    [silent] = world.orchestrator.plan(REQUEST).silent
    assert (silent.backend, silent.silence) == ("first", Silence.UNREACHABLE)


def test_machines_of_a_backend_that_ignores_orders_stop_the_failover(world: World) -> None:
    """What cannot be proven gone ends the renting: nothing is made while something may bill."""
    world.refused = {"first-0"}
    world.first.faults[:] = [Fault.IGNORED_TEARDOWN] * 10
    with pytest.raises(Exception, match="may still exist"):
        world.rent()
    assert len(world.orchestrator.machines()) == 1
    assert world.second.calls.count("provision") == 0


def test_never_ready_is_another_status_than_never_had(world: World) -> None:
    """Exit status 30 says that machines were made, 20 that none was."""
    world.refused = {"first-0", "first-1", "second-0"}
    with pytest.raises(NeverReadyError):
        world.rent()
    assert world.bills() == []


def test_plain_backends_without_hosts_work_as_well() -> None:
    """An adapter that keeps to the seed: its offers are remembered by their ids."""
    world = World()
    world.first = FakeBackend(clock=world.clock, name="first", dphs=(1.0, 2.0))  # type: ignore[assignment]
    world.refused = {"first-0"}
    assert world.rent().offer.id == "first-1"
    assert ("first", "offer first-0") in world.orchestrator.memory.hosts()


def test_two_machines_do_not_fight_over_one_offer(world: World) -> None:
    """While one slot's machine boots, another slot takes the next offer at once."""
    other: list[Machine] = []

    def rent_beside(method: str) -> None:
        if method == "status":
            world.first.before_call = lambda _method: None
            other.append(world.orchestrator.rent(replace(REQUEST, index=1)))

    world.first.before_call = rent_beside
    mine = world.rent()
    assert [mine.offer.id, *(one.offer.id for one in other)] == ["first-0", "first-1"]
    assert world.events("attempt.failed") == []
    world.first.before_call = lambda _method: None
    assert world.first.calls.count("search_offers") == 1, "one search serves both"


def test_what_is_tried_by_another_slot_is_said(world: World) -> None:
    """With one offer for two machines the second is told why it got none."""

    def rent_beside(method: str) -> None:
        if method == "status":
            world.first.before_call = lambda _method: None
            with pytest.raises(AttemptsFailedError, match="another machine is being made of it"):
                world.orchestrator.rent(replace(REQUEST, index=1, backends=("first",)))

    world.first.dphs = (1.0,)
    world.first.before_call = rent_beside
    assert world.rent(backends=("first",)).offer.id == "first-0"
    assert len(world.bills()) == 1


def test_what_is_over_is_not_kept_for_ever(world: World) -> None:
    """Blocks and hosts of long ago go when the next failure is written; capacity blames no host."""
    world.refused = {"first-0"}
    world.rent()
    world.clock.advance(REMEMBERED_S + 1)
    sold_out = FailureKind.CAPACITY
    memory = world.orchestrator.memory
    memory.remember_failure(offer(7), sold_out, reason="taken", now_s=world.clock.time())
    assert memory.hosts() == {}
    assert [record.key for record in world.store.list("block/")] == ["block/offer/b/o7"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"schema": 9}', b'{"schema": 1}'])
def test_what_is_no_memory_of_ours_is_an_error_that_helps(content: bytes) -> None:
    """It names the command that forgets everything."""
    for parse in (parse_host, parse_block):
        with pytest.raises(BackendError, match="hosts forget --all"):
            parse(content)
