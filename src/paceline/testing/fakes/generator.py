"""A rollout engine without a model: its bytes are real, its tokens follow a rule."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from paceline.core.errors import DeadlineExceededError
from paceline.refit.errors import EngineNotReadyError, UncertainStateError
from paceline.refit.generators.protocol import (
    Choice,
    EngineLoad,
    Generation,
    InstalledVersion,
    Sampling,
    VersionSpan,
)
from paceline.refit.model import TensorBuffer

VOCABULARY_SIZE = 997


class FakeGenerator:
    """Signs RolloutEngine; everything happens in the caller's thread.

    Tokens count upwards from the sum of the prompt, the seed and the choice's index. While
    ``is_held`` is set, requests stay unfinished.
    """

    def __init__(
        self, tensors: Sequence[TensorBuffer] = (), *, aliases: Mapping[str, str] | None = None
    ) -> None:
        self._tensors = {
            each.name: TensorBuffer(
                name=each.name,
                dtype=each.dtype,
                shape=each.shape,
                data=memoryview(bytearray(each.data)),
            )
            for each in tensors
        }
        self._aliases = dict(aliases or {})
        self._installed: InstalledVersion | None = None
        self._pass = threading.Lock()
        self._is_closed = False
        self.is_held = False
        self.held: list[Future[Generation]] = []
        self.requests: list[tuple[tuple[int, ...], Sampling]] = []
        self.before_write: Callable[[], None] = _nothing
        """Runs inside the safe point of an install, for faults."""
        self.after_write: Callable[[], None] = _nothing

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return the live bytes."""
        return self._tensors

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return the ties."""
        return self._aliases

    def live_bytes(self) -> dict[str, bytes]:
        """Return a copy of what is live, to compare with."""
        return {name: bytes(buffer.data) for name, buffer in self._tensors.items()}

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Run the write alone."""
        if not self._pass.acquire(timeout=timeout_s):
            raise DeadlineExceededError(f"no safe point within {timeout_s:g} s")
        try:
            if installed is not None:
                self.before_write()
            write()
            if installed is not None:
                self.after_write()
            self._installed = installed
        except UncertainStateError:
            self._installed = None
            raise
        finally:
            self._pass.release()
        return 0.0

    def installed(self) -> InstalledVersion | None:
        """Return the label."""
        return self._installed

    def encode(self, text: str) -> Sequence[int]:
        """One token per character."""
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """One character per token."""
        return "".join(chr(token_id) for token_id in token_ids)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        """Answer at once, or when the test finishes one of ``held``."""
        if self._installed is None or self._is_closed:
            raise EngineNotReadyError("nothing is installed, or the engine is closed")
        self.requests.append((tuple(prompt), sampling))
        future: Future[Generation] = Future()
        if self.is_held:
            self.held.append(future)
        else:
            future.set_result(self.generate(prompt, sampling, self._installed))
        return future

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, installed: InstalledVersion
    ) -> Generation:
        """Apply the rule."""
        first = (sum(prompt) + (sampling.seed or 0)) % VOCABULARY_SIZE
        choices = [
            Choice(
                token_ids=tuple(first + index + at for at in range(sampling.max_tokens)),
                logprobs=(-1.0,) * sampling.max_tokens,
                text="",
                finish_reason="length",
                spans=(VersionSpan(installed=installed, start=0, end=sampling.max_tokens),),
            )
            for index in range(sampling.n)
        ]
        return Generation(prompt_token_ids=tuple(prompt), choices=tuple(choices))

    def load(self) -> EngineLoad:
        """Return how many are held."""
        return EngineLoad(running=0, waiting=sum(not each.done() for each in self.held))

    def close(self, *, timeout_s: float) -> None:
        """Fail what is held, and take nothing more."""
        self._is_closed = True
        for future in self.held:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(EngineNotReadyError("closed"))


def _nothing() -> None:
    """Do nothing."""
