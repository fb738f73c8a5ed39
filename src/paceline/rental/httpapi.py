"""One provider's HTTP API: key, pacing, deadlines, typed errors, redaction, bounded decoding.

A call is made once. Only what does no harm when done twice is repeated, and each call says so
itself (`Effect`); a create never is. Every call has a connection of its own: on a kept one, a
create that meets the server's hang-up would be ambiguous for nothing, and the pace of these APIs
makes reuse worthless.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import cache
from ssl import SSLContext
from typing import Final, NoReturn

import httpx

from paceline.core.clock import Clock
from paceline.core.retry import RetryPolicy
from paceline.rental.answers import Refusal
from paceline.rental.errors import (
    AmbiguousError,
    ApiError,
    ApiFacts,
    AuthError,
    GarbageError,
    MissingKeyError,
    NoAnswerError,
    RateLimitError,
    RequestError,
)

HttpTransport = httpx.BaseTransport
"""What carries requests; a test hands in one that ends in a fake of the same process."""

ALL_CALLS: Final = "*"
"""The lane that every call of a provider goes through."""

_BODY_BYTES_MAX = 64 * 2**20  # 3000 offers of Vast are about 9 MB
_RETRY_AFTER_S_MAX = 60.0
_HOLD_S = 5.0
"""How long a lane rests after a 429 that does not say."""
_SAME_S = 1e-6
_SNIPPET_CHARS = 200
_REQUEST_ID_HEADERS = ("x-request-id", "x-amzn-requestid", "cf-ray")
_UNREACHABLE_S = 10.0
"""A read that reaches nobody for so long is not repeated: somebody may be waiting for it."""
_POLICY = RetryPolicy(attempts=4, first_delay_s=1.0, delay_s_max=20.0)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Effect(StrEnum):
    """What a call does to the provider, and so whether it may be repeated after a failure."""

    READ = "read"
    REPEATABLE = "repeatable"
    """A write that done twice is done once: a destroy, a stop, a label."""
    ONCE = "once"
    """A write that must not happen twice: never repeated here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one provider speaks: data for HttpApi."""

    backend: str
    judge: Callable[[int, object, str], Refusal | None]
    """Status, decoded body (None if it is not JSON), text -> what is wrong, or None."""
    intervals_s: Mapping[str, float] = field(default_factory=dict)
    """Lane -> least seconds between two calls in it; ALL_CALLS is for all of them."""
    bursts: Mapping[str, int] = field(default_factory=dict)
    """Lane -> how many calls may come at once after a rest, where a provider counts calls in a
    window; 1 where it measures the time between two."""
    policy: RetryPolicy = _POLICY
    open_lanes: frozenset[str] = frozenset()
    """Lanes whose calls are answered without a key as well."""
    timeout_s: float = 120.0
    """For one call with all its repetitions."""


class Pacer:
    """Keeps calls to one account apart; shared by all its clients in this process.

    A lane keeps when it will have rested enough for a whole burst; a call moves that on by one
    interval, and may go out once it is at most a burst less one away.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rested_at_s: dict[str, float] = {}
        self._latest_s: dict[str, float] = {}
        self._held_until_s: dict[str, float] = {}

    def reserve(
        self,
        intervals_s: Mapping[str, float],
        *,
        now_s: float,
        bursts: Mapping[str, int] | None = None,
        wait_s_max: float = float("inf"),
    ) -> float:
        """Return how long to wait for a place in these lanes, and take it if within the limit."""
        ahead_s = {
            lane: interval_s * ((bursts or {}).get(lane, 1) - 1)
            for lane, interval_s in intervals_s.items()
        }
        with self._lock:
            for lane in intervals_s:
                self._rested_at_s.setdefault(lane, now_s)
                if lane in self._held_until_s:
                    held_s = self._held_until_s.pop(lane) + ahead_s[lane]
                    self._rested_at_s[lane] = max(self._rested_at_s[lane], held_s)
            free_s = [self._rested_at_s[lane] - ahead_s[lane] for lane in intervals_s]
            at_s = max(now_s, *free_s)
            if at_s - now_s > wait_s_max:
                return at_s - now_s
            for lane, interval_s in intervals_s.items():
                self._rested_at_s[lane] = max(at_s, self._rested_at_s[lane]) + interval_s
                self._latest_s[lane] = at_s
            return at_s - now_s

    def arrived(self, intervals_s: Mapping[str, float], *, at_s: float, late_s: float) -> None:
        """Count from when a call was there, ``late_s`` after its place: the provider does so too.

        A new connection takes its time, and the next call may be quicker. At most one interval.
        """
        with self._lock:
            for lane, interval_s in intervals_s.items():
                if abs(self._latest_s[lane] - at_s) < _SAME_S:
                    self._rested_at_s[lane] += min(max(0.0, late_s), interval_s)

    def give_back(self, intervals_s: Mapping[str, float], *, at_s: float) -> None:
        """Give up the place at ``at_s``, for a call that never reached the provider.

        A place that others have been put behind already is lost: they would come too close.
        """
        with self._lock:
            for lane, interval_s in intervals_s.items():
                if abs(self._latest_s[lane] - at_s) < _SAME_S:
                    self._rested_at_s[lane] -= interval_s

    def hold(self, lane: str, *, until_s: float) -> None:
        """Let nothing through a lane before ``until_s``, and no burst right after it."""
        with self._lock:
            self._held_until_s[lane] = max(until_s, self._held_until_s.get(lane, until_s))


