"""What the rollout client does beyond asking: streams, second engines, preferences, room."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import DeadlineExceededError
from paceline.core.retry import RetryPolicy
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.errors import ControlUnavailableError, StaleVersionError
from paceline.refit.generators.protocol import (
    InstalledVersion,
    Sampling,
    VersionSpan,
)
from paceline.refit.model import VersionChanges
from paceline.refit.rollouts import (
    AsyncRolloutClient,
    EngineFailedError,
    Fleet,
    FleetWatch,
    Piece,
    RolloutConfig,
    Want,
)
from paceline.refit.rollouts.resuming import Progress
from paceline.refit.rollouts.routing import choose_engine, may_hedge
from paceline.refit.rollouts.wire import parse_event
from paceline.store.memory import MemoryStore
from paceline.system import system_async_clock
from paceline.testing.clock import FakeAsyncClock, FakeClock
from refit.test_rollouts import SAMPLING, TOKEN, Served, client, report, served, two

__all__ = ["two"]

CONFIG = RolloutConfig(max_staleness=1, token=TOKEN, model_name="m")
V5 = InstalledVersion(version_id="v5", sequence=5, root_digest="aa")


@contextmanager
def impostor(*bodies: bytes, worker_id: str = "0-bad") -> Iterator[Any]:
    """Something that accepts and sends whatever it was given, then hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for body in bodies:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(body)

        thread = threading.Thread(target=run)
        thread.start()
        yield report(worker_id, f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(20)


def piece_line(*tokens: int, finish: str | None = None, start: int = 0, text: str = "") -> bytes:
    span = {"version_id": "v5", "sequence": 5, "root_digest": "aa"}
    choice = {
        "index": 0,
        "text": text,
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [-1.0] * len(tokens)},
        "finish_reason": finish,
        "weight_versions": [{**span, "start": start, "end": start + len(tokens)}],
    }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


class TestStream:
    def test_pieces(self, two: list[Served]) -> None:
        """Pieces joined are the choice, and the last says why it ended."""
        with client(two[0].report) as rollouts:
            pieces = list(rollouts.stream([1], Sampling(max_tokens=4)))
        expected = two[0].engine.generate([1], Sampling(max_tokens=4), V5).choices[0]
        assert tuple(t for piece in pieces for t in piece.token_ids) == expected.token_ids
        assert pieces[-1].finish_reason == "length"

    def test_goes_on_elsewhere(self, two: list[Served]) -> None:
        """An engine that dies in the middle costs no token: the next one goes on behind them."""
        with (
            impostor(HEAD + piece_line(7, 8)) as broken,
            client(broken, two[1].report) as rollouts,
        ):
            pieces = list(rollouts.stream([1], Sampling(max_tokens=5, seed=3)))
        assert [t for piece in pieces for t in piece.token_ids][:2] == [7, 8]
        assert sum(len(piece.token_ids) for piece in pieces) == 5
        ((prompt, sampling),) = two[1].engine.requests
        assert prompt == (1, 7, 8)
        assert (sampling.max_tokens, sampling.seed) == (3, 5)
        assert pieces[-1].spans[-1].end == 5
        assert {piece.engine_id for piece in pieces} == {"0-bad", "b"}

    def test_leaving_early(self, two: list[Served]) -> None:
        """Whoever stops reading gives the engine back."""
        with client(two[0].report) as rollouts:
            stream = rollouts.stream([1], Sampling(max_tokens=4))
            next(stream)
            stream.close()  # type: ignore[attr-defined]  # a generator
            assert rollouts._client._roster._loads == {}

    def test_all_dead(self) -> None:
        """When every engine fails every time, the error is the last engine's."""
        with (
            client(report("a", "http://127.0.0.1:9"), retry=RetryPolicy(attempts=2)) as rollouts,
            pytest.raises(EngineFailedError, match="engine a"),
        ):
            list(rollouts.stream([1], SAMPLING))

    @pytest.mark.parametrize(
        "line",
        [
            "data: {",
            "data: []",
            'data: {"choices": [{}]}',
            'data: {"choices": 3}',
            "data: " + "[" * 50_000,
            piece_line(1, 2).decode().replace("[-1.0, -1.0]", "[-1.0]"),
            'data: {"error": {"type": "server_error", "message": "x"}}',
        ],
    )
    def test_bad_events(self, line: str) -> None:
        """An event that does not add up counts as a failure of its engine."""
        with pytest.raises(EngineFailedError, match="engine a"):
            parse_event(line, worker_id="a")

    def test_lines_without_tokens(self) -> None:
        """The end, comments and usage carry none."""
        for line in ("data: [DONE]", ": hello", "", 'data: {"choices": [], "usage": {}}'):
            assert parse_event(line, worker_id="a") is None


