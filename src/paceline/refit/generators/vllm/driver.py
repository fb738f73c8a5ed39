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

    def stage(self, version_id: str) -> None:
        """Let every worker begin to fetch a version."""
        self._llm.collective_rpc("paceline_stage", args=(version_id,))

    def status(self) -> Sequence[WorkerStatus]:
        """Return what every worker says."""
        return _statuses(self._llm.collective_rpc("paceline_status"))

    def pause(self) -> None:
        """Nothing runs between two calls; cached prefixes are of the old weights."""
        if not self._llm.reset_prefix_cache():
            raise RefitError("the prefix cache is in use: requests are still running")

    def apply(self, version_id: str) -> None:
        """Let every worker write the version."""
        self._update({"version_id": version_id})

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

    def _update(self, info: dict[str, object]) -> None:
        try:
            self._llm.start_weight_update()
            self._llm.update_weights({"update_info": info})
        except Exception as exc:
            raise _ours(exc) from exc


class OnlineDriver:
    """Drives vLLM's server from another thread than its event loop; signs EngineDriver."""

    def __init__(
        self, client: Any, loop: asyncio.AbstractEventLoop, *, pause_mode: str, timeout_s: float
    ) -> None:
        """Take what the server talks to its engine with.

        Args:
            client: vLLM's ``EngineClient``.
            loop: where it lives.
            pause_mode: what happens to running requests: keep, wait or abort.
            timeout_s: of each call.
        """
        self._client = client
        self._loop = loop
        self._pause_mode = pause_mode
        self._timeout_s = timeout_s
        self._is_closed = False

    def close(self) -> None:
        """Let calls that wait fail: the engine is ending and will not answer them."""
        self._is_closed = True

    def init(self, config: LinkConfig) -> None:
        """Let every worker connect to the run."""
        self._rpc("init_weight_transfer_engine", kwargs={"init_info": asdict(config)})

    def stage(self, version_id: str) -> None:
        """Let every worker begin to fetch a version."""
        self._rpc("paceline_stage", args=(version_id,))

    def status(self) -> Sequence[WorkerStatus]:
        """Return what every worker says."""
        return _statuses(self._rpc("paceline_status"))

    def pause(self) -> None:
        """Stop between two passes and forget cached prefixes."""
        self._wait(self._client.pause_generation(mode=self._pause_mode, clear_cache=True))

    def apply(self, version_id: str) -> None:
        """Let every worker write the version."""
        self._update({"version_id": version_id})

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

    def _update(self, info: dict[str, object]) -> None:
        self._rpc("start_weight_update")
        self._rpc("update_weights", kwargs={"update_info": info})

    def _rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = self._client.collective_rpc(method, self._timeout_s, args, kwargs)
        return self._wait(call)

    def _wait(self, call: Awaitable[T]) -> T:
        future = asyncio.run_coroutine_threadsafe(_awaited(call), self._loop)
        for _ in range(max(1, round((self._timeout_s + SLACK_S) / LOOK_S))):
            if self._is_closed:
                break
            done, _ = wait([future], timeout=LOOK_S)
            if done:
                return _result(future)
        future.cancel()
        if self._is_closed:
            raise RefitError("vLLM is ending")
        raise DeadlineExceededError(f"vLLM did not answer within {self._timeout_s:g} s")


def _result(future: "Future[T]") -> T:
    try:
        return future.result(0)
    except PacelineError:
        raise
    except Exception as exc:
        raise _ours(exc) from exc


async def _awaited(call: Awaitable[T]) -> T:
    return await call


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
