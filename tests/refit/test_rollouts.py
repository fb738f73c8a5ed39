"""The rollout client against real servers on loopback, with engines that follow a rule."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import DeadlineExceededError, UsageError
from paceline.core.retry import RetryPolicy
from paceline.refit.errors import (
    AccessRefusedError,
    ControlUnavailableError,
    EngineNotReadyError,
    StaleVersionError,
)
from paceline.refit.generators.protocol import (
    EngineHealth,
    EngineState,
    InstalledVersion,
    Sampling,
)
from paceline.refit.model import (
    InstalledReport,
    VersionDescription,
    VersionRequest,
    WeightPayloadFormat,
    WorkerRegistration,
    WorkerRole,
)
from paceline.refit.rollouts import (
    EngineFailedError,
    Fleet,
    RolloutClient,
    RolloutConfig,
    Want,
    fleet_of,
)
from paceline.refit.rollouts.routing import choose_engine, explain_none
from paceline.refit.rollouts.wire import parse_choices
from paceline.refit.serving.app import ServingParts, build_app
from paceline.refit.serving.server import EngineServer
from paceline.refit.transports.routes import Routes
from paceline.system import system_clock
from paceline.testing.clock import FakeAsyncClock, FakeClock
from paceline.testing.fakes.control_plane import FakeControlPlane
from paceline.testing.fakes.generator import FakeGenerator

TOKEN = "data-token-of-a-test"  # noqa: S105
SAMPLING = Sampling(max_tokens=3, n=2, seed=0)


def label(sequence: int) -> InstalledVersion:
    return InstalledVersion(version_id=f"v{sequence}", sequence=sequence, root_digest="aa")


def report(worker_id: str, endpoint: str, **changes: object) -> InstalledReport:
    made = InstalledReport(
        worker_id=worker_id,
        model_name="m",
        endpoint=endpoint,
        version_id="v5",
        sequence=5,
        root_digest="aa",
        state="ready",
        installed_at_unix_ms=0,
        fetched_bytes=0,
        refit_ms=0,
        pause_ms=0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@dataclass
class Served:
    """An engine behind a server, and what it reports."""

    engine: FakeGenerator
    server: EngineServer
    report: InstalledReport
    health: EngineHealth


@contextmanager
def served(worker_id: str, *, sequence: int = 5) -> Iterator[Served]:
    engine = FakeGenerator()
    engine.at_safe_point(lambda: None, installed=label(sequence), timeout_s=1)
    server = EngineServer(host="127.0.0.1", port=0, clock=system_clock())
    health = EngineHealth(state=EngineState.READY, installed=label(sequence))
    made = Served(engine, server, report(worker_id, server.endpoint, sequence=sequence), health)
    app = build_app(
        ServingParts(
            engine=engine,
            model_name="m",
            token=TOKEN,
            health=lambda: made.health,
            figures=dict,
            clock=system_clock(),
            new_id=lambda: "x",
        )
    )
    server.start(app, grace_s=1)
    try:
        yield made
    finally:
        engine.close(timeout_s=1)
        server.close(timeout_s=20)


@pytest.fixture
def two() -> Iterator[list[Served]]:
    with ExitStack() as stack:
        yield [stack.enter_context(served(name)) for name in ("a", "b")]


@contextmanager
def client(*reports: InstalledReport, newest: int = 5, **changes: Any) -> Iterator[RolloutClient]:
    """Waits cost nothing: the clock jumps."""
    config = RolloutConfig(
        max_staleness=1, token=TOKEN, model_name="m", parallel=4, affinity_tokens=0
    )
    made = RolloutClient(
        replace(config, **changes),
        fleet=lambda: Fleet(reports=reports, newest=newest),
        clock=FakeAsyncClock(),
        chance=lambda: 0.5,
    )
    try:
        yield made
    finally:
        made.close()


class TestComplete:
    def test_answers_in_order(self, two: list[Served]) -> None:
        """Each prompt gets its n choices, in order, with tokens, log-probabilities and versions."""
        with client(*(each.report for each in two)) as rollouts:
            answers = rollouts.complete([[1], [2], [3]], SAMPLING)
        for at, choices in enumerate(answers):
            expected = two[0].engine.generate([at + 1], SAMPLING.for_prompt(at), label(5)).choices
            assert [each.token_ids for each in choices] == [each.token_ids for each in expected]
            assert [each.spans for each in choices] == [each.spans for each in expected]
            assert {each.prompt_token_ids for each in choices} == {(at + 1,)}
            assert {each.logprobs for each in choices} == {(-1.0, -1.0, -1.0)}

    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_shorter_way_is_tried_first(self, tmp_path: Path, is_there: bool) -> None:
        """By what the table says now; where nobody answers there, the told address is asked."""
        with served("a", sequence=5) as told, served("b", sequence=4) as other:
            way = urlsplit(other.report.endpoint).netloc if is_there else "127.0.0.1:1"
            table = tmp_path / "routes.json"
            table.write_text(json.dumps({urlsplit(told.report.endpoint).netloc: way}))
            with client(told.report, routes=Routes(table)) as rollouts:
                choices = rollouts.complete([[1]], SAMPLING)[0]
        found = {span.installed.sequence for each in choices for span in each.spans}
        assert found == {4 if is_there else 5}

    def test_load_is_spread(self, two: list[Served]) -> None:
        """With one prompt stuck at an engine, the next one goes to the other."""
        for each in two:
            each.engine.is_held = True
        done = threading.Event()

        def ask() -> None:
            with (
                client(*(each.report for each in two)) as rollouts,
                pytest.raises(EngineNotReadyError),
            ):
                rollouts.complete([[1], [2]], SAMPLING)
            done.set()

        thread = threading.Thread(target=ask)
        thread.start()
        while not all(each.engine.held for each in two):
            done.wait(0.01)
        assert [len(each.engine.held) for each in two] == [1, 1]
        for each in two:
            each.health = replace(each.health, state=EngineState.DRAINING)
            each.engine.close(timeout_s=1)
        thread.join(20)
        assert done.is_set()

    def test_one_dies(self, two: list[Served]) -> None:
        """Prompts at an engine that is gone are answered by the other one."""
        two[0].server.close(timeout_s=20)
        with client(*(each.report for each in two)) as rollouts:
            answers = rollouts.complete([[at] for at in range(8)], SAMPLING)
        assert {each.engine_id for choices in answers for each in choices} == {"b"}

    def test_one_breaks_off(self, two: list[Served]) -> None:
        """An engine that hangs up in the middle of an answer is replaced by the other one."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=break_off, args=(listener,))
            thread.start()
            broken = report("0-broken", f"http://127.0.0.1:{listener.getsockname()[1]}")
            with client(broken, two[1].report) as rollouts:
                (choices,) = rollouts.complete([[1]], SAMPLING)
            thread.join(20)
        assert choices[0].engine_id == "b"

    def test_busy_one_is_passed_over(self, two: list[Served]) -> None:
        """An engine that is not ready sends prompts on to the other one."""
        two[0].health = replace(two[0].health, state=EngineState.STALE)
        with client(*(each.report for each in two)) as rollouts:
            (choices,) = rollouts.complete([[1]], SAMPLING)
        assert choices[0].engine_id == "b"

    def test_all_dead(self) -> None:
        """When every engine fails every time, the error is the last engine's."""
        with (
            client(report("a", "http://127.0.0.1:9"), retry=RetryPolicy(attempts=2)) as rollouts,
            pytest.raises(EngineFailedError, match="engine a"),
        ):
            rollouts.complete([[1], [2]], SAMPLING)

    def test_refused_request(self, two: list[Served]) -> None:
        """A request that no engine can serve is not tried again."""
        with client(two[0].report, model_name="other") as rollouts, pytest.raises(UsageError):
            rollouts.complete([[1]], SAMPLING)
        assert two[0].engine.requests == []

    def test_wrong_token(self, two: list[Served]) -> None:
        """A wrong token is an access error that does not show the token."""
        with (
            client(two[0].report, token="wrong-token") as rollouts,  # noqa: S106
            pytest.raises(AccessRefusedError) as caught,
        ):
            rollouts.complete([[1]], SAMPLING)
        assert "wrong-token" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"max_staleness": -1}, {"parallel": 0}, {"poll_interval_s": 0}]
)
def test_config_is_checked(changes: dict[str, Any]) -> None:
    """A client that could never answer is not made."""
    with pytest.raises(UsageError), client(**changes):
        pass


