"""vLLM's own calls, for its ``LLM`` class and for its server: one shape for both."""

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import Any, TypeVar

from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.refit.errors import ApplyError, RefitError, UncertainStateError
from paceline.refit.generators.workers import LinkConfig, WorkerStatus

T = TypeVar("T")

LOOK_S = 0.5
"""How often a waiting call looks whether it still should."""
PAUSE_MODES = {"immediate": "keep", "drain": "wait", "abort": "abort"}
"""Our word for what becomes of running requests -> vLLM's."""
SLACK_S = 5.0
"""Beyond vLLM's own deadline."""


class OfflineDriver:
    """Drives an ``LLM``; signs EngineDriver. Only between two calls of ``generate``."""

    def __init__(self, llm: Any) -> None:
        """Take the ``LLM``; it belongs to the caller."""
        self._llm = llm

    def init(self, config: LinkConfig) -> None:
        """Let every worker connect to the run."""
        self._llm.init_weight_transfer_engine({"init_info": asdict(config)})

    def stage(self, version_id: str, *, known: frozenset[str] | None = None) -> None:
        """Let every worker begin to fetch a version."""
        self._llm.collective_rpc("paceline_stage", args=_staging(version_id, known))

    def status(self) -> Sequence[WorkerStatus]:
        """Return what every worker says."""
        return _statuses(self._llm.collective_rpc("paceline_status"))

    def pause(self) -> None:
        """Nothing runs between two calls; cached prefixes are of the old weights."""
        if not self._llm.reset_prefix_cache():
            raise RefitError("the prefix cache is in use: requests are still running")

    def apply(self, version_id: str) -> Sequence[WorkerStatus]:
        """Let every worker write the version."""
        return self._update({"version_id": version_id})

    def finish(self, version_id: str) -> None:
        """Settle the update and label tokens with the version."""
        self._llm.finish_weight_update(weight_version=version_id)

    def undo(self) -> None:
        """Let every worker that has the version take it back."""
        self._update({"undo": True})
        self._llm.finish_weight_update()

    def resume(self) -> None:
        """Nothing was stopped."""

    def prove(self) -> Sequence[str]:
        """Return the root digests that the workers find."""
        roots: Sequence[str] = self._llm.collective_rpc("paceline_prove")
        return roots

    def _update(self, info: dict[str, object]) -> Sequence[WorkerStatus]:
        try:
            return _statuses(self._llm.collective_rpc("paceline_update", args=(info,)))
        except Exception as exc:
            raise _ours(exc) from exc


class OnlineDriver:
    """Drives vLLM's server from another thread than its event loop; signs EngineDriver."""

    def __init__(
        self,
        client: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        update: str,
        drain_s: float,
        timeout_s: float,
    ) -> None:
        """Take what the server talks to its engine with.

        Args:
            client: vLLM's ``EngineClient``.
            loop: where it lives.
            update: what happens to requests that run when a version goes in: immediate, drain,
                abort. Our own routes have settled theirs before; this is for vLLM's others.
            drain_s: how long ``drain`` waits for them; then they are aborted.
            timeout_s: of each call.
        """
        self._client = client
        self._loop = loop
        self._pause_mode = PAUSE_MODES[update]
        self._drain_s = drain_s
        self._timeout_s = timeout_s
        self._is_closed = False

    def close(self) -> None:
        """Let calls that wait fail: the engine is ending and will not answer them."""
        self._is_closed = True

    def init(self, config: LinkConfig) -> None:
        """Let every worker connect to the run."""
        self._rpc("init_weight_transfer_engine", kwargs={"init_info": asdict(config)})

    def stage(self, version_id: str, *, known: frozenset[str] | None = None) -> None:
        """Let every worker begin to fetch a version."""
        self._rpc("paceline_stage", args=_staging(version_id, known))

    def status(self) -> Sequence[WorkerStatus]:
        """Return what every worker says."""
        return _statuses(self._rpc("paceline_status"))

    def pause(self) -> None:
        """Stop, as the policy wants it, and forget cached prefixes."""
        if self._pause_mode != "wait":
            self._pause(self._pause_mode, timeout_s=self._timeout_s)
            return
        try:
            self._pause("wait", timeout_s=self._drain_s)
        except DeadlineExceededError:
            self._pause("abort", timeout_s=self._timeout_s)

    def apply(self, version_id: str) -> Sequence[WorkerStatus]:
        """Let every worker write the version."""
        return self._update({"version_id": version_id})

    def finish(self, version_id: str) -> None:
        """Settle the update and label tokens with the version."""
        self._wait(self._client.finish_weight_update(version_id))

    def undo(self) -> None:
        """Let every worker that has the version take it back."""
        self._update({"undo": True})
        self._wait(self._client.finish_weight_update())

    def resume(self) -> None:
        """Go on."""
        self._wait(self._client.resume_generation())

    def prove(self) -> Sequence[str]:
        """Return the root digests that the workers find."""
        roots: Sequence[str] = self._rpc("paceline_prove")
        return roots

    def _update(self, info: dict[str, object]) -> Sequence[WorkerStatus]:
        return _statuses(self._rpc("paceline_update", args=(info,)))

    def _pause(self, mode: str, *, timeout_s: float) -> None:
        call = self._client.pause_generation(mode=mode, clear_cache=True)
        self._wait(call, timeout_s=timeout_s)

    def _rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = self._client.collective_rpc(method, self._timeout_s, args, kwargs)
        return self._wait(call, timeout_s=self._timeout_s + SLACK_S)

    def _wait(self, call: Awaitable[T], *, timeout_s: float | None = None) -> T:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        future = asyncio.run_coroutine_threadsafe(_awaited(call), self._loop)
        for _ in range(max(1, round(limit_s / LOOK_S))):
            if self._is_closed:
                break
            done, _ = wait([future], timeout=LOOK_S)
            if done:
                return _result(future)
        future.cancel()
        if self._is_closed:
            raise RefitError("vLLM is ending")
        raise DeadlineExceededError(f"vLLM did not answer within {limit_s:g} s")


def _result(future: "Future[T]") -> T:
    try:
        return future.result(0)
    except PacelineError:
        raise
    except Exception as exc:
        raise _ours(exc) from exc


async def _awaited(call: Awaitable[T]) -> T:
    return await call


def _staging(version_id: str, known: frozenset[str] | None) -> tuple[str, list[str] | None]:
    return version_id, None if known is None else sorted(known)


def _statuses(found: Sequence[dict[str, Any]]) -> list[WorkerStatus]:
    return [WorkerStatus(**each) for each in found]


def _ours(error: Exception) -> PacelineError:
    """Translate what comes back from a worker: across processes only the text is left."""
    if isinstance(error, PacelineError):
        return error
    text = str(error) or repr(error)
    if UncertainStateError.__name__ in text or "could not be put back" in text:
        return UncertainStateError(text)
    return ApplyError(text)
