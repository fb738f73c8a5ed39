"""What gc finds and ends: ours, what is on no record here, and what is none of our business."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.core.clock import Clock
from paceline.core.errors import MissingExtraError, PacelineError, UsageError
from paceline.rental import BackendAdapter, BackendError, MissingKeyError
from paceline.rental.orchestrator import Orchestrator, RentRequest
from paceline.runs.ledger import RunLedger, RunRecord
from paceline.runs.owner import OwnerLock
from paceline.runs.upkeep import EndRule, Whose, end_left_overs, end_run, find_left_overs
from paceline.store.memory import MemoryStore
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.backend import FakeBackend, Fault, ListingFakeBackend


@dataclass
class Place:
    """One operator's computer, with three backends, one of which has no key."""

    state: Path
    clock: FakeClock = field(default_factory=FakeClock)
    missing: set[str] = field(default_factory=set)
    """Backends of which a part is not installed any more."""

    def __post_init__(self) -> None:
        self.store = MemoryStore(clock=self.clock)
        self.ledger = RunLedger(self.store)
        self.north = ListingFakeBackend(clock=self.clock, name="north")
        self.south = ListingFakeBackend(clock=self.clock, name="south")
        self.nonces: Iterator[int] = iter(range(100))
        self.rental = Orchestrator(
            store=self.store,
            backend=self.backend_of,
            clock=self.clock,
            nonce=lambda: f"{next(self.nonces):04x}",
            notify=lambda _name, _fields: None,
        )

    def backend_of(self, name: str) -> BackendAdapter:
        if name == "keyless":
            raise MissingKeyError("no key")
        if name in self.missing:
            raise MissingExtraError(f"{name}: pip install it")
        return {"north": self.north, "south": self.south}[name]

    def run_dir(self, run_id: str) -> Path:
        return self.state / run_id

    def rent(self, run_id: str, backend: str = "north") -> str:
        self.ledger.create(
            RunRecord(run_id=run_id, name=run_id, created_at_ms=0, pid=1, out=str(self.state))
        )
        return self.rental.rent(request(run_id, backend)).label

    def plant(self, backend: FakeBackend, label: str) -> None:
        backend.provision(
            f"{backend.name}-0", disk_gb=1, image="", ssh_pubkey_path=Path("k"), label=label
        )

    def bills(self) -> set[str]:
        both = (*self.north.billing(), *self.south.billing())
        return {one.handle.label for one in both}


def request(run_id: str, backend: str) -> RentRequest:
    return RentRequest(
        run_id=run_id,
        role="x",
        index=0,
        gpu="g-1x",
        backends=(backend,),
        min_disk_gb=1,
        max_dph=None,
        image="",
        ssh_pubkey_path=Path("k"),
    )


BACKENDS = ("north", "south", "keyless")
STRAY = "paceline-other-x-0-ff"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_three_kinds_are_told_apart(place: Place) -> None:
    """On record and driven by nobody; our label and on no record; no label of ours."""
    ours = place.rent("run-1")
    place.plant(place.south, STRAY)
    place.plant(place.south, "somebody-else")
    found = find_left_overs(place, BACKENDS)
    assert [(one.whose, one.label) for one in found.machines] == [
        (Whose.OURS, ours),
        (Whose.UNKNOWN, STRAY),
    ]
    assert found.num_foreign == {"south": 1}
    assert found.problems == ()


def test_only_what_is_ours_is_ended_and_what_was_seen_is_said(place: Place) -> None:
    """The end is proven by the state and the listing; the others go on billing."""
    ours = place.rent("run-1")
    place.plant(place.south, STRAY)
    place.plant(place.south, "somebody-else")
    place.clock.advance(86_400)
    ended = end_left_overs(place, find_left_overs(place, BACKENDS), EndRule())
    assert place.bills() == {STRAY, "somebody-else"}
    [proof] = ended.proofs
    assert (proof.label, proof.reads) == (ours, ("its state reads destroyed", "not listed"))
    assert ended.failures == ()


def test_strays_are_ended_when_asked_for_and_old_enough(place: Place) -> None:
    """A young one may be on its way onto another computer's record; foreign ones never go."""
    place.plant(place.south, STRAY)
    place.plant(place.south, "somebody-else")
    rule = EndRule(with_unknown=True)
    end_left_overs(place, find_left_overs(place, BACKENDS), rule)
    assert STRAY in place.bills()
    place.clock.advance(601)
    ended = end_left_overs(place, find_left_overs(place, BACKENDS), rule)
    assert place.bills() == {"somebody-else"}
    assert [proof.label for proof in ended.proofs] == [STRAY]
    assert find_left_overs(place, BACKENDS).machines == ()


def test_too_many_at_once_are_a_mistake(place: Place) -> None:
    """Nothing is ended, and the message says how to mean it."""
    for number in range(3):
        place.rent(f"run-{number}")
    with pytest.raises(UsageError, match="--max-kill"):
        end_left_overs(place, find_left_overs(place, BACKENDS), EndRule(num_max=2))
    assert len(place.bills()) == 3
    end_left_overs(place, find_left_overs(place, BACKENDS), EndRule(num_max=3))
    assert place.bills() == set()


def test_a_run_that_is_driven_is_left_alone(place: Place) -> None:
    """Its lock is held: its machines are not even shown."""
    place.rent("run-1")
    with OwnerLock(place.run_dir("run-1"), clock=place.clock, token="t"):  # noqa: S106 - no secret
        assert find_left_overs(place, BACKENDS).machines == ()
    assert len(find_left_overs(place, BACKENDS).machines) == 1


def test_a_backend_that_fails_is_named_and_hides_nothing(place: Place) -> None:
    """The others are looked at all the same; one without a listing is named too."""
    place.plant(place.south, STRAY)

    def refuse(method: str) -> None:
        if method == "list_instances":
            raise BackendError("status 500")

    place.north.before_call = refuse
    found = find_left_overs(place, BACKENDS)
    assert [one.label for one in found.machines] == [STRAY]
    assert found.problems == ("not asked: north: status 500",)
    place.north = FakeBackend(clock=place.clock, name="north")  # type: ignore[assignment]
    assert "cannot list" in find_left_overs(place, BACKENDS).problems[0]


def test_what_cannot_be_ended_does_not_hold_up_the_rest(place: Place) -> None:
    """Its error is returned, the others are gone, and its run stays open."""
    place.rent("run-1")
    place.rent("run-2", "south")
    place.north.faults[:] = [Fault.IGNORED_TEARDOWN] * 20
    ended = end_left_overs(place, find_left_overs(place, BACKENDS), EndRule())
    assert [type(one).__name__ for one in ended.failures] == ["NotProvenGoneError"]
    assert isinstance(ended.failures[0], PacelineError)
    assert len(place.north.billing()) == 1
    assert place.south.billing() == []
    assert place.ledger.get("run-1").outcome is None
    assert place.ledger.get("run-2").outcome is not None


def test_down_twice_is_fine(place: Place) -> None:
    """The first one proves the end, the second finds nothing to do."""
    place.rent("run-1")
    clock: Clock = place.clock
    assert len(end_run(place, "run-1", clock=clock)) == 1
    assert end_run(place, "run-1", clock=clock) == []
