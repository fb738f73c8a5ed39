"""The one provider client: what it repeats, how long it waits, what it says, what it hides."""

from collections.abc import Callable, Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental.answers import Refusal, is_success, kind_of
from paceline.rental.errors import (
    ApiError,
    AuthError,
    GarbageError,
    NoAnswerError,
    RateLimitError,
    RequestError,
    ServerError,
)
from paceline.rental.httpapi import Dialect, Effect, HttpApi, HttpParts, Pacer, Pacers
from paceline.testing.clock import FakeClock

_KEY = "sekrit-0123"


def _judge(status: int, document: object, text: str) -> Refusal | None:
    return None if is_success(status) else Refusal(kind=kind_of(status), text=text[:100])


class _World:
    """A client whose provider is a function."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self.clock = FakeClock()
        self.requests: list[httpx.Request] = []
        self.times_s: list[float] = []

        def record(request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            self.times_s.append(self.clock.monotonic())
            return answer(request)

        self.parts = HttpParts(
            clock=self.clock, chance=lambda: 0.0, transport=httpx.MockTransport(record)
        )
        self.api = self.client("https://api.example.com")

    def client(self, base_url: str, key: str | None = _KEY) -> HttpApi:
        dialect = Dialect(backend="acme", judge=_judge, intervals_s={"*": 1.0, "slow": 10.0})
        return HttpApi(dialect, base_url=base_url, key=lambda: key, parts=self.parts)


def _in_turn(*responses: httpx.Response) -> Callable[[httpx.Request], httpx.Response]:
    left: Iterator[httpx.Response] = iter(responses)
    return lambda _request: next(left)


def test_a_read_is_repeated_and_a_create_is_not() -> None:
    """The same trouble: a read comes through, a create is sent once."""
    world = _World(_in_turn(httpx.Response(502), httpx.Response(200, json={"a": 1})))
    assert world.api.call("GET", "/x", effect=Effect.READ) == {"a": 1}
    world = _World(lambda _request: httpx.Response(502))
    with pytest.raises(ServerError):
        world.api.call("POST", "/x", effect=Effect.ONCE, body={})
    assert len(world.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 409, 422])
def test_a_clear_no_is_not_repeated(status: int) -> None:
    """What was refused for a reason is asked once, whatever it was."""
    world = _World(lambda _request: httpx.Response(status, json={}))
    with pytest.raises(ApiError) as caught:
        world.api.call("GET", "/x", effect=Effect.READ)
    assert len(world.requests) == 1
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"Retry-After": "7"}, 7.0),
        (
            {
                "Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT",
                "Date": "Wed, 21 Oct 2026 07:28:00 GMT",
            },
            30.0,
        ),
        ({}, 5.0),
    ],
)
def test_the_providers_word_on_waiting_is_kept(headers: dict[str, str], wait_s: float) -> None:
    """Seconds, a date by the provider's own clock, or nothing: then a rest of its own."""
    world = _World(
        _in_turn(httpx.Response(429, headers=headers), httpx.Response(200, json={"a": 1}))
    )
    world.api.call("GET", "/x", effect=Effect.READ)
    assert world.times_s[1] - world.times_s[0] == pytest.approx(wait_s)


def test_a_long_rest_is_left_to_the_caller() -> None:
    """A daily quota is not waited for; the error says how long it would take."""
    world = _World(lambda _request: httpx.Response(429, headers={"Retry-After": "36000"}))
    with pytest.raises(RateLimitError) as caught:
        world.api.call("GET", "/x", effect=Effect.READ)
    assert caught.value.retry_after_s == 36000
    assert len(world.requests) == 1


def test_a_refused_create_holds_the_lane_for_the_next() -> None:
    """A 429 on a create is not repeated, and the next create comes late enough."""
    world = _World(
        _in_turn(httpx.Response(429, headers={"Retry-After": "20"}), httpx.Response(200, json={}))
    )
    with pytest.raises(RateLimitError):
        world.api.call("PUT", "/x", effect=Effect.ONCE, lane="slow")
    world.api.call("PUT", "/x", effect=Effect.ONCE, lane="slow")
    assert world.times_s[1] - world.times_s[0] >= 20


