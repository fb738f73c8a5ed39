"""One request to one engine: every outcome is choices or one of our errors."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import TypeVar

import httpx

from paceline.refit.generators.protocol import Choice
from paceline.refit.rollouts.model import EngineFailedError, Piece, RolloutConfig, Want
from paceline.refit.rollouts.roster import Picked
from paceline.refit.rollouts.wire import (
    EVENT_CHARS_MAX,
    check_status,
    parse_choices,
    parse_event,
    render_request,
)
from paceline.refit.transports.routes import ROUTE_TRY_S

T = TypeVar("T")

CONNECT_S = 5.0


class EngineCalls:
    """Connections to every engine; used from one event loop."""

    def __init__(self, config: RolloutConfig) -> None:
        """Prepare; nothing connects yet."""
        self._config = config
        # Twice the prompts in flight: each may be asked twice.
        most = 2 * config.parallel
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {config.token}"},
            timeout=httpx.Timeout(config.request_timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            trust_env=False,
        )

    async def complete(self, picked: Picked, want: Want) -> list[Choice]:
        """Return the choices of one prompt.

        Raises:
            EngineFailedError, EngineBusyError, EngineNotReadyError: another engine may do better.
            UsageError, AccessRefusedError: no engine will.
        """
        answer = bytearray()
        try:
            # The client's own timeouts count from byte to byte, and an engine may drip.
            async with asyncio.timeout(self._config.request_timeout_s):
                response = await self._send(picked, want, is_stream=False)
                async with aclosing(response):
                    async for piece in response.aiter_bytes():
                        answer += piece
                        if len(answer) > self._config.answer_bytes_max:
                            raise EngineFailedError(f"{picked.who} sent too long an answer")
        except _SILENT as exc:
            raise _silent(picked, exc) from exc
        check_status(response.status_code, bytes(answer), who=picked.who)
        choices = parse_choices(bytes(answer), worker_id=picked.worker_id)
        if len(choices) != want.sampling.n:
            raise EngineFailedError(
                f"engine {picked.worker_id} sent {len(choices)} of {want.sampling.n}"
            )
        return choices

    async def stream(self, picked: Picked, want: Want) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the one choice of a prompt, up to the one that ends it.

        Raises as ``complete``; also when the stream breaks off before the end.
        """
        patience = _Patience(self._config.request_timeout_s)
        try:
            response = await patience.wait(self._send(picked, want, is_stream=True))
            async with aclosing(response):
                if response.status_code != httpx.codes.OK:
                    body = await patience.wait(response.aread())
                    check_status(response.status_code, body, who=picked.who)
                async with aclosing(_pieces(response, picked, patience)) as pieces:
                    async for piece in pieces:
                        yield piece
                        if piece.finish_reason is not None:
                            return
        except _SILENT as exc:
            raise _silent(picked, exc) from exc
        raise EngineFailedError(f"{picked.who} ended a stream in the middle")

    async def close(self) -> None:
        """Give the connections back."""
        await self._http.aclose()

    async def _send(self, picked: Picked, want: Want, *, is_stream: bool) -> httpx.Response:
        body = render_request(
            want.prompt, want.sampling, model_name=self._config.model_name, is_stream=is_stream
        )
        endpoint = picked.report.endpoint
        shorter = self._config.routes.of(endpoint)
        if shorter != endpoint:
            try:
                return await self._post(shorter, body, connect_s=ROUTE_TRY_S)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                pass  # nothing was sent, and the long way is there
        return await self._post(endpoint, body, connect_s=CONNECT_S)

    async def _post(
        self, endpoint: str, body: Mapping[str, object], *, connect_s: float
    ) -> httpx.Response:
        timeout = httpx.Timeout(self._config.request_timeout_s, connect=connect_s)
        request = self._http.build_request(
            "POST", f"{endpoint}/v1/completions", json=body, timeout=timeout
        )
        return await self._http.send(request, stream=True)


class _Patience:
    """So many seconds of waiting in all; what happens between two waits costs nothing."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds

    async def wait(self, work: Awaitable[T]) -> T:
        """Await ``work``. Raises TimeoutError when there is no patience left."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await asyncio.wait_for(work, self._left_s)
        finally:
            self._left_s -= loop.time() - began


async def _pieces(
    response: httpx.Response, picked: Picked, patience: _Patience
) -> AsyncGenerator[Piece, None]:
    """Cut a body into lines, none longer than an event may be, and read each."""
    rest = ""
    texts = response.aiter_text()
    while (text := await patience.wait(anext(texts, None))) is not None:
        *lines, rest = (rest + text).split("\n")
        if len(rest) > EVENT_CHARS_MAX:
            raise EngineFailedError(f"{picked.who} sent too long an event")
        for line in lines:
            piece = parse_event(line.rstrip("\r"), worker_id=picked.worker_id)
            if piece is not None:
                yield piece


_SILENT = (httpx.HTTPError, httpx.InvalidURL, TimeoutError)


def _silent(picked: Picked, exc: Exception) -> EngineFailedError:
    return EngineFailedError(f"{picked.who} did not answer: {type(exc).__name__} {exc}")