class TestStaleness:
    def test_waits_for_a_fresh_one(self, two: list[Served]) -> None:
        """Without an engine that is new enough, the client waits, and says whom it waited for."""
        with (
            client(two[0].report, newest=7) as rollouts,
            pytest.raises(DeadlineExceededError, match="a is ready at sequence 5, at least 6"),
        ):
            rollouts.complete([[1]], SAMPLING)
        assert two[0].engine.requests == []

    def test_answer_is_checked(self) -> None:
        """An engine that reports new weights and answers with old ones is not believed."""
        with served("a", sequence=3) as old:
            boast = replace(old.report, sequence=5)
            with client(boast) as rollouts, pytest.raises(StaleVersionError, match="sequence 3"):
                rollouts.complete([[1]], SAMPLING)

    def test_staleness_is_told(self, two: list[Served]) -> None:
        """A completion says how far behind its oldest token's weights were."""
        with client(two[0].report, newest=6) as rollouts:
            (choices,) = rollouts.complete([[1]], SAMPLING)
        assert [each.staleness for each in choices] == [1, 1]

    def test_control_service_away(self, two: list[Served]) -> None:
        """While nobody can say who lives, the engines known before are asked."""
        answers = iter([Fleet(reports=(two[0].report,), newest=5)])

        def fleet() -> Fleet:
            known = next(answers, None)
            if known is None:
                raise ControlUnavailableError("down")
            return known

        clock = FakeClock()
        config = RolloutConfig(max_staleness=1, token=TOKEN, model_name="m")
        rollouts = RolloutClient(
            config, fleet=fleet, clock=FakeAsyncClock(clock), chance=lambda: 0.0
        )
        for prompt in ([1], [2]):
            assert rollouts.complete([prompt], SAMPLING)
            clock.advance(1)
        rollouts.close()


