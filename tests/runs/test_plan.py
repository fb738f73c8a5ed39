"""What a run does next: the table of cases, and what holds in all of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ExitStatus
from paceline.rental import DeathCause
from paceline.rental.budget import Budget
from paceline.runs.model import Outcome, RestartMode, RoleKind, Slot
from paceline.runs.plan import (
    DELAY_S_MAX,
    FAST_EXITS_MAX,
    FAST_S,
    REPLACEMENTS_MAX,
    STEADY_S,
    Finish,
    Observation,
    Phase,
    Postpone,
    Retire,
    SlotView,
    Start,
    after_exit,
    after_loss,
    after_postpone,
    decide,
    delay_s,
    died_of,
)

TRAINER = SlotView(
    slot=Slot(role="trainer", index=0),
    kind=RoleKind.TRAINER,
    restart=RestartMode.NEVER,
    max_restarts=0,
    phase=Phase.RUNNING,
)
ROLLOUT = SlotView(
    slot=Slot(role="rollout", index=0),
    kind=RoleKind.ROLLOUT,
    restart=RestartMode.ON_FAILURE,
    max_restarts=2,
    phase=Phase.RUNNING,
)
TASK = replace(ROLLOUT, slot=Slot(role="task", index=0), kind=RoleKind.TASK)


def seen(*slots: SlotView, **more: object) -> Observation:
    return replace(Observation(now_s=100.0, slots=slots), **more)  # type: ignore[arg-type]


def ended(view: SlotView, code: int, **more: object) -> SlotView:
    return replace(view, phase=Phase.EXITED, code=code, **more)  # type: ignore[arg-type]


def test_nothing_to_do_while_all_run() -> None:
    """A run that goes well is left alone."""
    assert decide(seen(TRAINER, ROLLOUT)) == ()


@pytest.mark.parametrize(
    ("slots", "outcome", "says"),
    [
        ((ended(TRAINER, 0), ROLLOUT), Outcome.SUCCEEDED, "trainer-0 is done"),
        ((ended(TRAINER, 0), ended(ROLLOUT, 9)), Outcome.SUCCEEDED, "trainer-0 is done"),
        ((ended(TRAINER, 3), ROLLOUT), Outcome.FAILED, "trainer-0 exited with status 3"),
        ((ended(TRAINER, 137), ROLLOUT), Outcome.FAILED, "trainer-0 ended by signal 9"),
        ((replace(TRAINER, phase=Phase.LOST), ROLLOUT), Outcome.FAILED, "its machine is gone"),
        (
            (TRAINER, ended(ROLLOUT, 1, restarts=2)),
            Outcome.FAILED,
            "rollout-0 exited with status 1 after 2 restarts",
        ),
        ((ended(TASK, 0),), Outcome.SUCCEEDED, "all roles done"),
        ((replace(TASK, phase=Phase.DONE), ended(TASK, 0)), Outcome.SUCCEEDED, "all roles done"),
    ],
)
def test_what_ends_a_run(slots: tuple[SlotView, ...], outcome: Outcome, says: str) -> None:
    """The trainer's end, a role that has used up its restarts, and the end of all tasks."""
    (finish,) = decide(seen(*slots))
    assert isinstance(finish, Finish)
    assert (finish.outcome, says in finish.reason) == (outcome, True)


def test_a_rollout_that_died_is_started_again_on_its_machine() -> None:
    """A process that ended leaves its machine usable."""
    (action,) = decide(seen(TRAINER, ended(ROLLOUT, 137)))
    assert action == Postpone(
        slot=ROLLOUT.slot, delay_s=1.0, replace=False, reason="ended by signal 9"
    )


def test_a_rollout_whose_machine_is_lost_gets_another() -> None:
    """A machine that does not answer is replaced."""
    (action,) = decide(seen(TRAINER, replace(ROLLOUT, phase=Phase.LOST, replacements=1)))
    assert isinstance(action, Postpone)
    assert (action.replace, action.delay_s) == (True, 2.0)


def test_a_postponed_start_waits_for_its_time() -> None:
    """Backoff is kept, and what was lost is replaced when the time has come."""
    waiting = replace(ROLLOUT, phase=Phase.WAITING, due_s=101.0, machine_lost=True)
    assert decide(seen(TRAINER, waiting)) == ()
    assert decide(seen(TRAINER, waiting, now_s=101.0)) == (Start(slot=ROLLOUT.slot, replace=True),)


def test_a_rollout_that_ends_well_stays_ended() -> None:
    """on-failure means on failure."""
    assert decide(seen(TRAINER, ended(ROLLOUT, 0))) == (Retire(slot=ROLLOUT.slot),)