def test_two_clients_of_one_account_share_its_pace() -> None:
    """Limits are the account's, however many clients there are."""
    world = _World(lambda _request: httpx.Response(200, json={}))
    for api in (world.api, world.client("https://api.example.com/")) * 3:
        api.call("GET", "/x", effect=Effect.READ)
    gaps = [after - before for before, after in zip(world.times_s, world.times_s[1:], strict=False)]
    assert min(gaps) >= 1.0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 20)), max_size=30))
def test_calls_of_a_lane_are_never_too_close(calls: list[tuple[str, float]]) -> None:
    """However calls come in, what goes out in a lane is its interval apart, or more."""
    pacer, now_s = Pacer(), 0.0
    intervals_s = {"a": 2.0, "b": 5.0}
    sent: dict[str, float] = {}
    for lane, pause_s in calls:
        now_s += pause_s
        at_s = now_s + pacer.reserve({lane: intervals_s[lane]}, now_s=now_s)
        assert at_s >= sent.get(lane, -100.0) + intervals_s[lane] - 1e-9
        sent[lane] = at_s
    assert Pacers().of("x") is not Pacers().of("x")


@given(st.integers(1, 12), st.lists(st.floats(0, 30), max_size=80))
def test_a_burst_never_breaks_a_window(burst: int, pauses_s: list[float]) -> None:
    """However calls come in, no window sees more than a burst and what its length allows."""
    pacer, interval_s, now_s = Pacer(), 1.3, 0.0
    sent: list[float] = []
    for pause_s in pauses_s:
        now_s += pause_s
        wait_s = pacer.reserve({"*": interval_s}, now_s=now_s, bursts={"*": burst})
        sent.append(now_s + wait_s)
    for first, from_s in enumerate(sent):
        for last in range(first, len(sent)):
            allowed = burst + (sent[last] - from_s) / interval_s
            assert last - first + 1 <= allowed + 1e-6


