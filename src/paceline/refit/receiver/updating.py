"""An engine whose requests in flight are treated by a policy when a version goes in.

Engines know how to write between two passes and nothing of policies: this stands between them and
everybody else, for every engine alike.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from paceline.core.clock import Clock
from paceline.refit.errors import EngineNotReadyError, RefitError
from paceline.refit.generators.protocol import (
    ChoicePiece,
    EngineLoad,
    Generation,
    InstalledVersion,
    OnPiece,
    RolloutEngine,
    Sampling,
    SpareWeights,
    TakesLoras,
    device_tensors_of,
    held_of,
    loras_of,
    proof_of,
    spare_of,
    submit_stream,
)
from paceline.refit.model import TensorBuffer
from paceline.refit.receiver.policy import Step, UpdatePolicy, next_step

LOOK_S = 0.005
"""How often it is looked whether the last request has finished."""


FIGURES = (
    "prepare_seconds",
    "drain_seconds",
    "apply_seconds",
    "verify_seconds",
    "aborted_requests",
)


class UpdateGate:
    """Signs RolloutEngine and SupportsStreaming around an engine."""

    def __init__(
        self, engine: RolloutEngine, *, policy: UpdatePolicy, drain_s: float, clock: Clock
    ) -> None:
        """Stand in front of ``engine``.

        Args:
            engine: closed with this.
            policy: what becomes of requests in flight.
            drain_s: how long DRAIN waits for them.
            clock: for that wait and for figures.
        """
        self._engine = engine
        self._policy = policy
        self._drain_s = drain_s
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight: set[_Request] = set()
        self._updating = ""
        self._entered_s = self._left_s = clock.monotonic()
        self._figures = dict.fromkeys(FIGURES, 0.0)

    @property
    def proof(self) -> str:
        """How the engine's weights are proven."""
        return proof_of(self._engine)

    @property
    def weights_held(self) -> str:
        """How often the engine holds its weights."""
        return held_of(self._engine)

    @property
    def updating(self) -> str:
        """Why nothing new is taken at the moment; empty while it is."""
        return self._updating

    def figures(self) -> Mapping[str, float]:
        """Return durations of the last update, by the names of telemetry.metrics.GAUGES."""
        return dict(self._figures)

    def note_install(self, began_s: float) -> None:
        """Take note that an install has ended which began at ``began_s``."""
        self._figures["prepare_seconds"] = self._entered_s - began_s
        self._figures["verify_seconds"] = self._clock.monotonic() - self._left_s

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return the engine's."""
        return self._engine.live_tensors()

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return the engine's."""
        return self._engine.tensor_aliases()

    def spare_weights(self) -> SpareWeights | None:
        """Return the engine's."""
        return spare_of(self._engine)

    def lora_sets(self) -> TakesLoras | None:
        """Return the engine's."""
        return loras_of(self._engine)

    def device_tensors(self) -> Mapping[str, Any]:
        """Return the engine's."""
        return device_tensors_of(self._engine)

    def installed(self) -> InstalledVersion | None:
        """Return the engine's."""
        return self._engine.installed()

    def encode(self, text: str) -> Sequence[int]:
        """Ask the engine."""
        return self._engine.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ask the engine."""
        return self._engine.decode(token_ids)

    def load(self) -> EngineLoad:
        """Return the engine's."""
        return self._engine.load()

    def close(self, *, timeout_s: float) -> None:
        """Close the engine."""
        self._engine.close(timeout_s=timeout_s)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        """Queue one prompt, unless an update is waiting for the others to finish."""
        return self._admit(lambda request: self._engine.submit(prompt, sampling))

    def submit_stream(
        self, prompt: Sequence[int], sampling: Sampling, on_piece: OnPiece
    ) -> "Future[Generation]":
        """Do the same and tell of tokens; nothing is told after an abort."""
        return self._admit(
            lambda request: submit_stream(
                self._engine, prompt, sampling, request.while_wanted(on_piece)
            )
        )

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Settle what is in flight, then write, see GeneratorEngineAdapter.

        Taking a label away never waits: the engine must not serve a moment longer.
        """

        def timed() -> None:
            began = self._clock.monotonic()
            write()
            self._figures["apply_seconds"] = self._clock.monotonic() - began

        self._entered_s = self._clock.monotonic()
        try:
            if installed is not None:
                self._settle(installed)
            return self._engine.at_safe_point(timed, installed=installed, timeout_s=timeout_s)
        finally:
            self._updating = ""
            self._left_s = self._clock.monotonic()

    def _settle(self, installed: InstalledVersion) -> None:
        began = self._clock.monotonic()
        while (step := self._look(installed, began)) is not Step.WRITE:
            if step is Step.ABORT:
                self._abort(f"aborted for version {installed.version_id}; ask again")
            else:
                self._clock.sleep(LOOK_S)
        self._figures["drain_seconds"] = self._clock.monotonic() - began

    def _look(self, installed: InstalledVersion, began: float) -> Step:
        """Decide the next step; from the first one that is no write on, nothing new is taken."""
        with self._lock:
            if self._policy is not UpdatePolicy.IMMEDIATE:
                self._updating = f"version {installed.version_id} is going in"
            return next_step(
                self._policy,
                in_flight=len(self._in_flight),
                waited_s=self._clock.monotonic() - began,
                drain_s=self._drain_s,
            )

    def _admit(self, submit: "Callable[[_Request], Future[Generation]]") -> "Future[Generation]":
        request = _Request(self._forget)
        with self._lock:
            if self._updating:
                raise EngineNotReadyError(f"{self._updating}; try another engine, or wait")
            inner = submit(request)
            self._in_flight.add(request)
        request.follow(inner)
        return request.outer

    def _abort(self, reason: str) -> None:
        with self._lock:
            running = list(self._in_flight)
        self._figures["aborted_requests"] += len(running)
        for request in running:
            request.abort(EngineNotReadyError(reason))

    def _forget(self, request: "_Request") -> None:
        with self._lock:
            self._in_flight.discard(request)


class _Request:
    """One request: what the engine works on, and what the asker waits for."""

    def __init__(self, forget: "Callable[[_Request], None]") -> None:
        self.outer: Future[Generation] = Future()
        self._inner: Future[Generation] | None = None
        self._forget = forget

    def follow(self, inner: "Future[Generation]") -> None:
        """Pass the engine's answer on, and the asker's change of mind back."""
        self._inner = inner
        self.outer.add_done_callback(self._end)
        inner.add_done_callback(self._answer)

    def while_wanted(self, on_piece: OnPiece) -> OnPiece:
        """Return the same callback, silent once the asker has an answer."""

        def tell(piece: ChoicePiece) -> None:
            if not self.outer.done():
                on_piece(piece)

        return tell

    def abort(self, error: RefitError) -> None:
        """Answer with ``error`` unless there is an answer; the engine's place becomes free."""
        if _claim(self.outer):
            self.outer.set_exception(error)

    def _answer(self, inner: "Future[Generation]") -> None:
        if inner.cancelled():
            self.outer.cancel()
        elif _claim(self.outer):
            error = inner.exception()
            if error is None:
                self.outer.set_result(inner.result())
            else:
                self.outer.set_exception(error)

    def _end(self, outer: "Future[Generation]") -> None:
        if self._inner is not None:
            self._inner.cancel()
        self._forget(self)


_CLAIM = threading.Lock()


def _claim(future: "Future[Generation]") -> bool:
    """Return True to the one who may answer; a future that two answer raises."""
    with _CLAIM:
        return not future.done() and not future.running() and future.set_running_or_notify_cancel()