class TestProgress:
    def piece(self, text: str, *tokens: int, finish: str | None = None) -> Piece:
        span = VersionSpan(installed=V5, start=0, end=len(tokens))
        return Piece(
            token_ids=tokens,
            logprobs=(-1.0,) * len(tokens),
            text=text,
            spans=(span,),
            finish_reason=finish,
            engine_id="a",
        )

    def test_a_stop_across_a_break(self) -> None:
        """A stop text that began at one engine and ends at the next still ends the choice."""
        progress = Progress(Want(prompt=(1,), sampling=Sampling(max_tokens=9, stop=("xyz",))))
        progress.next_want()
        progress.take(self.piece("abx", 5))
        progress.next_want()
        shown = progress.take(self.piece("yzq", 6))
        assert (shown.text, shown.finish_reason) == ("", "stop")
        assert progress.is_done

    def test_the_last_token_before_a_break(self) -> None:
        """A choice that had all its tokens when its engine died has ended."""
        progress = Progress(Want(prompt=(1,), sampling=Sampling(max_tokens=2)))
        progress.next_want()
        assert progress.take(self.piece("ab", 5, 6)).finish_reason == "length"
        assert progress.is_done


class TestHedging:
    def test_a_second_engine_answers(self, two: list[Served]) -> None:
        """A prompt that waits too long is asked elsewhere too; the first engine is let go."""
        two[0].engine.is_held = True
        with client(*(each.report for each in two), hedge_after_s=0.01, hedge_share=1) as rollouts:
            (choices,) = rollouts.complete([[1]], SAMPLING)
            assert {each.engine_id for each in choices} == {"b"}
            assert rollouts._client._roster._loads == {}

    def test_the_first_one_may_still_win(self, two: list[Served]) -> None:
        """When the second engine fails, the first one's answer counts."""
        with impostor(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", worker_id="z") as bad:
            two[0].engine.is_held = True
            answers: list[Any] = []

            def ask() -> None:
                reports = (two[0].report, bad)
                with client(*reports, hedge_after_s=0.01, hedge_share=1) as rollouts:
                    answers.extend(rollouts.complete([[1]], SAMPLING))

            thread = threading.Thread(target=ask)
            thread.start()
            while not two[0].engine.held:
                thread.join(0.01)
            sampling = SAMPLING.for_prompt(0)
            two[0].engine.held[0].set_result(two[0].engine.generate([1], sampling, V5))
            thread.join(20)
        assert {each.engine_id for each in answers[0]} == {"a"}

    @given(prompts=st.integers(0, 1000), share=st.floats(0, 1))
    def test_a_share_at_most(self, prompts: int, share: float) -> None:
        """However slow the fleet is, at most the share is asked twice, and one always may be."""
        config = replace(CONFIG, hedge_share=share)
        hedges = 0
        while may_hedge(hedges=hedges, prompts=prompts, config=config):
            hedges += 1
        assert hedges <= max(1, prompts * share + 1)
        assert hedges >= 1


class TestRouting:
    @given(
        prompts=st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), max_size=8),
        names=st.lists(st.sampled_from("abcdef"), min_size=2, unique=True),
    )
    def test_an_engine_that_goes_moves_only_its_own(
        self, prompts: list[list[int]], names: list[str]
    ) -> None:
        """Prompts that preferred another engine stay with it when one goes away."""
        fleet = Fleet(reports=tuple(report(name, "http://x") for name in names), newest=5)
        less = replace(fleet, reports=fleet.reports[1:])
        for prompt in prompts:
            want = Want(prompt=tuple(prompt), sampling=SAMPLING)
            before = choose_engine(fleet, {}, want=want, config=CONFIG)
            after = choose_engine(less, {}, want=want, config=CONFIG)
            assert before is not None
            assert after is not None
            assert before.worker_id in (names[0], after.worker_id)

    def test_preference_gives_way_to_load(self) -> None:
        """The preferred engine is taken while it has little more to do than the others."""
        fleet = Fleet(reports=(report("a", "http://x"), report("b", "http://x")), newest=5)
        want = Want(prompt=(1, 2, 3), sampling=SAMPLING)
        config = replace(CONFIG, affinity_slack=4)
        preferred = choose_engine(fleet, {}, want=want, config=config)
        assert preferred is not None
        same = {preferred.worker_id: 4}
        assert choose_engine(fleet, same, want=want, config=config) == preferred
        full = {preferred.worker_id: 5}
        assert choose_engine(fleet, full, want=want, config=config) != preferred

    def test_a_version_can_be_asked_for(self, two: list[Served]) -> None:
        """Only engines with that very version are asked, however old it is."""
        old = replace(two[1].report, version_id="v1", sequence=1)
        with client(two[0].report, old, newest=9) as rollouts:
            with pytest.raises(StaleVersionError, match="answered with version v5; only v1"):
                rollouts.complete([[1]], SAMPLING, version_id="v1")
            assert two[0].engine.requests == []
            with pytest.raises(DeadlineExceededError, match="v3 is wanted"):
                rollouts.complete([[1]], SAMPLING, version_id="v3")
            (choices,) = rollouts.complete([[1]], SAMPLING, version_id="v5")
        assert {each.engine_id for each in choices} == {"a"}


