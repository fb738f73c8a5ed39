"""The plan that a person sees: alternatives, what cheaper was passed over, money, and patience."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from paceline.rental import (
    AllRefusedError,
    AuthError,
    BudgetError,
    NoAnswerError,
    NobodyAnsweredError,
    NoOffersError,
    Offer,
    OfferConstraints,
)
from paceline.rental.budget import Budget
from paceline.rental.orchestrator import Orchestrator
from paceline.runs.model import JobSpec, RoleKind, RoleSpec
from paceline.runs.offers import patient_rows, plan_rows, total_dph, waves, worst_of
from paceline.store.memory import MemoryStore
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.backend import FakeBackend


class Market(FakeBackend):
    """One good host for every three; the others are cheap and not reliable."""

    names_hosts = False

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        bad = [
            replace(one, id=f"cheap-{place}", dph=one.dph / 2, reliability=0.9 + place / 100)
            for place, one in enumerate(super().search_offers(c))
        ]
        good = super().search_offers(c)
        found = [one for one in (*bad, *good) if one.reliability >= c.min_reliability]
        return [replace(one, host=f"of {one.id}") for one in found] if self.names_hosts else found


@dataclass
class Desk:
    """Where plans are made."""

    clock: FakeClock = field(default_factory=FakeClock)
    ssh_pubkey_path: Path = Path("key.pub")

    def __post_init__(self) -> None:
        self.market = Market(clock=self.clock, dphs=(2.0, 3.0))
        self.rental = Orchestrator(
            store=MemoryStore(clock=self.clock),
            backend=lambda _name: self.market,
            clock=self.clock,
            nonce=lambda: "ab",
            notify=lambda _name, _fields: None,
        )


def job(hard_usd: float | None = 50.0) -> JobSpec:
    role = RoleSpec(
        name="rollout",
        kind=RoleKind.ROLLOUT,
        backends=("fake",),
        gpu="fake-1x",
        run="true",
        count=2,
        boot_timeout_s=600,
    )
    budget = None if hard_usd is None else Budget(soft_usd=1.0, hard_usd=hard_usd)
    return JobSpec(name="j", roles=(role,), budget=budget)


def test_a_row_says_what_else_there_is() -> None:
    """The first offer, the next, what was cheaper and why not, and what giving way would bring."""
    [row] = plan_rows(Desk(), job())
    assert (row.offer_id, row.dph) == ("fake-0", 2.0)
    assert [one.offer_id for one in row.alternatives] == ["fake-1"]
    assert row.passed_over == (
        "fake cheap-0 at 1.000 $/h: reliability 0.9 < 0.97",
        "fake cheap-1 at 1.500 $/h: reliability 0.91 < 0.97",
    )
    assert row.relaxations == ("fake cheap-1 at 1.500 $/h (-0.500 $/h) with min_reliability 0.91",)
    assert "planned" not in row.as_json()
    assert total_dph([row]) == 4.0
    assert worst_of([row]).hourly_usd == 6.0
    [short] = plan_rows(Desk(), job(), explain=False)
    assert short.passed_over == short.relaxations == ()


def test_an_offer_of_one_machine_is_planned_once() -> None:
    """The second machine takes the second offer; where there is none the plan says so, unrented."""
    desk = Desk()
    desk.market.names_hosts = True
    [row] = plan_rows(desk, job())
    assert (total_dph([row]), row.planned.firsts) == (5.0, (2.0, 3.0))
    three = replace(job(), roles=(replace(job().roles[0], count=3),))
    with pytest.raises(NoOffersError, match="3 machines of fake-1x are asked for and only 2"):
        plan_rows(desk, three)


def test_two_roles_do_not_plan_the_same_machine() -> None:
    """What the first takes is not the second's; where nothing is left the plan says so."""
    desk = Desk()
    desk.market.names_hosts = True
    one = replace(job().roles[0], count=1)
    two = replace(job(), roles=(one, replace(one, name="other")))
    first, second = plan_rows(desk, two)
    assert (first.dph, second.dph) == (2.0, 3.0)
    assert total_dph([first, second]) == 5.0
    three = replace(two, roles=(*two.roles, replace(one, name="third")))
    with pytest.raises(NoOffersError, match=r"role third: 1 machines .* no role above it takes"):
        plan_rows(desk, three)


def test_a_backend_that_is_down_is_asked_once_for_all_roles() -> None:
    """Also where roles are many: what the first finds out is what the others say."""
    desk = Desk()
    asked: list[str] = []

    def is_down(method: str) -> None:
        asked.append(method)
        raise NoAnswerError("fake: cannot connect", was_sent=False)

    desk.market.before_call = is_down
    one = job().roles[0]
    three = replace(job(), roles=tuple(replace(one, name=name) for name in "abc"))
    with pytest.raises(NobodyAnsweredError, match="role a: nobody could say"):
        plan_rows(desk, three)
    assert asked == ["search_offers"]


def test_roles_of_other_backends_are_asked_for_at_once() -> None:
    """Only a backend that is new to two of them makes one wait."""
    roles = [
        replace(job().roles[0], name=name, backends=tuple(backends))
        for name, backends in (("a", "v"), ("b", "vl"), ("c", "r"), ("d", "vr"), ("e", "l"))
    ]
    assert [[role.name for role in wave] for wave in waves(roles)] == [["a", "c", "e"], ["b", "d"]]


def test_a_plan_beyond_the_hard_cap_is_refused_before_anything_is_rented() -> None:
    """Two machines at two dollars are four an hour."""
    desk = Desk()
    with pytest.raises(BudgetError, match=r"the cheapest plan costs 4\.00 USD an hour"):
        plan_rows(desk, job(hard_usd=3.0))
    assert desk.market.instances == []
    plan_rows(desk, job(hard_usd=None))


def waiting(desk: Desk, retry_for_s: float | None) -> tuple[Callable[[], object], list[float]]:
    waits: list[float] = []

    def rows() -> object:
        return patient_rows(
            desk,
            job(),
            clock=desk.clock,
            retry_for_s=retry_for_s,
            tell=lambda _problem, wait_s: waits.append(wait_s),
            explain=True,
        )

    return rows, waits


def test_a_plan_is_waited_for_until_there_is_one() -> None:
    """Nothing is on sale for ten minutes; each wait is told."""
    desk = Desk()

    def sold_out(method: str) -> None:
        if desk.clock.monotonic() < 600:
            raise NoOffersError("fake: sold out")

    desk.market.before_call = sold_out
    rows, waits = waiting(desk, 3600.0)
    assert rows()
    assert len(waits) >= 4
    assert waits == sorted(waits)


def test_the_wait_for_a_plan_ends_at_its_deadline_or_at_once() -> None:
    """Without patience it is one look; a refused key is not waited for."""
    desk = Desk()

    def sold_out(method: str) -> None:
        raise NoOffersError("fake: sold out")

    desk.market.before_call = sold_out
    for patience_s in (None, 500.0):
        rows, _ = waiting(desk, patience_s)
        begun_s = desk.clock.monotonic()
        with pytest.raises(NoOffersError, match="sold out"):
            rows()
        assert desk.clock.monotonic() - begun_s <= (patience_s or 0.0)

    def refuse(method: str) -> None:
        raise AuthError("fake: status 401")

    desk.market.before_call = refuse
    rows, waits = waiting(desk, 500.0)
    with pytest.raises(AllRefusedError, match="401"):
        rows()
    assert waits == []