def test_a_signal_comes_before_everything() -> None:
    """Whoever asks for an end gets one, with the status that says so."""
    (finish,) = decide(seen(ended(TRAINER, 3), signal="SIGTERM"))
    assert isinstance(finish, Finish)
    assert (finish.status, finish.reason) == (ExitStatus.INTERRUPTED, "stopped by SIGTERM")


def test_the_hard_cap_ends_the_run() -> None:
    """Spending what was allowed is an end, with what to do about it."""
    budget = Budget(soft_usd=1.0, hard_usd=2.0)
    (finish,) = decide(seen(TRAINER, spent_usd=2.0, budget=budget))
    assert isinstance(finish, Finish)
    assert "raise budget.hard_usd" in finish.reason


VIEWS = st.builds(
    SlotView,
    slot=st.builds(Slot, role=st.sampled_from(["a", "b", "trainer"]), index=st.integers(0, 2)),
    kind=st.sampled_from(RoleKind),
    restart=st.sampled_from(RestartMode),
    max_restarts=st.integers(0, 4),
    phase=st.sampled_from(Phase),
    code=st.none() | st.integers(0, 255),
    restarts=st.integers(0, 4),
    replacements=st.integers(0, 25),
    fast_exits=st.integers(0, 6),
    cause=st.none() | st.sampled_from(DeathCause),
    due_s=st.floats(0, 200),
    machine_lost=st.booleans(),
)
OBSERVATIONS = st.builds(
    Observation,
    now_s=st.floats(0, 200),
    slots=st.lists(VIEWS, min_size=1, max_size=5, unique_by=lambda view: view.slot),
    signal=st.none() | st.sampled_from(["SIGINT", "SIGTERM"]),
    spent_usd=st.floats(0, 10),
    burn_dph=st.floats(0, 100),
    budget=st.none() | st.builds(Budget, soft_usd=st.just(1.0), hard_usd=st.floats(1, 9)),
    chance=st.floats(0, 0.999),
)


@given(OBSERVATIONS)
def test_rules_that_always_hold(observed: Observation) -> None:
    """A finish is alone; one action per slot; running slots are left alone; limits are kept."""
    actions = decide(observed)
    views = {view.slot: view for view in observed.slots}
    ends = [action for action in actions if isinstance(action, Finish)]
    if ends:
        assert len(actions) == 1
        failed = ends[0].outcome is not Outcome.SUCCEEDED
        assert failed == (ends[0].status is not ExitStatus.OK)
        return
    assert observed.signal is None
    touched = [action.slot for action in actions if not isinstance(action, Finish)]
    assert len(touched) == len(set(touched))
    for action in actions:
        assert not isinstance(action, Finish)
        view = views[action.slot]
        assert view.phase not in {Phase.RUNNING, Phase.DONE}
        if isinstance(action, Postpone):
            assert view.restart is not RestartMode.NEVER
            assert action.replace or view.restarts < view.max_restarts
            assert not action.replace or view.replacements < REPLACEMENTS_MAX
            assert action.replace == (view.phase is Phase.LOST)
        if isinstance(action, Start):
            assert view.due_s <= observed.now_s


@given(OBSERVATIONS)
def test_no_slot_is_forgotten(observed: Observation) -> None:
    """Unless the run ends, whatever ended or was lost is acted on in the same look."""
    actions = decide(observed)
    if not any(isinstance(action, Finish) for action in actions):
        acted = {action.slot for action in actions if not isinstance(action, Finish)}
        ended_now = {v.slot for v in observed.slots if v.phase in {Phase.EXITED, Phase.LOST}}
        assert ended_now <= acted


@given(st.integers(0, 10_000))
def test_delays_grow_up_to_a_limit(restarts: int) -> None:
    """Each wait is at least as long as the one before and never longer than the limit."""
    assert 0 < delay_s(restarts) <= delay_s(restarts + 1) <= DELAY_S_MAX


@given(st.integers(0, 10_000), st.floats(0, 0.999))
def test_chance_only_lengthens_a_delay_and_never_past_the_limit(times: int, chance: float) -> None:
    """Jitter spreads restarts and keeps both limits."""
    assert delay_s(times) <= delay_s(times, chance=chance) <= DELAY_S_MAX
    assert delay_s(times, chance=chance, max_s=300.0) <= 300.0


@pytest.mark.parametrize("cause", [None, *DeathCause])
def test_a_machine_that_died_is_replaced_whatever_it_died_of(cause: DeathCause | None) -> None:
    """A lost machine uses up no max_restarts, and the reason says what became of it."""
    worn_out = replace(ROLLOUT, restarts=2, phase=Phase.LOST, cause=cause)
    (action,) = decide(seen(TRAINER, worn_out))
    assert isinstance(action, Postpone)
    assert (action.replace, action.reason) == (True, f"its machine {died_of(cause)}")


