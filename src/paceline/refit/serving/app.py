"""The routes: who may ask, whether the engine can answer now, and which status says so."""

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, UsageError
from paceline.refit.errors import (
    BadRequestError,
    EngineBusyError,
    EngineNotReadyError,
    GenerationError,
)
from paceline.refit.generators.protocol import (
    EngineHealth,
    EngineState,
    Generation,
    RolloutEngine,
    held_of,
    submit_stream,
)
from paceline.refit.serving.request import CompletionRequest, parse_completion_request
from paceline.refit.serving.response import (
    render_completion,
    render_error,
    render_installed,
    staleness_of,
)
from paceline.refit.serving.streaming import AbandonedError, PieceQueue, render_event
from paceline.telemetry.metrics import EngineMetrics

RETRY_AFTER_S = "1"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingParts:
    """What the routes are made of."""

    engine: RolloutEngine
    model_name: str
    token: str
    """The run's data token; a request without it is refused."""
    health: Callable[[], EngineHealth]
    figures: Callable[[], Mapping[str, float]]
    """Values of telemetry.metrics.GAUGES beside those of the engine itself."""
    clock: Clock
    new_id: Callable[[], str]
    newest: Callable[[], int] = lambda: -1
    """Highest sequence published, -1 while nobody knows; staleness counts from it."""
    body_bytes_max: int = 4 * 2**20
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.token:
            raise UsageError("a rollout engine is never served without a token")

    def __repr__(self) -> str:
        return f"ServingParts(model_name={self.model_name!r})"


class BodyTooLargeError(PacelineError):
    """A request's body is larger than this server reads."""


ANSWERS: dict[type[PacelineError], tuple[int, str, str]] = {
    BadRequestError: (400, "invalid_request_error", "refused"),
    BodyTooLargeError: (413, "invalid_request_error", "refused"),
    EngineBusyError: (429, "rate_limit_error", "busy"),
    GenerationError: (500, "server_error", "failed"),
    EngineNotReadyError: (503, "unavailable_error", "not_ready"),
    AbandonedError: (504, "timeout_error", "abandoned"),
}
"""Error -> status, the protocol's word for it, the word it is counted under."""


def build_app(parts: ServingParts) -> Starlette:
    """Return the ASGI application."""
    routes = _Routes(parts, EngineMetrics())
    return Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/metrics", routes.guarded(routes.metrics)),
            Route("/v1/models", routes.guarded(routes.models)),
            Route("/v1/completions", routes.guarded(routes.completions), methods=["POST"]),
        ]
    )


