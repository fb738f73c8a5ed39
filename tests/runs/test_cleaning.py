"""When a command ends what runs left behind: before it rents where anything is on record."""

from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from paceline.core.errors import UsageError
from paceline.rental import InstanceHandle, NoAnswerError
from paceline.rental.lifecycle import MachineState
from paceline.runs.cleaning import CleanUp, split
from paceline.runs.upkeep import NUM_ENDED_MAX, SHARED_S_MAX
from paceline.testing.fakes.backend import Fault, ListingFakeBackend
from runs.test_upkeep import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class _Sharing(ListingFakeBackend):
    """A backend that keeps the listing which its waiting reads."""

    def __init__(
        self, place: Place, listed_since: Callable[[float], list[InstanceHandle] | None]
    ) -> None:
        super().__init__(clock=place.clock, name="north")
        self._listed_since = listed_since

    def listed_since(self, since_s: float) -> list[InstanceHandle] | None:
        return self._listed_since(since_s)


def cleaning(place: Place, *backends: str) -> tuple[CleanUp, list[str]]:
    told: list[str] = []
    return CleanUp(place, backends, tell=told.append), told


def test_what_is_on_record_is_looked_at_first(place: Place) -> None:
    """Intents count: a backend is left for later only where nothing at all is open."""
    place.rent("run-1", "north")
    alive = place.rental.machines()
    assert split(("south", "north", "south"), alive) == (["north"], ["south"])
    assert split(("south",), alive) == ([], ["south"])
    assert split(("north", "south"), ()) == ([], ["north", "south"])


def test_a_backend_on_record_is_cleaned_before_anything_is_rented(place: Place) -> None:
    """Its machine is gone when `begin` returns; the other backend has not been asked."""
    ours = place.rent("run-1", "north")
    clean, told = cleaning(place, "north", "south")
    clean.begin()
    assert place.bills() == set()
    assert told == [f"ending {ours}, left by a run that nobody drives"]
    assert place.south.calls == []
    clean.finish()
    assert place.south.calls == ["list_instances"]


def test_the_rest_is_listed_once_and_after_the_order(place: Place) -> None:
    """Nothing is asked before the first event; ten more events ask nothing more."""
    clean, _ = cleaning(place, "north", "south")
    clean.begin()
    assert (place.north.calls, place.south.calls) == ([], [])
    for event in ("machine.provisioned", *["attempt.failed"] * 10):
        clean.heard(event)
    clean.finish()
    assert (place.north.calls, place.south.calls) == (["list_instances"],) * 2


def test_a_command_that_orders_nothing_looks_all_the_same(place: Place) -> None:
    """Nobody agreed, or nothing was to be had: the listing is read at the end."""
    clean, _ = cleaning(place, "north")
    clean.begin()
    clean.finish()
    assert place.north.calls == ["list_instances"]


def test_a_record_that_was_wrong_is_found_and_its_machine_ended(place: Place) -> None:
    """A machine that was written off and is listed comes back on record, and goes."""
    label = place.rent("run-1", "north")
    [machine] = place.rental.machines()
    place.rental._parts.end(machine, MachineState.GONE)  # a record that is wrong
    clean, told = cleaning(place, "north")
    clean.begin()
    assert place.bills() == {label}
    clean.heard("machine.provisioned")
    clean.finish()
    assert place.bills() == set()
    assert told == [f"ending {label}, left by a run that nobody drives"]


def test_what_cannot_be_ended_late_is_said(place: Place) -> None:
    """It stays on record, so the next command looks there first."""
    place.rent("run-1", "north")
    [machine] = place.rental.machines()
    place.rental._parts.end(machine, MachineState.GONE)  # a record that is wrong
    place.north.faults = [Fault.IGNORED_TEARDOWN] * 50
    clean, told = cleaning(place, "north")
    clean.begin()
    clean.finish()
    assert "may still exist" in told[-1]
    assert split(["north"], place.rental.machines()) == (["north"], [])


