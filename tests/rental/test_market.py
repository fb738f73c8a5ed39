"""Everybody is asked at once, and nobody's failure is anybody else's."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest

from paceline.core.errors import DeadlineExceededError, UsageError
from paceline.rental.drivers.parts import each_at_once
from paceline.rental.errors import (
    BackendError,
    HostKeyChangedError,
    NoOffersError,
    SshDeniedError,
    SshUnreachableError,
)
from paceline.rental.market import check_all, survey
from paceline.rental.model import (
    CredentialReport,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
)
from paceline.rental.waiting import DENIED_S_MAX, wait_running
from paceline.system import system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.backend import FakeBackend

ANY = OfferConstraints("h100-1x", min_disk_gb=1)


@dataclass(slots=True, kw_only=True)
class Scripted(FakeBackend):
    """A provider whose search does what the test says."""

    search: Callable[[], None] = lambda: None

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        self.search()
        return FakeBackend.search_offers(self, c)


@dataclass(slots=True, kw_only=True)
class Checked(FakeBackend):
    """A provider that knows its credentials."""

    report: CredentialReport

    def check(self) -> CredentialReport:
        return self.report


def fail(error: Exception) -> Callable[[], None]:
    def search() -> None:
        raise error

    return search


def test_offers_of_all_are_one_list_and_failures_are_notes() -> None:
    """Sorted by price over backends; a failure, a refusal and a bug cost only themselves."""
    clock = system_clock()
    backends = {
        "dear": Scripted(clock=clock, name="dear", dphs=(3.0, 1.5)),
        "cheap": Scripted(clock=clock, name="cheap", dphs=(2.0, 1.0)),
        "broken": Scripted(clock=clock, name="broken", search=fail(BackendError("status 500"))),
        "empty": Scripted(clock=clock, name="empty", search=fail(NoOffersError("sold out"))),
        "buggy": Scripted(clock=clock, name="buggy", search=fail(KeyError("price"))),
        "pricy": Scripted(clock=clock, name="pricy", dphs=(9.0,)),
    }
    found = survey(
        tuple(backends),
        OfferConstraints("h100-1x", min_disk_gb=1, max_dph=2.5),
        backend=backends.__getitem__,
        clock=clock,
        timeout_s=30,
    )
    assert [offer.dph for offer in found.offers] == [1.0, 1.5, 2.0]
    notes = {note.backend: (note.is_failure, note.message) for note in found.notes}
    assert notes["broken"] == (True, "status 500")
    assert notes["empty"] == (False, "sold out")
    assert notes["buggy"][0]
    assert "bug in the backend buggy" in notes["buggy"][1]
    assert notes["pricy"][0] is False
    assert set(found.wall_s) == set(backends)


def test_all_are_asked_at_the_same_time() -> None:
    """None can answer before all have been asked: asked in turn this would never end."""
    clock = system_clock()
    barrier = threading.Barrier(4, timeout=20)
    backends = {
        name: Scripted(clock=clock, name=name, search=lambda: (barrier.wait(), None)[1])
        for name in "abcd"
    }
    found = survey(tuple(backends), ANY, backend=backends.__getitem__, clock=clock, timeout_s=20)
    assert {offer.backend for offer in found.offers} == set(backends)


def test_one_that_hangs_is_left_behind_at_the_deadline() -> None:
    """Its name and the time it had are told; the others' offers are there."""
    clock = system_clock()
    gate = threading.Event()
    backends = {
        "hangs": Scripted(clock=clock, name="hangs", search=lambda: (gate.wait(20), None)[1]),
        "answers": Scripted(clock=clock, name="answers"),
    }
    try:
        found = survey(
            tuple(backends), ANY, backend=backends.__getitem__, clock=clock, timeout_s=0.3
        )
    finally:
        gate.set()
    assert {offer.backend for offer in found.offers} == {"answers"}
    assert [(note.backend, note.is_failure) for note in found.notes] == [("hangs", True)]
    assert "0.3 s" in found.notes[0].message


def test_a_target_that_is_none_is_refused_before_anybody_is_asked() -> None:
    """A bare a100 stands for two things."""
    with pytest.raises(UsageError, match="a100-40gb-1x"):
        survey(
            ("x",),
            OfferConstraints("a100-1x"),
            backend=fail_to_load,
            clock=system_clock(),
            timeout_s=1,
        )


def fail_to_load(name: str) -> FakeBackend:
    raise BackendError(f"{name}: not installed")


def test_checks_say_who_lets_us_in() -> None:
    """A report passes through; without the ability nothing is needed; a failure is advice."""
    clock = system_clock()
    report = CredentialReport(found_in="KEY", is_valid=False, advice="make another")
    backends = {"a": Checked(clock=clock, report=report), "b": FakeBackend(clock=clock)}
    found = dict(
        check_all(
            ("a", "b", "c"),
            backend=lambda name: backends[name] if name in backends else fail_to_load(name),
            clock=clock,
            timeout_s=10,
        )
    )
    assert found["a"] == report
    assert found["b"].is_valid
    assert (found["c"].is_valid, found["c"].advice) == (False, "not installed")


def running() -> InstanceStatus:
    return InstanceStatus(InstanceState.RUNNING.value, "", 1, None, None, {})


def refuse(error: Exception) -> Callable[[InstanceStatus], None]:
    """Return a probe that fails."""

    def probe(_status: InstanceStatus) -> None:
        raise error

    return probe


def test_running_is_not_enough_where_a_probe_is_given() -> None:
    """The machine has to answer itself, which may take longer than its provider says."""
    clock = FakeClock()

    def probe(status: InstanceStatus) -> None:
        assert status == running()
        if clock.monotonic() < 40:
            raise SshUnreachableError("refused")

    wait_running(running, clock=clock, timeout_s=60, probe=probe)
    assert 40 <= clock.monotonic() <= 45
    with pytest.raises(DeadlineExceededError, match="refused"):
        wait_running(
            running,
            clock=FakeClock(),
            timeout_s=60,
            probe=refuse(SshUnreachableError("refused")),
        )


def test_a_key_may_come_late_but_not_for_ever() -> None:
    """A refused key is waited for a while, and then said to be refused."""
    clock = FakeClock()
    with pytest.raises(SshDeniedError):
        wait_running(running, clock=clock, timeout_s=1200, probe=refuse(SshDeniedError("no")))
    assert DENIED_S_MAX < clock.monotonic() < DENIED_S_MAX + 20


def test_what_waiting_does_not_mend_is_raised_at_once() -> None:
    """Another host key, for one."""
    clock = FakeClock()
    with pytest.raises(HostKeyChangedError):
        wait_running(running, clock=clock, timeout_s=60, probe=refuse(HostKeyChangedError("x")))
    assert clock.monotonic() == 0


def test_the_state_directory_is_not_needed_for_a_look(tmp_path: Path) -> None:
    """Known hosts of an instance are one file each, whatever its id holds."""
    from paceline.rental.backends.defaults import default_parts

    path = default_parts().known_hosts("vast", "../../etc/passwd")
    assert path.parent.name == "known_hosts"


def test_who_stops_waiting_is_not_held_up_by_who_is_asked() -> None:
    """Ctrl-C in the middle: the thread that hangs is nobody's to wait for."""
    begun, done = Event(), Event()

    def ask(name: str) -> str:
        if name == "stop":
            begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        done.wait(60)
        return name

    with pytest.raises(KeyboardInterrupt):
        each_at_once(ask, ["stop", "hangs"])
    assert not done.is_set()
    done.set()
    assert each_at_once(str.upper, ["a", "b"]) == ["A", "B"]