def test_causes_are_told_apart_in_words() -> None:
    """Each cause that says something has words of its own."""
    words = {died_of(cause) for cause in DeathCause}
    assert len(words) == len(DeathCause)
    assert died_of(DeathCause.UNKNOWN) == died_of(None)


def test_a_market_in_which_no_machine_lasts_ends_the_run() -> None:
    """Replacing has a limit, counted in a row: one machine that lasted starts the count again."""
    lost = replace(ROLLOUT, replacements=REPLACEMENTS_MAX, phase=Phase.RUNNING, started_s=1000.0)
    (finish,) = decide(seen(TRAINER, after_loss(lost, DeathCause.OUTBID, now_s=1010.0)))
    assert isinstance(finish, Finish)
    assert f"as did {REPLACEMENTS_MAX} before it in a row" in finish.reason
    steady = after_loss(lost, DeathCause.OUTBID, now_s=1000.0 + STEADY_S)
    (action,) = decide(seen(TRAINER, steady))
    assert isinstance(action, Postpone)


def test_a_trainer_that_may_be_restarted_is() -> None:
    """A policy is a policy, also for the trainer: its process again, or another machine."""
    trainer = replace(TRAINER, restart=RestartMode.ON_FAILURE, max_restarts=1)
    (again,) = decide(seen(ended(trainer, 9), ROLLOUT))
    (other,) = decide(seen(replace(trainer, phase=Phase.LOST), ROLLOUT))
    assert isinstance(again, Postpone)
    assert isinstance(other, Postpone)
    assert (again.slot, again.replace, other.replace) == (TRAINER.slot, False, True)
    (finish,) = decide(seen(ended(trainer, 9, restarts=1), ROLLOUT))
    assert isinstance(finish, Finish)


def test_always_restarts_what_ended_well() -> None:
    """`always` means also after status 0, within max_restarts."""
    forever = replace(ROLLOUT, restart=RestartMode.ALWAYS)
    (action,) = decide(seen(TRAINER, ended(forever, 0)))
    assert isinstance(action, Postpone)


def test_a_crash_loop_is_told_from_a_failure() -> None:
    """Ends right after the start, again and again, stop the run whatever max_restarts says."""
    view = replace(ROLLOUT, max_restarts=1000, started_s=0.0)
    for _ in range(FAST_EXITS_MAX):
        (action,) = decide(seen(TRAINER, view)) or (None,)
        assert action is None
        view = after_exit(view, 1, now_s=view.started_s + FAST_S - 1)
        (action,) = decide(seen(TRAINER, view))
        if isinstance(action, Postpone):
            view = replace(after_postpone(view, action, now_s=0.0), phase=Phase.RUNNING)
    assert isinstance(action, Finish)
    assert f"{FAST_EXITS_MAX} times in a row right after its start" in action.reason
    assert action.slot == ROLLOUT.slot


def test_one_long_life_breaks_a_crash_loop() -> None:
    """Only ends in a row count."""
    view = replace(ROLLOUT, max_restarts=1000, fast_exits=FAST_EXITS_MAX - 1, started_s=0.0)
    (action,) = decide(seen(TRAINER, after_exit(view, 1, now_s=FAST_S)))
    assert isinstance(action, Postpone)


BUDGETS = st.builds(
    Budget, soft_usd=st.just(1.0), hard_usd=st.floats(1, 1000), grace_s=st.floats(0, 3600)
)


@given(BUDGETS, st.floats(0, 2000), st.floats(0, 500))
def test_what_is_spent_until_the_end_of_the_pulls_stays_below_the_cap(
    budget: Budget, spent_usd: float, burn_dph: float
) -> None:
    """The end begins so early that its own burn fits; past the cap nothing is pulled."""
    actions = decide(seen(TRAINER, spent_usd=spent_usd, burn_dph=burn_dph, budget=budget))
    if not actions:
        assert spent_usd < budget.hard_usd
        return
    (finish,) = actions
    assert isinstance(finish, Finish)
    assert finish.pull_s is not None
    burnt_usd = burn_dph * finish.pull_s / 3600
    assert finish.pull_s == 0 or spent_usd + burnt_usd <= budget.hard_usd * (1 + 1e-9)


@given(BUDGETS, st.floats(0.01, 500))
def test_the_grace_never_eats_a_small_budget(budget: Budget, burn_dph: float) -> None:
    """At least four fifths of a hard cap are there to be used."""
    spent_usd = 0.79 * budget.hard_usd
    assert decide(seen(TRAINER, spent_usd=spent_usd, burn_dph=burn_dph, budget=budget)) == ()