def break_off(listener: socket.socket) -> None:
    """Promise more than is sent, then hang up."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")


STATES = st.sampled_from([each.value for each in EngineState])


@given(
    reports=st.lists(
        st.builds(
            report,
            st.sampled_from("abcd"),
            st.sampled_from(["", "http://x"]),
            sequence=st.integers(-1, 5),
            state=STATES,
        ),
        unique_by=lambda each: each.worker_id,
    ),
    loads=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3)),
    avoided=st.frozensets(st.sampled_from("abcd")),
    newest=st.integers(-1, 6),
)
def test_choice(
    reports: list[InstalledReport], loads: dict[str, int], avoided: frozenset[str], newest: int
) -> None:
    """The chosen engine is fit, nobody fit has less to do, and None means nobody is fit."""
    fleet = Fleet(reports=tuple(reports), newest=newest)
    config = RolloutConfig(max_staleness=2, token=TOKEN, model_name="m")
    want = Want(prompt=(1, 2), sampling=SAMPLING)
    chosen = choose_engine(fleet, loads, want=want, config=config, avoided=avoided)
    fit = [
        each
        for each in reports
        if each.state == "ready"
        and each.endpoint
        and each.worker_id not in avoided
        and each.sequence >= 0
        and newest - each.sequence <= 2
    ]
    if chosen is None:
        assert not fit
        assert explain_none(fleet, avoided, want=want, config=config)
    else:
        assert chosen in fit
        assert loads.get(chosen.worker_id, 0) == min(loads.get(e.worker_id, 0) for e in fit)


GOOD = {
    "text": "",
    "finish_reason": "length",
    "token_ids": [1, 2],
    "logprobs": {"token_logprobs": [-1, -2]},
    "weight_versions": [
        {"version_id": "v", "sequence": 1, "root_digest": "a", "start": 0, "end": 1},
        {"version_id": "w", "sequence": 2, "root_digest": "b", "start": 1, "end": 2},
    ],
}


def test_good_answer() -> None:
    """A good answer is read."""
    (choice,) = parse_choices(json.dumps({"choices": [GOOD]}).encode(), worker_id="a")
    assert [span.installed.sequence for span in choice.spans] == [1, 2]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'{"choices": 3}',
        b'{"choices": [{}]}',
        b"[" * 100_000,
        json.dumps({"choices": [{**GOOD, "weight_versions": []}]}).encode(),
        json.dumps({"choices": [{**GOOD, "token_ids": [1, 2, 3]}]}).encode(),
        json.dumps({"choices": [{**GOOD, "logprobs": None}]}).encode(),
        json.dumps({"choices": [{**GOOD, "logprobs": {"token_logprobs": [1]}}]}).encode(),
    ],
)
def test_bad_answers(answer: bytes) -> None:
    """An answer that does not add up counts as a failure of its engine."""
    with pytest.raises(EngineFailedError, match="engine a"):
        parse_choices(answer, worker_id="a")


def test_engines_of_other_runs_are_no_part_of_the_fleet() -> None:
    """Two runs of one model share a control service; each gets tokens of its own weights only."""
    control = FakeControlPlane(clock=FakeClock())
    for worker_id, version_id in (("g-a", "a-000004"), ("g-b", "b-000000"), ("g-new", "")):
        control.register_worker(
            WorkerRegistration(worker_id=worker_id, role=WorkerRole.GENERATOR, model_name="m"),
            ttl_seconds=60,
        )
        control.report_installed(report(worker_id, "http://x", version_id=version_id))
    for run_id, uid in (("a", "a-000004"), ("b", "b-000000")):
        control.create_version(
            VersionRequest(
                uid=uid,
                model_name="m",
                idempotency_key=uid,
                payload_format=WeightPayloadFormat.FULL_TENSOR,
                expected_source_slots=("s",),
            )
        )
        control.describe_version(uid, description(run_id))
    found = fleet_of(control, model_name="m", run_id="b")()
    assert [each.worker_id for each in found.reports] == ["g-b", "g-new"]


def description(run_id: str) -> VersionDescription:
    return VersionDescription(
        run_id=run_id,
        sequence=0,
        step=0,
        root_digest="aa",
        parent_root=None,
        payload_bytes=1,
        full_bytes=1,
        changed_elements=1,
        total_elements=1,
    )
