"""A machine that is missed: preempted, outbid, offline, unhealthy and ended by somebody differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental.backends.protocol import BackendAdapter, SupportsDeathCause
from paceline.rental.backends.registry import load_backend
from paceline.rental.death import ENDS_OF_STATES, Death, Seen, bills, cause_of
from paceline.rental.lifecycle import MachineState
from paceline.rental.model import DeathCause, InstanceState, InstanceStatus


def seen(state: InstanceState | None, **facts: object) -> Seen:
    known: dict[str, object] = {
        "record": MachineState.RUNNING,
        "is_spot": False,
        "answers": False,
        "state": state,
    }
    return Seen(**(known | facts))  # type: ignore[arg-type]


def test_what_lives_or_was_ended_by_us_has_no_cause() -> None:
    """It answers, or its end was our own order."""
    assert cause_of(seen(InstanceState.RUNNING, answers=True)) is None
    assert cause_of(seen(None, answers=True)) is None
    assert cause_of(seen(InstanceState.DESTROYED, record=MachineState.ENDING)) is None


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (seen(InstanceState.DESTROYED), DeathCause.DESTROYED),
        (seen(InstanceState.DESTROYED, is_spot=True), DeathCause.PREEMPTED),
        (seen(InstanceState.STOPPED), DeathCause.STOPPED),
        (seen(InstanceState.STOPPED, is_spot=True), DeathCause.PREEMPTED),
        (seen(InstanceState.STOPPED, is_spot=True, told=DeathCause.OUTBID), DeathCause.OUTBID),
        (seen(InstanceState.UNKNOWN), DeathCause.HOST_LOST),
        (seen(InstanceState.RUNNING), DeathCause.HOST_LOST),
        (seen(InstanceState.LOADING), DeathCause.UNHEALTHY),
        (seen(None), DeathCause.UNKNOWN),
    ],
)
def test_states_alone_tell_some_causes(found: Seen, cause: DeathCause) -> None:
    """Where a backend says nothing more than one of the five states."""
    assert cause_of(found) is cause


@given(
    state=st.none() | st.sampled_from(InstanceState),
    record=st.sampled_from(MachineState),
    told=st.none() | st.sampled_from(DeathCause),
    is_spot=st.booleans(),
    answers=st.booleans(),
)
def test_the_table_is_total(
    state: InstanceState | None,
    record: MachineState,
    told: DeathCause | None,
    is_spot: bool,
    answers: bool,
) -> None:
    """Nothing raises, and what does not answer and was not ended by us always has a cause."""
    cause = cause_of(Seen(record=record, is_spot=is_spot, answers=answers, state=state, told=told))
    assert set(ENDS_OF_STATES) == set(InstanceState)
    if not answers and record is MachineState.RUNNING:
        assert cause is not None
    assert bills(state) is (state is not InstanceState.DESTROYED)


def test_what_follows_from_a_cause() -> None:
    """A lost host is avoided, a lost bid is nobody's failure."""
    lost = Death(label="m", cause=DeathCause.HOST_LOST, reason="", bills=True)
    outbid = Death(label="m", cause=DeathCause.OUTBID, reason="", bills=True)
    assert (lost.blames_host, lost.is_market) == (True, False)
    assert (outbid.blames_host, outbid.is_market) == (False, True)


STOPPED_FOR_GOOD = {"cur_state": "stopped", "intended_status": "stopped", "next_state": "stopped"}


@pytest.mark.parametrize(
    ("backend", "raw", "state", "is_spot", "cause"),
    [
        ("vast", STOPPED_FOR_GOOD, "stopped", True, DeathCause.OUTBID),
        ("vast", STOPPED_FOR_GOOD, "stopped", False, DeathCause.STOPPED),
        ("vast", {"actual_status": "offline"}, "unknown", False, DeathCause.HOST_LOST),
        ("vast", {"actual_status": "exited"}, "stopped", True, DeathCause.UNHEALTHY),
        ("vast", {}, "destroyed", True, DeathCause.DESTROYED),
        ("vast", {"actual_status": "frozen"}, "unknown", False, None),
        ("runpod", {"status": "EXITED"}, "stopped", False, DeathCause.STOPPED),
        ("runpod", {"status": "ERROR"}, "unknown", False, DeathCause.UNHEALTHY),
        ("runpod", {"status": "TERMINATED"}, "destroyed", False, DeathCause.DESTROYED),
        ("runpod", {"status": "NEW_WORD"}, "unknown", False, None),
        ("lambda", {"status": "preempted"}, "destroyed", False, DeathCause.PREEMPTED),
        ("lambda", {"status": "unhealthy"}, "unknown", False, DeathCause.UNHEALTHY),
        ("lambda", {"status": "terminating"}, "unknown", False, DeathCause.DESTROYED),
        ("nebius", {"status": {"state": "STOPPED"}}, "stopped", True, DeathCause.PREEMPTED),
        ("nebius", {"status": {"state": "STOPPED"}}, "stopped", False, DeathCause.STOPPED),
        ("nebius", {"status": {"state": "ERROR"}}, "unknown", True, DeathCause.UNHEALTHY),
        ("nebius", {}, "destroyed", False, DeathCause.DESTROYED),
    ],
)
def test_providers_words_tell_more(
    backend: str, raw: dict[str, object], state: str, *, is_spot: bool, cause: DeathCause | None
) -> None:
    """Each provider's own way to say it."""
    adapter: BackendAdapter = load_backend(backend)()
    assert isinstance(adapter, SupportsDeathCause)
    status = InstanceStatus(state, "", 0, None, None, raw)
    assert adapter.death_cause(status, is_spot=is_spot) is cause
