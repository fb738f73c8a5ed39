"""vLLM's engine client as a rollout engine: tokens with the versions that produced them."""

import asyncio
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
    Choice,
    EngineLoad,
    Generation,
    InstalledVersion,
    Sampling,
    VersionSpan,
)
from paceline.refit.generators.workers import WorkersEngine
from paceline.refit.model import TensorBuffer


class VllmEngine:
    """Signs RolloutEngine beside vLLM's own server; the event loop is that server's."""

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
        self._check(prompt, sampling)
        if self._workers.installed() is None:
            raise EngineNotReadyError("the engine serves no version now; try another or wait")
        if self._open >= self._max_open:
            raise EngineBusyError(f"{self._open} prompts are open already")
        self._open += 1
        work = self._generate(tuple(prompt), sampling)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda _: self._forget())
        return future

    def load(self) -> EngineLoad:
        """Return what runs and what waits."""
        running = min(self._open, self._max_batch)
        return EngineLoad(running=running, waiting=self._open - running)

    def close(self, *, timeout_s: float) -> None:
        """Do nothing: vLLM's server closes its engine."""

    def _forget(self) -> None:
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

    async def _generate(self, prompt: tuple[int, ...], sampling: Sampling) -> Generation:
        last: Any = None
        inputs = {"prompt_token_ids": list(prompt)}
        try:
            async for output in self._client.generate(inputs, _params(sampling), self._new_id()):
                last = output
        except ValueError as exc:
            raise BadRequestError("sampling", f"is refused by vLLM: {exc}") from exc
        except Exception as exc:
            raise GenerationError(f"vLLM failed: {type(exc).__name__}: {exc}") from exc
        if last is None or any(each.finish_reason == "abort" for each in last.outputs):
            raise EngineNotReadyError("an update ended the request; ask again")
        found = sorted(last.outputs, key=lambda each: each.index)
        choices = [self._choice(each) for each in found]
        return Generation(
            prompt_token_ids=prompt, choices=tuple(choices * (sampling.n // len(choices)))
        )

    def _choice(self, output: Any) -> Choice:
        token_ids = tuple(output.token_ids)
        pairs = zip(token_ids, output.logprobs or (), strict=True)
        return Choice(
            token_ids=token_ids,
            logprobs=tuple(float(found[token_id].logprob) for token_id, found in pairs),
            text=output.text,
            finish_reason=output.finish_reason,
            spans=self._spans(output.weight_versions or (), len(token_ids)),
        )

    def _spans(self, found: Sequence[Any], num_tokens: int) -> tuple[VersionSpan, ...]:
        spans = []
        for each in found:
            installed = self._workers.version(each.version)
            if installed is None:
                raise GenerationError(f"tokens of weights {each.version!r}, which nobody installed")
            spans.append(VersionSpan(installed=installed, start=each.start, end=each.end))
        if [span.start for span in spans] + [num_tokens] != [0] + [span.end for span in spans]:
            raise GenerationError("vLLM did not say which weights produced which tokens")
        return tuple(spans)


def _params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        n=sampling.n if sampling.temperature else 1,  # greedy choices are equal, and refused
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
