"""Prometheus figures of engines and the control service; only this knows the client library."""

from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

GAUGES: Final[dict[str, str]] = {
    "ready": "1 while requests are admitted",
    "running_choices": "Choices in the batch",
    "waiting_prompts": "Prompts in the queue",
    "installed_sequence": "Sequence of the installed weight version, -1 for none",
    "installs": "Weight versions installed since the start",
    "refusals": "Weight versions refused or failed since the start",
    "fetched_bytes": "Payload bytes fetched since the start",
    "fetch_seconds": "Seconds of transfers since the start",
    "fetch_retries": "Times a transfer was taken up again since the start",
    "fetch_problems": "Transfers that a source failed or lied in since the start",
    "refit_seconds": "From seeing a version READY to serving it, last install",
    "pause_seconds": "How long no forward pass could start, last install",
    "drain_seconds": "How long requests in flight were waited for, last install",
    "apply_seconds": "How long writing into live parameters took, last install",
    "prepare_seconds": "How long fetching and proving took before the safe point, last install",
    "verify_seconds": "How long proving the live bytes took after it, last install",
    "aborted_requests": "Requests aborted for an update since the start",
    "staleness": "Versions between what is installed and the newest",
}
"""Name -> help of what is read at the moment of a scrape."""

CALL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)

STALENESS_BUCKETS: Final = (0, 1, 2, 3, 4, 6, 8, 16, 32)

SECONDS_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class EngineMetrics:
    """Figures of one engine, in a registry of their own so that a process can hold two."""

    media_type: Final = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "paceline_requests", "Completion requests", ["outcome"], registry=self._registry
        )
        self._tokens = Counter(
            "paceline_tokens", "Tokens read and generated", ["kind"], registry=self._registry
        )
        self._seconds = Histogram(
            "paceline_request_seconds",
            "From a request's arrival to its answer",
            buckets=SECONDS_BUCKETS,
            registry=self._registry,
        )
        self._staleness = Histogram(
            "paceline_choice_staleness",
            "Versions between the oldest weights behind a choice and the newest",
            buckets=STALENESS_BUCKETS,
            registry=self._registry,
        )
        self._gauges = {
            name: Gauge(f"paceline_{name}", text, registry=self._registry)
            for name, text in GAUGES.items()
        }

    def count_request(self, outcome: str, *, seconds: float) -> None:
        """Count one request under a word such as ``ok`` or ``busy``."""
        self._requests.labels(outcome=outcome).inc()
        self._seconds.observe(seconds)

    def count_tokens(self, *, prompt: int, generated: int) -> None:
        """Count what one answered request read and wrote."""
        self._tokens.labels(kind="prompt").inc(prompt)
        self._tokens.labels(kind="generated").inc(generated)

    def observe_staleness(self, versions: int) -> None:
        """Count one choice that was so many versions behind when it was answered."""
        self._staleness.observe(versions)

    def render(self, gauges: Mapping[str, float]) -> bytes:
        """Return the exposition text, with these values of GAUGES (a missing one keeps its last).

        Raises:
            KeyError: a name that GAUGES does not list.
        """
        for name, value in gauges.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)


class ControlMetrics:
    """Figures of one control service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "paceline_control_calls", "Calls answered", ["call", "code"], registry=self._registry
        )
        self._seconds = Histogram(
            "paceline_control_call_seconds",
            "From a request's arrival to its answer",
            buckets=CALL_BUCKETS,
            registry=self._registry,
        )

    def observe(self, call: str, code: str, seconds: float) -> None:
        """Count one call under its name and status."""
        self._calls.labels(call=call, code=code).inc()
        self._seconds.observe(seconds)

    def render(self) -> str:
        """Return the exposition text."""
        return generate_latest(self._registry).decode()

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Answer scrapes over HTTP in a thread; return the real port, and what ends it.

        Raises:
            OSError: the port is taken or may not be used.
        """
        server, thread = start_http_server(port, addr=host, registry=self._registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return int(server.server_port), stop