class Pacers:
    """One Pacer per name, made on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pacers: dict[str, Pacer] = {}

    def of(self, name: str) -> Pacer:
        """Return the pacer of ``name``, always the same."""
        with self._lock:
            return self._pacers.setdefault(name, Pacer())


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpParts:
    """The surroundings of a client."""

    clock: Clock
    chance: Callable[[], float]
    """A random number in [0, 1), for jitter."""
    pacers: Pacers = field(default_factory=Pacers)
    transport: HttpTransport | None = None
    """None: the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    method: str
    url: str
    lane: str
    params: Mapping[str, str]
    body: object

    @property
    def what(self) -> str:
        return f"{self.method} {httpx.URL(self.url).path}"


class HttpApi:
    """Calls one provider; ``key`` is asked for each call, so that a changed key is used at once."""

    def __init__(
        self, dialect: Dialect, *, base_url: str, key: Callable[[], str | None], parts: HttpParts
    ) -> None:
        self._dialect = dialect
        self._base_url = base_url.rstrip("/")
        self._key = key
        self._parts = parts
        self._pacer = parts.pacers.of(f"{dialect.backend} {self._base_url}")

    def __repr__(self) -> str:
        """Return what it talks to; never the key."""
        return f"HttpApi({self._dialect.backend!r}, base_url={self._base_url!r})"

    def call(
        self,
        method: str,
        path: str,
        *,
        effect: Effect,
        lane: str = ALL_CALLS,
        params: Mapping[str, str] | None = None,
        body: object = None,
    ) -> object:
        """Return the decoded answer, or None for an empty one.

        Raises:
            ApiError: one of its subclasses, which say what to do next.
        """
        url = path if path.startswith("http") else self._base_url + path
        request = _Request(method=method, url=url, lane=lane, params=params or {}, body=body)
        begun_s = self._parts.clock.monotonic()
        deadline_s = begun_s + self._dialect.timeout_s
        tries = 0
        while True:
            tries += 1
            try:
                return self._once(request, deadline_s=deadline_s)
            except (AmbiguousError, RateLimitError) as exc:
                delay_s = self._delay_s(exc, effect, tries)
                end_s = deadline_s
                if effect is Effect.READ and isinstance(exc, NoAnswerError) and not exc.was_sent:
                    end_s = min(deadline_s, begun_s + _UNREACHABLE_S)
                if delay_s is None or self._parts.clock.monotonic() + delay_s >= end_s:
                    raise
                self._parts.clock.sleep(delay_s)

    def text(self, path: str, *, lane: str = ALL_CALLS) -> str:
        """Return the body of a GET as it is; for logs. Never repeated."""
        url = path if path.startswith("http") else self._base_url + path
        request = _Request(method="GET", url=url, lane=lane, params={}, body=None)
        deadline_s = self._parts.clock.monotonic() + self._dialect.timeout_s
        response, content = self._exchange(request, deadline_s=deadline_s)
        text = content.decode("utf8", errors="replace")
        if response.status_code >= httpx.codes.BAD_REQUEST:
            self._refuse(request, response, _parse_json(content), text)
        return text

    def _once(self, request: _Request, *, deadline_s: float) -> object:
        response, content = self._exchange(request, deadline_s=deadline_s)
        status = response.status_code
        if not content.strip() and status < httpx.codes.MULTIPLE_CHOICES:
            return None
        document = _parse_json(content)
        text = content[: 4 * _SNIPPET_CHARS].decode("utf8", errors="replace")
        if status < httpx.codes.MULTIPLE_CHOICES and document is None:
            raise GarbageError(
                self._tell(request, response, f"answered {status} with no JSON: {_snip(text)}"),
                **_facts(response),
            )
        if status >= httpx.codes.MULTIPLE_CHOICES or self._dialect.judge(status, document, text):
            self._refuse(request, response, document, text)
        return document

    def _exchange(self, request: _Request, *, deadline_s: float) -> tuple[httpx.Response, bytes]:
        """Send once and read the whole body, within the deadline and bounded."""
        headers = self._headers(request)
        at_s = self._pace(request, deadline_s=deadline_s)
        left_s = deadline_s - self._parts.clock.monotonic()
        timeout = httpx.Timeout(max(0.1, min(left_s, 60.0)), connect=10.0)
        try:
            with (
                self._open(timeout) as client,
                client.stream(
                    request.method,
                    request.url,
                    params=dict(request.params) or None,
                    json=request.body,
                    headers=headers,
                ) as response,
            ):
                self._arrived(request, at_s=at_s)
                return response, self._read(request, response, deadline_s=deadline_s)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as exc:
            self._pacer.give_back(self._lanes(request), at_s=at_s)
            raise NoAnswerError(
                f"{self._dialect.backend}: {request.what}: cannot connect to {self._base_url}: "
                f"{self._clean(str(exc)) or type(exc).__name__}; check the network and the address",
                was_sent=False,
            ) from exc
        except httpx.HTTPError as exc:
            raise NoAnswerError(
                f"{self._dialect.backend}: {request.what}: the answer was lost "
                f"({type(exc).__name__} {self._clean(str(exc))}); {NoAnswerError.advice}",
                was_sent=True,
            ) from exc

    def _open(self, timeout: httpx.Timeout) -> httpx.Client:
        transport = self._parts.transport
        if transport is not None:
            return httpx.Client(transport=_Borrowed(transport), timeout=timeout, trust_env=False)
        is_local = httpx.URL(self._base_url).host in _LOOPBACK
        # A proxy of the environment is for the world, not for this computer.
        return httpx.Client(verify=_ssl_context(), timeout=timeout, trust_env=not is_local)

    def _read(self, request: _Request, response: httpx.Response, *, deadline_s: float) -> bytes:
        content = bytearray()
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > _BODY_BYTES_MAX:
                raise GarbageError(
                    self._tell(request, response, f"sent more than {_BODY_BYTES_MAX} bytes"),
                    **_facts(response),
                )
            if self._parts.clock.monotonic() > deadline_s:
                raise NoAnswerError(
                    self._tell(request, response, "its body came too slowly"),
                    was_sent=True,
                    **_facts(response),
                )
        return bytes(content)

    def _pace(self, request: _Request, *, deadline_s: float) -> float:
        """Wait for a place in the provider's pace, and return when it was."""
        now_s = self._parts.clock.monotonic()
        left_s = deadline_s - now_s
        wait_s = self._pacer.reserve(
            self._lanes(request), now_s=now_s, bursts=self._dialect.bursts, wait_s_max=left_s
        )
        if wait_s > left_s:
            raise RateLimitError(
                f"{self._dialect.backend}: {request.what}: the provider's pace leaves no room "
                f"before its deadline, the next place is in {wait_s:.0f} s; try again later",
                retry_after_s=wait_s,
            )
        self._parts.clock.sleep(wait_s)
        return now_s + wait_s

    def _arrived(self, request: _Request, *, at_s: float) -> None:
        """Keep to the pace as a provider sees it that measures the time between two calls."""
        bursts = self._dialect.bursts
        lanes = {lane: s for lane, s in self._lanes(request).items() if lane not in bursts}
        self._pacer.arrived(lanes, at_s=at_s, late_s=self._parts.clock.monotonic() - at_s)

    def _lanes(self, request: _Request) -> dict[str, float]:
        intervals_s = self._dialect.intervals_s
        return {lane: intervals_s.get(lane, 0.0) for lane in (ALL_CALLS, request.lane)}

    def _headers(self, request: _Request) -> dict[str, str]:
        """Return the headers of a call; the key goes to the provider alone, and never in clear."""
        headers = {"Accept": "application/json", "User-Agent": "paceline"}
        url = request.url
        if not self._is_ours(url):
            return headers
        key = self._key()
        if key is None and request.lane not in self._dialect.open_lanes:
            name = self._dialect.backend
            raise MissingKeyError(f"{name}: there is no key; {MissingKeyError.advice}")
        if key is None:
            return headers
        if httpx.URL(url).scheme != "https" and httpx.URL(url).host not in _LOOPBACK:
            raise AuthError(
                f"{self._dialect.backend}: {self._base_url} would carry the key in clear text; "
                "use an https address"
            )
        # The library below quotes an illegal value in its exception.
        if re.fullmatch(r"[!-~]{1,4096}", key) is None:
            raise AuthError(
                f"{self._dialect.backend}: the key holds blanks or other characters that no key "
                f"has; {AuthError.advice}"
            )
        return {**headers, "Authorization": f"Bearer {key}"}

    def _refuse(
        self, request: _Request, response: httpx.Response, document: object, text: str
    ) -> NoReturn:
        status = response.status_code
        refusal = self._dialect.judge(status, document, text) or Refusal(
            kind=RequestError, text=f"unexpected status {status}"
        )
        said = refusal.text or _snip(text) or "nothing"
        code = f" {refusal.code}" if refusal.code else ""
        message = self._tell(request, response, f"answered {status}{code}: {_snip(said)}")
        facts = _facts(response)
        facts["code"] = refusal.code
        facts["document"] = document
        facts["is_about_offer"] = refusal.is_about_offer
        if issubclass(refusal.kind, RateLimitError):
            after_s = _retry_after_s(response.headers, now_s=self._parts.clock.time())
            until_s = self._parts.clock.monotonic() + min(after_s or _HOLD_S, _RETRY_AFTER_S_MAX)
            self._pacer.hold(request.lane, until_s=until_s)
            pace_s = max(_HOLD_S, *self._lanes(request).values())
            message += f"; {refusal.kind.advice}"
            raise RateLimitError(message, retry_after_s=after_s, pace_s=pace_s, **facts)
        raise refusal.kind(f"{message}; {refusal.kind.advice}", **facts)

    def _is_ours(self, url: str) -> bool:
        """Return whether ``url`` is the provider's own: some answers name addresses elsewhere."""
        theirs, ours = httpx.URL(url), httpx.URL(self._base_url)
        return (theirs.scheme, theirs.netloc) == (ours.scheme, ours.netloc)

    def _delay_s(self, failure: ApiError, effect: Effect, tries: int) -> float | None:
        """Return how long to wait before a repetition, or None where there is none."""
        if effect is Effect.ONCE:
            return None
        delay_s = self._dialect.policy.delay_s(tries, chance=self._parts.chance())
        if delay_s is None or not isinstance(failure, RateLimitError):
            return delay_s
        if failure.retry_after_s is None:
            return delay_s  # the lane is held as well
        return failure.retry_after_s if failure.retry_after_s <= _RETRY_AFTER_S_MAX else None

    def _tell(self, request: _Request, response: httpx.Response, what: str) -> str:
        request_id = _request_id(response)
        suffix = f" (request {request_id})" if request_id else ""
        return self._clean(f"{self._dialect.backend}: {request.what} {what}{suffix}")

    def _clean(self, text: str) -> str:
        """Return ``text`` without the key, in case the provider or a library quotes it."""
        key = self._key()
        return text.replace(key, "<key>") if key else text