class TestRoom:
    def test_prompts_are_taken_as_there_is_room(self, two: list[Served]) -> None:
        """A source of prompts is read no faster than engines answer; answers come as they are."""
        taken: list[int] = []

        def prompts() -> Iterator[Sequence[int]]:
            for at in range(20):
                taken.append(at)
                yield [at]

        with client(two[0].report, parallel=2) as rollouts:
            answers = rollouts.complete_each(prompts(), SAMPLING)
            first, _ = next(answers)
            assert first in (0, 1)
            assert len(taken) <= 4
            rest = [at for at, _ in answers]
        assert sorted([first, *rest]) == list(range(20))

    def test_cancelling_frees_the_engines(self, two: list[Served]) -> None:
        """A caller that gives up leaves nothing running, here or there."""
        two[0].engine.is_held = True

        async def give_up() -> None:
            made = AsyncRolloutClient(
                CONFIG,
                fleet=lambda: Fleet(reports=(two[0].report,), newest=5),
                clock=system_async_clock(),
                chance=lambda: 0.5,
            )
            task = asyncio.create_task(made.complete([[1], [2]], SAMPLING))
            while len(two[0].engine.held) < 2:
                await system_async_clock().sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert made._roster._loads == {}
            while not all(each.cancelled() for each in two[0].engine.held):
                await system_async_clock().sleep(0.01)
            await made.close()

        asyncio.run(asyncio.wait_for(give_up(), 20))

    def test_closing_ends_waits(self) -> None:
        """A prompt that waits for an engine fails when the client is closed."""
        made = AsyncRolloutClient
        assert made is not None
        with client(engine_wait_s=1e9) as rollouts:
            failed = threading.Event()

            def ask() -> None:
                with pytest.raises(DeadlineExceededError):
                    rollouts.complete([[1]], SAMPLING)
                failed.set()

            thread = threading.Thread(target=ask)
            thread.start()
            while not rollouts._client._prompts:
                thread.join(0.01)
            rollouts.close()
            assert failed.wait(20)

    def test_an_engine_that_drips(self, two: list[Served]) -> None:
        """An answer that never ends costs a prompt one limit, then another engine answers."""
        slow = HEAD.replace(b"text/event-stream", b"application/json")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            stop = threading.Event()

            def drip() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(slow)
                    while not stop.wait(0.05):
                        try:
                            connection.sendall(b" ")
                        except OSError:
                            return

            thread = threading.Thread(target=drip)
            thread.start()
            dripping = report("0", f"http://127.0.0.1:{listener.getsockname()[1]}")
            with client(dripping, two[1].report, request_timeout_s=0.5) as rollouts:
                (choices,) = rollouts.complete([[1]], SAMPLING)
            stop.set()
            thread.join(20)
        assert {each.engine_id for each in choices} == {"b"}


class TestKilled:
    def test_under_load_no_request_is_lost(self) -> None:
        """An engine that goes away with requests in flight costs none of them."""
        with served("a") as first, served("b") as second:
            first.engine.is_held = True
            reports = [first.report, second.report]
            answers: list[Any] = []

            def ask() -> None:
                with client(*reports, parallel=16) as rollouts:
                    answers.extend(rollouts.complete([[at] for at in range(40)], SAMPLING))

            thread = threading.Thread(target=ask)
            thread.start()
            while len(first.engine.held) < 4:
                thread.join(0.01)
            first.server.close(timeout_s=20)
            thread.join(30)
        assert len(answers) == 40
        assert all(len(choices) == 2 for choices in answers)


class TestFleetWatch:
    def ledger(self) -> ControlLedger:
        return ControlLedger(MemoryStore(clock=FakeClock()), nonce=lambda: "n")

    def test_the_stream_is_believed_while_it_lives(self) -> None:
        """Versions come from the stream; when it breaks they are asked for again."""
        asked: list[str] = []
        ledger = self.ledger()

        class Counting:
            def __getattr__(self, name: str) -> Any:
                asked.append(name)
                return getattr(ledger, name)

        counting: Any = Counting()
        watch = FleetWatch(counting, model_name="m", run_id="r")
        watch.take(VersionChanges(revision=1, reset=True))
        assert watch() == Fleet(reports=(), newest=-1)
        assert asked == ["list_installed"]

    def test_a_broken_stream_is_opened_again(self) -> None:
        """A stream that breaks is opened where it was; one that ends ends the thread."""
        afters: list[int] = []
        done = threading.Event()

        class Watching:
            def watch_versions(
                self, model_name: str, *, run_id: str | None = None, after: int = 0
            ) -> Iterator[VersionChanges]:
                afters.append(after)
                if len(afters) == 1:
                    yield VersionChanges(revision=4)
                    raise ControlUnavailableError("broken")
                done.set()

        watch = FleetWatch(self.ledger(), model_name="m", run_id="r")
        watch.start(Watching())
        assert done.wait(20)
        assert afters == [0, 4]
        watch.close()


def test_fake_time_is_shared() -> None:
    """The clock of the loop and that of threads are one."""
    clock = FakeClock()
    asyncio.run(FakeAsyncClock(clock).sleep(3))
    assert clock.monotonic() == 3
