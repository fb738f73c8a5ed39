"""vLLM's engine client as a rollout engine: tokens with the versions that produced them."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from paceline.refit.errors import (
    BadRequestError,
    EngineBusyError,
    EngineNotReadyError,
    GenerationError,
)
from paceline.refit.generators.protocol import (
    EngineLoad,
    Generation,
    InstalledVersion,
    OnPiece,
    Sampling,
)
from paceline.refit.generators.vllm.growing import GrowingAnswer
from paceline.refit.generators.workers import WorkersEngine
from paceline.refit.model import TensorBuffer


class VllmEngine:
    """Signs RolloutEngine and SupportsStreaming beside vLLM's own server, on its event loop."""

    def __init__(
        self,
        client: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        workers: WorkersEngine,
        max_waiting: int,
        new_id: Callable[[], str],
    ) -> None:
        """Take what vLLM's server has.

        Args:
            client: vLLM's ``EngineClient``.
            loop: where it lives.
            workers: what the workers hold.
            max_waiting: prompts beyond those that run together; more are refused.
            new_id: names requests.
        """
        self._client = client
        self._loop = loop
        self._workers = workers
        self._new_id = new_id
        self._tokenizer = client.get_tokenizer()
        config = client.vllm_config
        self._context = config.model_config.max_model_len
        self._vocabulary = config.model_config.get_vocab_size()
        self._max_batch = config.scheduler_config.max_num_seqs
        self._max_open = self._max_batch + max_waiting
        self._open = 0
        self._lock = threading.Lock()

    @property
    def proof(self) -> str:
        """How it is known that the workers hold what was installed."""
        return self._workers.proof

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return nothing: the live tensors are in the workers."""
        return self._workers.live_tensors()

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return nothing, see ``live_tensors``."""
        return self._workers.tensor_aliases()

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Run ``write`` while the workers are paused, see WorkersEngine."""
        return self._workers.at_safe_point(write, installed=installed, timeout_s=timeout_s)

    def installed(self) -> InstalledVersion | None:
        """Return what is served."""
        return self._workers.installed()

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special ones added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        """Queue one prompt, see RolloutEngine."""
        return self._open_request(prompt, sampling, None)

    def submit_stream(
        self, prompt: Sequence[int], sampling: Sampling, on_piece: OnPiece
    ) -> "Future[Generation]":
        """Do the same and tell of tokens, see SupportsStreaming; ``growing`` says when."""
        return self._open_request(prompt, sampling, on_piece)

    def load(self) -> EngineLoad:
        """Return what runs and what waits."""
        running = min(self._open, self._max_batch)
        return EngineLoad(running=running, waiting=self._open - running)

    def close(self, *, timeout_s: float) -> None:
        """Do nothing: vLLM's server closes its engine."""

    def _open_request(
        self, prompt: Sequence[int], sampling: Sampling, on_piece: OnPiece | None
    ) -> "Future[Generation]":
        self._check(prompt, sampling)
        if self._workers.installed() is None:
            raise EngineNotReadyError("the engine serves no version now; try another or wait")
        with self._lock:
            if self._open >= self._max_open:
                raise EngineBusyError(f"{self._open} prompts are open already")
            self._open += 1
        work = self._generate(tuple(prompt), sampling, on_piece)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda _: self._forget())
        return future

    def _forget(self) -> None:
        with self._lock:
            self._open -= 1

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        if not prompt:
            raise BadRequestError("prompt", "must hold at least one token")
        if not all(0 <= token_id < self._vocabulary for token_id in prompt):
            raise BadRequestError("prompt", f"holds a token outside 0 to {self._vocabulary - 1}")
        if len(prompt) + sampling.max_tokens > self._context:
            raise BadRequestError(
                "max_tokens",
                f"and prompt together need {len(prompt) + sampling.max_tokens} positions; "
                f"the engine has {self._context}",
            )
        if sampling.n > self._max_batch:
            raise BadRequestError("n", f"must be at most {self._max_batch} here")
        if sampling.temperature and (sampling.top_k or sampling.top_p < 1):
            raise BadRequestError(
                "top_k" if sampling.top_k else "top_p",
                "must be off: vLLM only tells log-probabilities after that cut, which are not "
                "those of the policy; its chat route samples so without them",
            )

    async def _generate(
        self, prompt: tuple[int, ...], sampling: Sampling, on_piece: OnPiece | None
    ) -> Generation:
        answer = GrowingAnswer(self._workers, on_piece)
        params = _params(sampling, is_stream=on_piece is not None)
        async for output in self._outputs(prompt, params):
            for each in output.outputs:
                answer.add(each)
        return Generation(prompt_token_ids=prompt, choices=answer.choices(sampling.n))

    async def _outputs(self, prompt: tuple[int, ...], params: SamplingParams) -> Any:
        """Yield what vLLM says; its errors become ours here."""
        inputs = {"prompt_token_ids": list(prompt)}
        try:
            async for output in self._client.generate(inputs, params, self._new_id()):
                yield output
        except ValueError as exc:
            raise BadRequestError("sampling", f"is refused by vLLM: {exc}") from exc
        except Exception as exc:
            raise GenerationError(f"vLLM failed: {type(exc).__name__}: {exc}") from exc


def _params(sampling: Sampling, *, is_stream: bool) -> SamplingParams:
    return SamplingParams(
        n=sampling.n if sampling.temperature else 1,  # greedy choices are equal, and refused
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        output_kind=RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY,
    )