def test_a_hold_ends_a_burst() -> None:
    """After a 429 nothing goes out until it may, and then one at a time."""
    pacer = Pacer()

    def wait_s(now_s: float) -> float:
        return pacer.reserve({"*": 1.0}, now_s=now_s, bursts={"*": 3})

    assert [wait_s(0.0) for _ in range(5)] == [0.0, 0.0, 0.0, 1.0, 2.0]
    pacer.hold("*", until_s=20.0)
    assert [wait_s(10.0) for _ in range(3)] == [10.0, 11.0, 12.0]
    assert [wait_s(100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "content",
    [b"<html>Bad Gateway</html>", b'{"a": ', b"NaN", b"\xff\xfe", b"[" * 100_000, b"9" * 5000],
)
def test_garbage_is_an_error_of_its_own(content: bytes) -> None:
    """A page, half a body, no JSON, bottomless nesting, endless digits."""
    world = _World(lambda _request: httpx.Response(200, content=content))
    with pytest.raises(GarbageError) as caught:
        world.api.call("GET", "/x", effect=Effect.ONCE)
    assert "<" not in str(caught.value)
    assert len(str(caught.value)) < 600


@given(st.binary(max_size=200), st.sampled_from([200, 201, 301, 404, 429, 500, 599]))
def test_any_answer_is_a_document_or_a_typed_error(content: bytes, status: int) -> None:
    """No bytes make anything but JSON, nothing, or an ApiError."""
    world = _World(lambda _request: httpx.Response(status, content=content))
    try:
        world.api.call("GET", "/x", effect=Effect.ONCE)
    except ApiError:
        return
    assert is_success(status)


def test_a_body_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a bound is not read."""
    monkeypatch.setattr("paceline.rental.httpapi._BODY_BYTES_MAX", 1000)
    world = _World(lambda _request: httpx.Response(200, content=b"x" * 1001))
    with pytest.raises(GarbageError, match="more than 1000"):
        world.api.call("GET", "/x", effect=Effect.ONCE)


def test_the_key_goes_to_the_provider_and_nowhere_else() -> None:
    """Not to an address that an answer names, not in clear text, not into any message."""
    world = _World(lambda _request: httpx.Response(500, text=f"who are you, {_KEY}?"))
    with pytest.raises(ServerError) as caught:
        world.api.call("GET", "/x", effect=Effect.ONCE)
    assert world.requests[-1].headers["Authorization"] == f"Bearer {_KEY}"
    assert _KEY not in repr(caught.value) + repr(world.api)
    with pytest.raises(ApiError):
        world.api.text("https://elsewhere.example.com/log")
    assert "Authorization" not in world.requests[-1].headers
    before = len(world.requests)
    with pytest.raises(AuthError, match="clear text"):
        world.client("http://api.example.com").call("GET", "/x", effect=Effect.READ)
    with pytest.raises(AuthError) as refused:
        world.client("https://api.example.com", key="a\nb").call("GET", "/x", effect=Effect.READ)
    assert "a\nb" not in str(refused.value)
    assert len(world.requests) == before


def test_a_redirect_is_not_followed() -> None:
    """A redirected POST would become a GET, so it is an error."""
    world = _World(lambda _request: httpx.Response(301, headers={"Location": "https://x.example"}))
    with pytest.raises(RequestError):
        world.api.call("POST", "/x", effect=Effect.ONCE)
    assert len(world.requests) == 1


def test_what_was_never_sent_is_told_apart() -> None:
    """Only a connection that was never made proves that nothing was done."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    def break_off(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset", request=request)

    for answer, was_sent in ((refuse, False), (break_off, True)):
        with pytest.raises(NoAnswerError) as caught:
            _World(answer).api.call("PUT", "/x", effect=Effect.ONCE)
        assert caught.value.was_sent is was_sent


def test_what_never_arrived_takes_no_place_in_the_pace() -> None:
    """Without a network a read in a slow lane gives up after its own pauses, not the lane's."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no such name", request=request)

    world = _World(refuse)
    with pytest.raises(NoAnswerError):
        world.api.call("GET", "/offers", effect=Effect.READ, lane="slow")
    assert len(world.times_s) > 1
    assert world.times_s[-1] < 10.0


def test_a_read_that_reaches_nobody_ends_soon_and_a_destroy_goes_on() -> None:
    """Where a connection takes ten seconds to fail somebody waits for an answer, or for an end."""

    def hang(request: httpx.Request) -> httpx.Response:
        world.clock.sleep(10.0)
        raise httpx.ConnectTimeout("timed out", request=request)

    for effect, num_tries in ((Effect.READ, 1), (Effect.REPEATABLE, 4)):
        world = _World(hang)
        with pytest.raises(NoAnswerError):
            world.api.call("GET", "/x", effect=effect)
        assert len(world.times_s) == num_tries


def test_a_place_is_not_given_back_from_under_others() -> None:
    """Who came after a call that failed keeps its distance to who comes next."""
    pacer = Pacer()
    assert pacer.reserve({"*": 6.0}, now_s=0.0) == 0.0
    assert pacer.reserve({"*": 6.0}, now_s=0.1) == pytest.approx(5.9)
    pacer.give_back({"*": 6.0}, at_s=0.0)
    assert pacer.reserve({"*": 6.0}, now_s=0.2) == pytest.approx(11.8)
    pacer.give_back({"*": 6.0}, at_s=12.0)
    assert pacer.reserve({"*": 6.0}, now_s=0.3) == pytest.approx(11.7)


def test_an_error_names_the_request() -> None:
    """The provider's own id of a request is in the message: support asks for it."""
    world = _World(
        lambda _request: httpx.Response(400, headers={"X-Request-Id": "req-77"}, json={})
    )
    with pytest.raises(RequestError, match="request req-77"):
        world.api.call("GET", "/x", effect=Effect.READ)