def test_too_many_at_once_stop_a_command_before_it_rents(place: Place) -> None:
    """As before: that many left-overs are more likely a mistake of ours."""
    for number in range(NUM_ENDED_MAX + 1):
        place.rent(f"run-{number}", "north")
    clean, _ = cleaning(place, "north")
    with pytest.raises(UsageError, match="nothing was ended"):
        clean.begin()
    assert len(place.bills()) == NUM_ENDED_MAX + 1


def test_a_listing_that_others_read_is_enough(place: Place) -> None:
    """A backend that keeps the listing its waiting reads is not asked for another."""
    read = Event()

    def listed_since(since_s: float) -> list[InstanceHandle] | None:
        assert since_s == begun_s
        read.set()
        return []

    begun_s = place.clock.monotonic()
    place.north = _Sharing(place, listed_since)
    clean, _ = cleaning(place, "north")
    clean.begin()
    clean.heard("machine.provisioned")
    clean.finish()
    assert read.is_set()
    assert place.north.calls == []


def test_without_such_a_listing_one_is_read(place: Place) -> None:
    """The wait for it has an end."""
    place.north = _Sharing(place, lambda _since_s: None)
    clean, _ = cleaning(place, "north")
    clean.begin()
    clean.heard("attempt.failed")
    clean.finish()
    assert place.north.calls == ["list_instances"]
    assert place.clock.monotonic() >= SHARED_S_MAX


def test_where_nothing_is_ordered_nobody_waits_for_others_listing(place: Place) -> None:
    """Every key is refused, or nothing fits: there will be no listing but ours."""
    place.north = _Sharing(place, lambda _since_s: None)
    clean, _ = cleaning(place, "north")
    clean.begin()
    clean.finish()
    assert place.north.calls == ["list_instances"]
    assert place.clock.monotonic() < SHARED_S_MAX


def test_a_bug_in_the_thread_is_raised(place: Place) -> None:
    """Nothing is swallowed because it happened beside the run."""

    def broken(_since_s: float) -> list[InstanceHandle] | None:
        raise ZeroDivisionError

    place.north = _Sharing(place, broken)
    clean, _ = cleaning(place, "north")
    clean.begin()
    clean.heard("machine.provisioned")
    with pytest.raises(ZeroDivisionError):
        clean.finish()


def test_whoever_stops_before_anything_is_ordered_waits_for_nothing(place: Place) -> None:
    """A provider that hangs would hold Ctrl-C up; once something is ordered it is looked at."""
    clean, told = cleaning(place, "north")
    clean.begin()
    clean.finish(is_stopped=True)
    assert (place.north.calls, told) == ([], [])
    clean.heard("machine.provisioned")
    clean.finish(is_stopped=True)
    assert place.north.calls == ["list_instances"]


def test_what_takes_long_is_said(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a listing is told so, and what Ctrl-C does."""
    told_of = Event()

    def listed_since(since_s: float) -> list[InstanceHandle] | None:
        told_of.wait(60)
        return []

    monkeypatch.setattr("paceline.runs.cleaning.PATIENCE_S", 0.01)
    place.north = _Sharing(place, listed_since)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        told_of.set()

    clean = CleanUp(place, ["north"], tell=tell)
    clean.begin()
    clean.heard("machine.provisioned")
    clean.finish()
    assert told == ["north: looking for what runs left behind; Ctrl-C leaves it to gc"]


def test_a_backend_that_is_not_there_holds_up_no_other(place: Place) -> None:
    """Its extra is missing now, or a setting is wrong: its machine is named, the rest ends."""
    theirs, ours = place.rent("run-1", "south"), place.rent("run-2", "north")
    place.missing.add("south")
    clean, told = cleaning(place, "north")
    clean.begin()
    clean.finish()
    assert place.bills() == {theirs}
    assert f"ending {ours}, left by a run that nobody drives" in told
    assert any("south: pip install" in text for text in told)
    assert [one.label for one in place.rental.machines()] == [theirs]


def test_who_gave_no_answer_just_now_is_not_asked_again(place: Place) -> None:
    """A search has waited for it already, and nothing of it is on record."""
    place.rental.heard("north", NoAnswerError("refused", was_sent=False))
    clean, told = cleaning(place, "north", "south")
    clean.begin()
    clean.finish()
    assert (place.north.calls, place.south.calls) == ([], ["list_instances"])
    assert told == []