class _Routes:
    def __init__(self, parts: ServingParts, metrics: EngineMetrics) -> None:
        self._parts = parts
        self._metrics = metrics
        self._expected = f"Bearer {parts.token}".encode()
        self._started_at = int(parts.clock.time())

    def guarded(self, handler: Handler) -> Handler:
        """Let only those with the token through."""

        async def check(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                body = render_error("the token is missing or wrong", kind="authentication_error")
                return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
            return await handler(request)

        return check

    async def health(self, request: Request) -> Response:
        """Say what is served; open, because whoever restarts engines has no token."""
        health = self._parts.health()
        is_ready = health.state is EngineState.READY
        body: dict[str, object] = {"state": health.state.value, "reason": health.reason}
        if health.installed is not None:
            body |= render_installed(health.installed)
            body["staleness"] = max(0, self._parts.newest() - health.installed.sequence)
        if held := held_of(self._parts.engine):
            body["weights_held"] = held
        return JSONResponse(body, 200 if is_ready else 503)

    async def models(self, request: Request) -> Response:
        """List the one model."""
        entry = {
            "id": self._parts.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "paceline",
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def metrics(self, request: Request) -> Response:
        """Render the figures."""
        load, health = self._parts.engine.load(), self._parts.health()
        gauges = {
            "ready": float(health.state is EngineState.READY),
            "running_choices": load.running,
            "waiting_prompts": load.waiting,
            "installed_sequence": -1 if health.installed is None else health.installed.sequence,
            "staleness": self._behind(health),
            **self._parts.figures(),
        }
        return Response(self._metrics.render(gauges), media_type=EngineMetrics.media_type)

    async def completions(self, request: Request) -> Response:
        """Generate; every outcome becomes a status and is counted once."""
        began = self._parts.clock.monotonic()
        try:
            wanted = parse_completion_request(await self._read_body(request))
            self._check_admission(wanted)
            if wanted.is_stream:
                return await self._stream(wanted, began)
            response, outcome = await self._complete(wanted, request), "ok"
        except tuple(ANSWERS) as exc:
            status, _, outcome = ANSWERS[type(exc)]
            waits = {"Retry-After": RETRY_AFTER_S} if status in (429, 503) else None
            response = JSONResponse(_error_body(exc), status, waits)
        self._metrics.count_request(outcome, seconds=self._parts.clock.monotonic() - began)
        return response

    def _behind(self, health: EngineHealth) -> int:
        installed = health.installed
        return 0 if installed is None else max(0, self._parts.newest() - installed.sequence)

    def _check_admission(self, wanted: CompletionRequest) -> None:
        """Refuse what cannot be answered as wanted by the weights that are in.

        Raises:
            BadRequestError: another model is meant.
            EngineNotReadyError: the state forbids it, or the weights are too old.
        """
        if wanted.model not in (None, self._parts.model_name):
            raise BadRequestError("model", f"must be {self._parts.model_name!r} here")
        health = self._parts.health()
        if health.state is not EngineState.READY:
            raise EngineNotReadyError(f"the engine is {health.state.value}: {health.reason}")
        behind, limit = self._behind(health), wanted.max_staleness
        if limit is not None and behind > limit:
            raise EngineNotReadyError(
                f"the weights are {behind} versions behind, {limit} are allowed: wait, or ask "
                "another engine"
            )

    async def _complete(self, wanted: CompletionRequest, request: Request) -> Response:
        futures = await asyncio.to_thread(self._submit, wanted)
        generations = await self._wait(futures, request)
        newest = self._parts.newest()
        self._count(generations, newest=newest)
        document = render_completion(
            generations, head=self._head(), token_text=self._token_text(wanted), newest=newest
        )
        return JSONResponse(document)

    async def _stream(self, wanted: CompletionRequest, began: float) -> Response:
        """Answer with events; what can be refused is refused before the first one."""
        queue = PieceQueue(num_choices=wanted.sampling.n)
        futures = await asyncio.to_thread(self._submit, wanted, queue)

        def count(outcome: str) -> None:
            done = [f for f in futures if f.done() and not f.cancelled() and not f.exception()]
            self._count([each.result() for each in done], newest=self._parts.newest())
            self._metrics.count_request(outcome, seconds=self._parts.clock.monotonic() - began)

        events = queue.events(
            futures,
            head=self._head(),
            token_text=self._token_text(wanted),
            newest=self._parts.newest,
            wants_usage=wanted.wants_usage,
            timeout_s=self._parts.request_timeout_s,
        )
        return StreamingResponse(_counted(events, futures, count), media_type="text/event-stream")

    def _head(self) -> dict[str, object]:
        return {
            "id": f"cmpl-{self._parts.new_id()}",
            "created": int(self._parts.clock.time()),
            "model": self._parts.model_name,
        }

    def _token_text(self, wanted: CompletionRequest) -> Callable[[int], str] | None:
        engine = self._parts.engine
        return (lambda one: engine.decode([one])) if wanted.wants_logprobs else None

    def _count(self, generations: Sequence[Generation], *, newest: int) -> None:
        choices = [one for each in generations for one in each.choices]
        self._metrics.count_tokens(
            prompt=sum(len(each.prompt_token_ids) for each in generations),
            generated=sum(len(one.token_ids) for one in choices),
        )
        for one in choices:
            self._metrics.observe_staleness(staleness_of(one.spans, newest=newest))

    async def _read_body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > self._parts.body_bytes_max:
                    raise BodyTooLargeError(f"the body exceeds {self._parts.body_bytes_max} bytes")
        except ClientDisconnect as exc:
            raise AbandonedError("the client left while it was sending") from exc
        return bytes(body)

    def _submit(
        self, wanted: CompletionRequest, queue: PieceQueue | None = None
    ) -> list["Future[Generation]"]:
        """Queue every prompt, or none."""
        engine = self._parts.engine
        futures: list[Future[Generation]] = []
        try:
            for at, prompt in enumerate(wanted.prompts):
                token_ids = engine.encode(prompt) if isinstance(prompt, str) else prompt
                sampling = wanted.sampling.for_prompt(at)
                futures.append(
                    engine.submit(token_ids, sampling)
                    if queue is None
                    else submit_stream(engine, token_ids, sampling, queue.sink(at))
                )
        except BaseException:
            _cancel(futures)
            raise
        return futures

    async def _wait(
        self, futures: Sequence["Future[Generation]"], request: Request
    ) -> list[Generation]:
        """Return the generations; whatever else ends the wait frees their places."""
        work = asyncio.gather(*map(asyncio.wrap_future, futures))
        work.add_done_callback(_take_error)
        gone = asyncio.create_task(_disconnected(request))
        try:
            either: set[asyncio.Future[Any]] = {work, gone}
            await asyncio.wait(
                either,
                timeout=self._parts.request_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if work.done():
                return work.result()
            raise AbandonedError(
                "the client left" if gone.done() else "not done within the time for one request"
            )
        finally:
            gone.cancel()
            work.cancel()
            _cancel(futures)


def _error_body(exc: PacelineError) -> dict[str, object]:
    _, kind, _ = ANSWERS[type(exc)]
    return render_error(
        str(exc), kind=kind, field=exc.field if isinstance(exc, BadRequestError) else None
    )


async def _counted(
    events: AsyncGenerator[bytes, None],
    futures: Sequence["Future[Generation]"],
    count: Callable[[str], None],
) -> AsyncIterator[bytes]:
    """Pass events on; how it ends is told in a last one and counted, and places become free."""
    outcome = "abandoned"
    try:
        async for event in events:
            yield event
        outcome = "ok"
    except tuple(ANSWERS) as exc:
        outcome = ANSWERS[type(exc)][2]
        yield render_event(_error_body(exc))
    finally:
        await events.aclose()
        _cancel(futures)
        count(outcome)


def _cancel(futures: Sequence["Future[Generation]"]) -> None:
    for future in futures:
        future.cancel()


def _take_error(work: "asyncio.Future[Any]") -> None:
    """Look at how abandoned work ended, so that asyncio does not report it as forgotten."""
    if not work.cancelled():
        work.exception()


async def _disconnected(request: Request) -> None:
    """Return when the client has closed its side."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
