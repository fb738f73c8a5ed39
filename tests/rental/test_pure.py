"""What rental decides without I/O: moves, targets, labels, records, plans."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError, UsageError
from paceline.rental.catalogue import GpuTarget, parse_target
from paceline.rental.errors import (
    AllRefusedError,
    AuthError,
    BackendError,
    IllegalMoveError,
    InstanceNotFoundError,
    NoAnswerError,
    NobodyAnsweredError,
    NoOffersError,
    NotProvenGoneError,
    ProvisionError,
    Silence,
    SshUnreachableError,
)
from paceline.rental.lifecycle import MOVES, OVER, MachineState, is_over, move
from paceline.rental.model import (
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
)
from paceline.rental.plan import (
    NUM_ATTEMPTS_MAX,
    BackendAnswer,
    Experience,
    NextStep,
    PastFailure,
    after_failure,
    nothing_to_try,
    plan_attempts,
    silence_of,
)
from paceline.rental.records import (
    Machine,
    RentedOffer,
    make_label,
    parse_machine,
    render_machine,
)
from paceline.rental.waiting import wait_gone, wait_running
from paceline.testing.clock import FakeClock

_states = st.sampled_from(MachineState)
_prices = st.sampled_from([0.0, 0.5, 1.0, 2.0])


@given(_states, _states)
def test_a_move_is_legal_or_raises(old: MachineState, new: MachineState) -> None:
    """The table alone decides, and it speaks of every state."""
    if new in MOVES[old]:
        assert move(old, new, label="m") is new
    else:
        with pytest.raises(IllegalMoveError, match=f"m is {old} and cannot become {new}"):
            move(old, new, label="m")


def test_every_state_is_reached_and_every_life_can_end() -> None:
    """From intended all states can be reached, and from each of them a state that is over."""
    reached = {MachineState.INTENDED}
    for _ in MachineState:
        reached |= {new for old in reached for new in MOVES[old]}
    assert reached == set(MachineState) == set(MOVES)
    for state in MachineState:
        ahead = {state}
        for _ in MachineState:
            ahead |= {new for old in ahead for new in MOVES[old]}
        assert ahead & OVER
    assert not is_over(MachineState.INTENDED)


@given(st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,5})?", fullmatch=True), st.integers(1, 9999))
def test_targets_round_trip(gpu: str, count: int) -> None:
    """A canonical token is read back as it was written."""
    target = GpuTarget(gpu=gpu, count=count)
    if gpu == "a100":
        with pytest.raises(UsageError, match="40 and with 80 GB"):
            parse_target(str(target))
    else:
        assert parse_target(str(target)) == target


@given(st.text(st.sampled_from("a1h0-x X8"), max_size=10))
def test_any_text_is_a_target_or_a_usage_error(text: str) -> None:
    """Parsing accepts exactly what it would itself write."""
    try:
        assert str(parse_target(text)) == text
    except UsageError:
        return


@pytest.mark.parametrize("text", ["a100", "h100", "H100-1x", "h100-0x", "h100-1", "-1x", "", "1x"])
def test_these_are_no_targets(text: str) -> None:
    """Bare names, zero, upper case and halves are refused with how it should be written."""
    with pytest.raises(UsageError):
        parse_target(text)


def test_which_a100_must_be_said() -> None:
    """The hint holds both tokens that would work, and they do."""
    with pytest.raises(UsageError, match="a100-40gb-2x or a100-80gb-2x"):
        parse_target("a100-2x")
    assert parse_target("a100-80gb-2x").count == 2


_offers = st.builds(
    Offer,
    backend=st.just("b"),
    id=st.sampled_from(["o1", "o2", "o3"]),
    gpu_name=st.just("g"),
    num_gpus=st.sampled_from([1, 2]),
    gpu_total_ram_gb=st.just(24),
    dph=_prices | st.just(float("nan")),
    reliability=st.sampled_from([0.9, 0.99]),
    inet_down_mbps=st.just(1.0),
    disk_space_gb=st.sampled_from([10.0, 1000.0]),
    geolocation=st.just(""),
    raw=st.just({}),
)
_answers = st.lists(
    st.builds(
        BackendAnswer,
        backend=st.just("b"),
        offers=st.lists(_offers, max_size=20).map(tuple),
        refusal=st.none() | st.just("closed"),
    ),
    max_size=3,
)


@given(_answers, st.none() | _prices, st.lists(st.sampled_from(["o1", "o2"]), max_size=2))
def test_a_plan_tries_what_fits_cheapest_first_and_explains_the_rest(
    answers: list[BackendAnswer], max_dph: float | None, failed: list[str]
) -> None:
    """Every offer is tried, fits and is in order of price, or is passed over with reasons."""
    failures = [PastFailure(backend="b", offer_id=id_, reason="no boot") for id_ in failed]
    c = OfferConstraints("g-1x", min_disk_gb=100, max_dph=max_dph)
    plan = plan_attempts(
        answers, constraints=c, num_gpus=1, experience=Experience(failures=failures)
    )
    prices = [offer.dph for offer in plan.attempts]
    assert prices == sorted(prices)
    assert len(prices) <= NUM_ATTEMPTS_MAX
    for offer in plan.attempts:
        assert offer.num_gpus == 1
        assert offer.disk_space_gb >= 100
        assert max_dph is None or offer.dph <= max_dph
        assert offer.id not in failed
    left = [one for one in plan.passed_over if one.offer_id is not None]
    assert len(plan.attempts) + len(left) == sum(len(answer.offers) for answer in answers)
    assert all(one.reasons and all(one.reasons) for one in plan.passed_over)
    silent = [one for one in plan.passed_over if one.offer_id is None]
    assert len(silent) == sum(not answer.offers for answer in answers)
    assert all(reason in plan.explain() for one in plan.passed_over for reason in one.reasons)


def offer(dph: float, *, backend: str = "b", reliability: float = 0.9) -> Offer:
    return Offer(
        backend, f"{backend}-{dph}-{reliability}", "g", 1, 24, dph, reliability, 1.0, 500.0, "", {}
    )


def test_equal_prices_go_by_backend_then_by_reliability() -> None:
    """The user's order of backends decides before the machine's record does."""
    answers = [
        BackendAnswer(backend="first", offers=(offer(1.0, backend="first"),)),
        BackendAnswer(
            backend="second",
            offers=(offer(1.0, backend="second"), offer(1.0, backend="second", reliability=0.99)),
        ),
    ]
    plan = plan_attempts(answers, constraints=OfferConstraints("g-1x"), num_gpus=1)
    assert [one.id for one in plan.attempts] == [
        "first-1.0-0.9",
        "second-1.0-0.99",
        "second-1.0-0.9",
    ]


def test_more_offers_than_are_tried_are_named() -> None:
    """Beyond the limit each offer is passed over because others come first."""
    answers = [BackendAnswer(backend="b", offers=tuple(offer(float(n)) for n in range(30)))]
    plan = plan_attempts(answers, constraints=OfferConstraints("g-1x"), num_gpus=1)
    assert [one.dph for one in plan.attempts] == list(range(NUM_ATTEMPTS_MAX))
    assert [one.reasons for one in plan.passed_over] == [("others come first",)] * 5


SAID = {
    Silence.NOTHING_FITS: NoOffersError("sold out"),
    Silence.REFUSED: AuthError("status 401"),
    Silence.UNREACHABLE: NoAnswerError("cannot connect", was_sent=False),
}


@pytest.mark.parametrize(
    ("silences", "kind", "words"),
    [
        ({Silence.NOTHING_FITS}, NoOffersError, ("nothing on offer fits", "sold out")),
        ({Silence.REFUSED}, AllRefusedError, ("every backend refuses us", "401")),
        ({Silence.UNREACHABLE}, NobodyAnsweredError, ("nobody could say", "cannot connect")),
        ({Silence.REFUSED, Silence.UNREACHABLE}, NobodyAnsweredError, ("401", "cannot connect")),
        (set(Silence), NoOffersError, ("sold out", "Without an answer: ", "401", "cannot")),
    ],
)
def test_that_nothing_fits_is_said_of_those_that_answered(
    silences: set[Silence], kind: type[NoOffersError], words: tuple[str, ...]
) -> None:
    """Who refuses us, and who cannot be reached, has not said what there is."""
    for silence, failure in SAID.items():
        assert silence_of(failure) is silence
    answers = [
        BackendAnswer(backend=one.value, refusal=str(SAID[one]), silence=one)
        for one in Silence
        if one in silences
    ]
    plan = plan_attempts(answers, constraints=OfferConstraints("g-1x"), num_gpus=1)
    error = nothing_to_try(plan, who="role r", gpu="g-1x")
    assert type(error) is kind
    assert all(word in str(error) for word in ("role r: ", *words))
    assert {one.silence for one in error.backends} == silences
    told = json.loads(json.dumps(error.details))["backends"]
    assert {one["backend"] for one in told} == {one.value for one in silences}


_HANDLE = InstanceHandle("b", "i-1", "label", 1.0)


@pytest.mark.parametrize(
    ("failure", "step"),
    [
        (NoOffersError("none"), NextStep.NEXT_OFFER),
        (ProvisionError("sold out"), NextStep.NEXT_OFFER),
        (ProvisionError("half", leaked=_HANDLE), NextStep.CLEAN_UP),
        (BackendError("500"), NextStep.LOOK_AND_STOP),
        (SshUnreachableError("?"), NextStep.LOOK_AND_STOP),
        (TimeoutError("?"), NextStep.LOOK_AND_STOP),
        (KeyError("bug"), NextStep.LOOK_AND_STOP),
    ],
)
def test_only_sure_failures_move_on(failure: Exception, step: NextStep) -> None:
    """Whatever may have created something is looked into before anything else is created."""
    assert after_failure(failure) is step


_names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
_machines = st.builds(
    Machine,
    label=st.text(),
    run_id=st.text(),
    role=st.text(),
    index=st.integers(),
    backend=st.just("b"),
    offer=st.builds(
        RentedOffer, id=st.text(), gpu_name=st.text(), num_gpus=st.integers(), dph=st.floats(0, 99)
    ),
    state=_states,
    intended_at=st.floats(0, 1e10),
    instance=st.none(),
    ended_at=st.none() | st.floats(0, 1e10),
)


@given(_machines, st.booleans(), st.text())
def test_machine_records_round_trip(machine: Machine, has_id: bool, instance_id: str) -> None:
    """What is stored is read back equal, with and without a known id."""
    if has_id:
        handle = InstanceHandle(machine.backend, instance_id, machine.label, 1.5)
        machine = Machine(
            **{name: getattr(machine, name) for name in machine.__slots__} | {"instance": handle}
        )
    else:
        with pytest.raises(NotProvenGoneError, match="paceline gc"):
            _ = machine.handle
    assert parse_machine(render_machine(machine)) == machine


@given(st.binary(max_size=20) | st.sampled_from([b"{}", b'{"schema": 2}', b'{"schema": 1}', b"[]"]))
def test_a_foreign_record_is_never_passed_over(content: bytes) -> None:
    """It may stand for something that bills, so it is an error that says where to look."""
    with pytest.raises(BackendError):
        parse_machine(content)


@given(_names, _names, st.integers(0, 999))
def test_labels_hold_what_they_are_made_of(run_id: str, role: str, index: int) -> None:
    """A label is ours by prefix, names run and role, and is legal on every provider."""
    label = make_label(run_id=run_id, role=role, index=index, nonce="abcd1234")
    assert label == f"paceline-{run_id}-{role}-{index}-abcd1234"
    assert label.replace("-", "").isalnum()


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a/b", "a" * 41, "\u00e9"])
def test_names_that_cannot_be_in_a_label_are_refused(name: str) -> None:
    """Run ids and roles alike, before anything is created."""
    with pytest.raises(UsageError, match="cannot be part"):
        make_label(run_id=name, role="r", index=0, nonce="n")
    with pytest.raises(UsageError, match="cannot be part"):
        make_label(run_id="r", role=name, index=0, nonce="n")


def status(state: str) -> InstanceStatus:
    return InstanceStatus(state, "g", 1, None, None, {})


@given(st.lists(st.sampled_from(["loading", "stopped", "unknown", "", "Weird"]), max_size=8))
def test_waiting_goes_on_through_every_state_but_two(states: list[str]) -> None:
    """Running ends the wait, destroyed is an error, all else is waited for."""
    for last in ("running", "destroyed"):
        clock: Clock = FakeClock()
        said = iter([*states, last])

        def ask(said: Iterator[str] = said) -> InstanceStatus:
            return status(next(said))

        if last == "running":
            wait_running(ask, clock=clock, timeout_s=1000)
        else:
            with pytest.raises(InstanceNotFoundError):
                wait_running(ask, clock=clock, timeout_s=1000)
        assert 0.25 * len(states) <= clock.monotonic() <= 5.0 * len(states)
        assert next(said, None) is None


def test_waiting_ends_at_its_deadline() -> None:
    """A machine that never boots is not waited for longer than was asked."""
    clock = FakeClock()
    with pytest.raises(DeadlineExceededError):
        wait_running(lambda: status("loading"), clock=clock, timeout_s=12)
    assert clock.monotonic() == 12.0


def test_what_is_on_its_way_out_is_looked_at_once_and_told_once() -> None:
    """A look costs a place in the provider's pace, and a second order is refused."""
    words = iter(["active", "terminating", "terminating", "terminated"])
    told: list[str] = []

    def ask() -> InstanceStatus:
        state = {"active": "running", "terminated": "destroyed"}
        word = next(words)
        return InstanceStatus(state.get(word, "unknown"), "g", 1, None, None, {"status": word})

    was_there = wait_gone(
        ask,
        destroy=lambda: told.append("go"),
        is_going=lambda seen: seen is not None and seen.raw["status"] == "terminating",
        clock=FakeClock(),
        timeout_s=60,
        what="m",
    )
    assert (was_there, told, list(words)) == (True, ["go"], [])


@given(st.text() | st.none() | st.integers())
def test_a_state_that_nobody_knows_is_unknown(text: object) -> None:
    """Reading a provider's word never raises."""
    state = InstanceState.parse(text)
    assert state == text or state is InstanceState.UNKNOWN
