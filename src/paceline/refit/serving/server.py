"""A listening socket and the thread that answers on it."""

import asyncio
import socket
import threading
from typing import ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.core.address import join_address, told_as
from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError, PreflightError
from paceline.core.waiting import wait_until

CONNECTIONS_MAX = 512
KEEP_ALIVE_S = 60
"""Longer than a training step usually takes, so that clients keep their connections."""

HEAD_S = 20.0
"""For the head of a request to arrive; whoever drips it would keep others out for ever."""


class EngineServer:
    """Serves one application; the address is known before the application exists."""

    def __init__(self, *, host: str, port: int, clock: Clock, head_s: float = HEAD_S) -> None:
        """Listen at once, so that a taken port is found before a model is built.

        Args:
            host: an address of this machine.
            port: 0 picks a free one.
            clock: bounds starting and closing.
            head_s: how long the head of a request may take to arrive.

        Raises:
            PreflightError: the address cannot be listened on.
        """
        self._clock = clock
        self._protocol = type("Protocol", (_PunctualProtocol,), {"head_s": head_s})
        self._socket = _listen(host, port)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        port = int(self._socket.getsockname()[1])
        self.endpoint = f"http://{join_address(told_as(host), port)}"

    def start(self, app: ASGIApp, *, grace_s: float) -> None:
        """Begin to answer; returns when it does.

        Args:
            app: what answers.
            grace_s: how long ``close`` lets requests in flight finish.
        """
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=self._protocol,
                log_config=None,
                access_log=False,
                lifespan="off",
                limit_concurrency=CONNECTIONS_MAX,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(grace_s)),
            )
        )
        self._server = server
        self._thread = threading.Thread(
            target=server.run, kwargs={"sockets": [self._socket]}, name="serve", daemon=True
        )
        self._thread.start()
        wait_until(
            lambda: server.started,
            what=f"serving {self.endpoint}",
            clock=self._clock,
            timeout_s=30,
            interval_s=0.01,
        )

    def close(self, *, timeout_s: float) -> None:
        """Take no more connections, let requests finish within their grace, stop. Idempotent.

        Raises:
            DeadlineExceededError: it still runs.
        """
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise DeadlineExceededError(f"{self.endpoint} did not close in {timeout_s:g} s")
        self._socket.close()


class _PunctualProtocol(H11Protocol):
    """Uvicorn's own HTTP/1.1, which waits without end for a request's head, with an end."""

    head_s: ClassVar[float]
    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        """Start the clock when a head is awaited, stop it when one is there."""
        if self.conn.their_state is not h11.IDLE:
            self._expect_nothing()
        elif self._overdue is None:
            self._overdue = self.loop.call_later(self.head_s, self.transport.abort)

    def _expect_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off for what is accepted; without,
    # every answer's body would wait 40 ms for its head to be acknowledged.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as exc:
        listener.close()
        raise PreflightError(
            f"cannot listen on {host}:{port}: {exc}; choose another --port (0 picks a free one)"
        ) from exc
    return listener