class _Borrowed(httpx.BaseTransport):
    """A transport that outlives the client of one call."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._inner.handle_request(request)


@cache
def _ssl_context() -> SSLContext:
    return httpx.create_ssl_context()


def _parse_json(content: bytes) -> object:
    """Return what ``content`` says in JSON, or None: a page, half a body, NaN, bottomless nesting.

    The word null reads as None too; no provider answers so.
    """
    try:
        found: object = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _snip(text: str) -> str:
    """Return the words of ``text``, without the tags of a page, in one bounded line."""
    bare = re.sub(r"<(?:script|style)\b.*?</|<[^<>]*>", " ", text, flags=re.DOTALL)
    line = " ".join("".join(char if char.isprintable() else " " for char in bare).split())
    return line if len(line) <= _SNIPPET_CHARS else line[: _SNIPPET_CHARS - 3] + "..."


def _request_id(response: httpx.Response) -> str | None:
    for name in _REQUEST_ID_HEADERS:
        if name in response.headers:
            return _snip(response.headers[name])[:80]
    return None


def _facts(response: httpx.Response) -> ApiFacts:
    return ApiFacts(status=response.status_code, request_id=_request_id(response))


def _retry_after_s(headers: Mapping[str, str], *, now_s: float) -> float | None:
    """Return how long the provider wants us to wait: seconds, a date, or a reset time.

    A date counts from the provider's own Date where that is there: clocks differ.
    """
    said = headers.get("Retry-After", "")
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", said.strip()):
        return float(said)
    then_s = _epoch_s(said)
    reset = headers.get("X-RateLimit-Reset", "").strip()
    if then_s is None and re.fullmatch(r"[0-9]{9,11}", reset):
        then_s = float(reset)
    if then_s is None:
        return None
    served_s = _epoch_s(headers.get("Date", ""))
    return max(0.0, then_s - (now_s if served_s is None else served_s))


def _epoch_s(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
