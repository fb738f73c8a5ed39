"""What a run may cost, has cost, and what its provider says of it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental.budget import (
    Budget,
    Level,
    PlannedRole,
    affordable_s,
    assess,
    refuse_attempt,
    refuse_plan,
    worst_case,
)
from paceline.rental.costs import By, cost_rows, stretches
from paceline.rental.lifecycle import MachineState
from paceline.rental.model import InstanceHandle, Offer, OfferConstraints
from paceline.rental.orchestrator import Orchestrator, RentRequest
from paceline.rental.records import Machine, RentedOffer
from paceline.rental.relaxing import nearest, objections, wide, wider_objections
from paceline.store.memory import MemoryStore
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.backend import FakeBackend

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


def machine(  # noqa: PLR0913 - what tests vary
    *,
    label: str = "m",
    role: str = "trainer",
    backend: str = "b",
    dph: float = 2.0,
    state: MachineState = MachineState.RUNNING,
    begun_s: float = NOON,
    ended_s: float | None = None,
) -> Machine:
    return Machine(
        label=label,
        run_id="r",
        role=role,
        index=0,
        backend=backend,
        offer=RentedOffer(id="o", gpu_name="g", num_gpus=1, dph=dph),
        state=state,
        intended_at=begun_s,
        instance=InstanceHandle(backend, "i", label, begun_s),
        ended_at=ended_s,
    )


CAPS = Budget(soft_usd=5.0, hard_usd=8.0)


@pytest.mark.parametrize(
    ("hours", "level"), [(1.0, Level.WITHIN), (2.5, Level.SOFT), (4.0, Level.HARD)]
)
def test_caps_have_levels(hours: float, level: Level) -> None:
    """Below the soft cap, above it, and at the hard one."""
    now = assess([machine()], now_s=NOON + 3600 * hours, caps=CAPS)
    assert (now.level, now.burn_dph) == (level, 2.0)
    assert now.hard_in_s == pytest.approx(max(0.0, 4.0 - hours) * 3600)


def test_what_is_not_proven_gone_burns() -> None:
    """An intent without an answer and a machine on its way out are paid for."""
    machines = [
        machine(state=MachineState.INTENDED),
        machine(state=MachineState.ENDING),
        machine(state=MachineState.GONE, ended_s=NOON + 3600),
        machine(state=MachineState.NEVER_CREATED, ended_s=NOON + 3600),
    ]
    now = assess(machines, now_s=NOON + 7200, caps=None)
    assert now.burn_dph == 4.0
    assert now.spent_usd == pytest.approx(4.0 + 4.0 + 2.0)
    assert (now.level, now.hard_in_s) == (Level.WITHIN, None)
    assert affordable_s(hard_usd=1.0, spent_usd=0.0, burn_dph=0.0) is None
    assert affordable_s(hard_usd=1.0, spent_usd=1.0, burn_dph=0.0) == 0.0


def test_an_attempt_has_to_be_paid_for_even_if_it_fails() -> None:
    """The boot at its longest, beside what burns already; and an hour of all of it."""
    now = assess([machine()], now_s=NOON + 3600, caps=CAPS)  # 2 spent, 2 an hour

    def refusal(dph: float, boot_s: float, hard_usd: float | None = 8.0) -> str | None:
        return refuse_attempt(dph=dph, boot_timeout_s=boot_s, hard_usd=hard_usd, now=now)

    assert refusal(2.0, 3600) is None
    assert "can cost 6.50 USD" in str(refusal(4.5, 3600))
    assert "more in an hour than the hard cap" in str(refusal(7.0, 60))
    assert refusal(100.0, 60, hard_usd=None) is None
    assert refusal(0.0, 1e9) is None


def role(dphs: Sequence[float], *, count: int = 1, boot_s: float = 600) -> PlannedRole:
    return PlannedRole(role="x", count=count, boot_timeout_s=boot_s, dphs=dphs)


def test_a_plan_that_the_cap_cannot_pay_for_is_refused() -> None:
    """For one hour, and until everything runs; what is said names what to change."""
    worst = worst_case([role([1.0, 4.0], count=2), role([3.0])])
    assert (worst.hourly_usd, worst.best_hourly_usd) == (11.0, 5.0)
    assert worst.startup_usd == pytest.approx(5.0 / 6)
    assert refuse_plan([role([1.0, 4.0], count=2), role([3.0])], CAPS) is None
    assert "does not pay for one hour" in str(refuse_plan([role([9.0])], CAPS))
    assert "starting may cost" in str(refuse_plan([role([7.0], boot_s=7200)], CAPS))
    assert refuse_plan([role([1000.0])], None) is None


@given(
    hours=st.floats(0, 200),
    begun=st.integers(0, 10**9),
    dph=st.sampled_from([0.0, 0.31, 12.5]),
    by=st.sampled_from(By),
)
def test_rows_add_up_to_the_cost(hours: float, begun: int, dph: float, by: By) -> None:
    """Whatever they are added up over, nothing is lost or doubled."""
    one = machine(dph=dph, begun_s=float(begun))
    now_s = begun + 3600 * hours
    rows = cost_rows([one], by, now_s=now_s)
    assert sum(row.usd for row in rows) == pytest.approx(one.cost_usd(now_s=now_s), abs=1e-6)
    assert sum(row.hours for row in rows) == pytest.approx(hours, abs=1e-6)


def test_days_are_cut_at_midnight() -> None:
    """UTC; a machine that was never made costs nothing on no day."""
    days = list(stretches(machine(), now_s=NOON + 36 * 3600))
    assert [(one.day, one.hours) for one in days] == [("2026-03-01", 12.0), ("2026-03-02", 24.0)]
    rows = cost_rows([machine(label="a"), machine(label="b")], By.ROLE, now_s=NOON + 3600)
    assert [(row.name, row.num_machines, row.usd) for row in rows] == [("r trainer", 2, 4.0)]
    never = machine(state=MachineState.NEVER_CREATED, ended_s=NOON)
    assert cost_rows([never], By.BACKEND, now_s=NOON + 3600) == []


class Billing(FakeBackend):
    """A provider that charges a start fee on top of the hour."""

    fee_usd: float | None = 0.5

    def actual_cost_usd(self, h: InstanceHandle) -> float | None:
        return None if self.fee_usd is None else self.fee_usd + self.bill_usd()


def test_what_was_billed_stands_beside_our_reckoning() -> None:
    """The difference is shown; a provider without an entry, or without books, is a note."""
    clock = FakeClock()
    books, plain = Billing(clock=clock, name="books"), FakeBackend(clock=clock, name="plain")
    nonces = iter("abc")
    rental = Orchestrator(
        store=MemoryStore(clock=clock),
        backend=lambda name: books if name == "books" else plain,
        clock=clock,
        nonce=lambda: next(nonces),
        notify=lambda _name, _fields: None,
    )
    for index, name in enumerate(("books", "plain")):
        rental.rent(
            RentRequest(
                run_id="r",
                role="x",
                index=index,
                gpu="g-1x",
                backends=(name,),
                min_disk_gb=1,
                max_dph=None,
                image="",
                ssh_pubkey_path=Path("k"),
            )
        )
    first, second = rental.billed("r")
    assert first.difference_usd == pytest.approx(0.5, abs=0.01)
    assert (second.theirs_usd, second.note) == (None, "plain does not tell")
    books.fee_usd = None
    assert rental.billed("r")[0].note.startswith("no entry yet")


# why an offer is not taken


def offer(number: int, dph: float, *, reliability: float = 0.99, mbps: float = 900.0) -> Offer:
    return Offer("v", f"o{number}", "g", 1, 24, dph, reliability, mbps, 500.0, "DE", {})


C = OfferConstraints("g-1x", min_disk_gb=100, max_dph=1.0)


def test_each_constraint_says_by_how_much_it_fails() -> None:
    """Reliability, speed, price; and what only the backend can know."""
    assert [one.text for one in wider_objections(offer(1, 0.5, reliability=0.91), C, 1)] == [
        "reliability 0.91 < 0.97"
    ]
    assert [one.text for one in wider_objections(offer(1, 0.5, mbps=90), C, 1)] == [
        "90 Mbit/s < 500 Mbit/s"
    ]
    assert [one.text for one in objections(offer(1, 1.5), C, 2)] == [
        "has 1 GPUs, 2 are asked for",
        "costs 1.5 $/h, the limit is 1.0 $/h",
    ]
    assert "not offered for what is asked" in wider_objections(offer(1, 0.5), C, 1)[0].text
    assert wide(C).max_dph is None


def test_the_nearest_relaxation_is_named_per_constraint() -> None:
    """Of those that fail one constraint alone: the least giving way that is worth something."""
    offers = [
        offer(1, 0.30, reliability=0.90),
        offer(2, 0.36, reliability=0.95),
        offer(3, 0.20, reliability=0.90, mbps=10),
        offer(4, 0.39, mbps=400),
        offer(5, 2.0),
    ]
    rejected = [(one, wider_objections(one, C, 1)) for one in offers]
    found = nearest(rejected, first_dph=0.40)
    assert [str(one) for one in found] == [
        "v o4 at 0.390 $/h (-0.010 $/h) with min_inet_mbps 400",
        "v o2 at 0.360 $/h (-0.040 $/h) with min_reliability 0.95",
    ]
    nothing = nearest(rejected, first_dph=None)
    assert "v o5 at 2.000 $/h with max_dph 2" in [str(one) for one in nothing]
