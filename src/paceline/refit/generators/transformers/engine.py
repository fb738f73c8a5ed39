"""The engine: a model without weights of its own, a queue, and one thread that runs passes."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from paceline.core.clock import Clock
from paceline.core.errors import UsageError
from paceline.refit.errors import (
    BadRequestError,
    EngineBusyError,
    EngineNotReadyError,
    GenerationError,
    RefitError,
)
from paceline.refit.generators.protocol import (
    Choice,
    EngineConfig,
    EngineLoad,
    Generation,
    InstalledVersion,
    OnPiece,
    Sampling,
)
from paceline.refit.generators.transformers.assisted import AssistedBatches
from paceline.refit.generators.transformers.batch import Job, Row, RunningBatch, SoloBatches
from paceline.refit.generators.transformers.gate import PassGate
from paceline.refit.generators.transformers.loading import LoadedModel, load_draft, load_model
from paceline.refit.generators.transformers.loras import LoraSets
from paceline.refit.generators.transformers.on_device import HOST, DeviceWeights
from paceline.refit.generators.transformers.sampling import make_streams
from paceline.refit.generators.transformers.sets import Models, WeightSets, hold_weights
from paceline.refit.generators.transformers.text import GrowingText
from paceline.refit.model import TensorBuffer


class TransformersEngine:
    """A causal language model of Hugging Face transformers; signs RolloutEngine.

    Requests join and leave the batch between passes. A choice that is in flight while a version
    is installed goes on with its cache and records both versions.
    """

    def __init__(self, config: EngineConfig, *, clock: Clock, new_seed: Callable[[], int]) -> None:
        """Build the model from ``config.model_dir``; it serves nothing yet.

        Args:
            config: where and how.
            clock: measures the pause of an update.
            new_seed: draws seeds below 2**63 for requests without one.

        Raises:
            PreflightError: the directory does not hold a model that this engine can run.
        """
        self._config = config
        self._new_seed = new_seed
        self._loaded = load_model(config)
        draft = load_draft(config, self._loaded)
        self._sets = _hold(config, self._loaded, draft)
        self._gate = PassGate(clock=clock)
        self._batch = _new_batch(config, self._sets, draft)
        self._work = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return writable views of the live bytes; the same until the sets are exchanged."""
        return self._sets.live().buffers

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return further names of tied tensors -> the name in ``live_tensors``."""
        return self._sets.live().aliases

    def spare_weights(self) -> WeightSets | LoraSets | None:
        """Return the second set, where weights are held twice."""
        if isinstance(self._sets, DeviceWeights) or not self._sets.is_twice:
            return None
        return self._sets

    def lora_sets(self) -> LoraSets | None:
        """Return what takes LoRAs, where versions are LoRAs."""
        return self._sets if isinstance(self._sets, LoraSets) else None

    @property
    def weights_held(self) -> str:
        """How often the weights are held."""
        return "twice" if self._sets.is_twice else "once"

    def device_tensors(self) -> Mapping[str, Any]:
        """Return the tensors on the device; the live ones are their copy. None on ``cpu``."""
        return self._sets.device_tensors() if isinstance(self._sets, DeviceWeights) else {}

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Run ``write`` between two forward passes, see GeneratorEngineAdapter."""
        return self._gate.at_safe_point(write, installed=installed, timeout_s=timeout_s)

    def installed(self) -> InstalledVersion | None:
        """Return what is served."""
        return self._gate.installed

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special ones added."""
        ids: list[int] = self._loaded.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        text: str = self._loaded.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        """Queue one prompt, see RolloutEngine."""
        return self._queue(prompt, sampling, None)

    def submit_stream(
        self, prompt: Sequence[int], sampling: Sampling, on_piece: OnPiece
    ) -> "Future[Generation]":
        """Queue one prompt and tell of its tokens, see SupportsStreaming."""
        return self._queue(prompt, sampling, on_piece)

    def load(self) -> EngineLoad:
        """Return what runs and what waits."""
        return EngineLoad(running=len(self._batch.rows), waiting=len(self._waiting))

    def close(self, *, timeout_s: float) -> None:
        """Stop after the current pass; unfinished requests fail. Idempotent."""
        with self._work:
            self._is_closed = True
            self._work.notify()
        self._thread.join(timeout_s)

    def _queue(
        self, prompt: Sequence[int], sampling: Sampling, on_piece: OnPiece | None
    ) -> "Future[Generation]":
        self._check(prompt, sampling)
        job = Job(
            prompt=tuple(prompt),
            sampling=sampling,
            streams=make_streams(sampling, fresh_seed=self._new_seed()),
            future=Future(),
            on_piece=on_piece,
        )
        with self._work:
            if self._is_closed or self._gate.installed is None:
                raise EngineNotReadyError("the engine serves no version now; try another or wait")
            if len(self._waiting) >= self._config.max_waiting:
                self._waiting = deque(each for each in self._waiting if not each.future.cancelled())
            if len(self._waiting) >= self._config.max_waiting:
                raise EngineBusyError(f"{len(self._waiting)} prompts are waiting already")
            self._waiting.append(job)
            self._work.notify()
        return job.future

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        if not prompt:
            raise BadRequestError("prompt", "must hold at least one token")
        if not all(0 <= token_id < self._loaded.vocabulary_size for token_id in prompt):
            size = self._loaded.vocabulary_size
            raise BadRequestError("prompt", f"holds a token outside 0 to {size - 1}")
        if len(prompt) + sampling.max_tokens > self._loaded.context_size:
            raise BadRequestError(
                "max_tokens",
                f"and prompt together need {len(prompt) + sampling.max_tokens} positions; "
                f"the model has {self._loaded.context_size}",
            )
        if sampling.n > self._config.max_batch:
            raise BadRequestError("n", f"must be at most {self._config.max_batch} here")

    def _run(self) -> None:
        torch.set_num_threads(self._config.threads)
        admitted: list[Job] = []
        while self._await_work(admitted):
            try:
                self._advance(admitted)
            except RefitError as exc:
                self._fail(admitted, exc)
            except Exception as exc:  # noqa: BLE001 - whatever a model raises costs its requests
                self._fail(admitted, GenerationError(f"forward pass failed: {exc}"))
        self._fail([*admitted, *self._waiting], EngineNotReadyError("the engine was closed"))

    def _await_work(self, admitted: list[Job]) -> bool:
        """Refill ``admitted`` from the queue as far as there is room; False when closed."""
        admitted.clear()
        with self._work:
            self._work.wait_for(lambda: self._is_closed or self._waiting or self._batch.rows)
            if self._is_closed:
                return False
            room = self._config.max_batch - len(self._batch.rows)
            while self._waiting and self._waiting[0].sampling.n <= room:
                job = self._waiting.popleft()
                if not job.future.cancelled():
                    admitted.append(job)
                    room -= job.sampling.n
        return True

    @torch.inference_mode()
    def _advance(self, admitted: Sequence[Job]) -> None:
        """Run one pass: the prompts that join, or else one token for everybody."""
        self._batch.drop(lambda row: row.job.future.cancelled())
        if not admitted and not self._batch.rows:
            return
        with self._gate.forward_pass() as installed:
            if installed is None:
                raise EngineNotReadyError("the weights became uncertain during generation")
            if admitted:
                self._batch.prefill(admitted, installed)
            else:
                self._batch.step(installed)
        for row in self._batch.rows:
            self._judge(row)
        for job in dict.fromkeys(row.job for row in self._batch.rows if row.job.on_piece):
            self._tell(job)
        self._settle(self._batch.drop(lambda row: row.finish_reason is not None))

    def _judge(self, row: Row) -> None:
        """Decide whether the row's newest token was its last."""
        sampling = row.job.sampling
        token_id = row.token_ids[-1]
        is_end = token_id in self._loaded.end_ids and not sampling.ignore_eos
        if is_end or token_id in sampling.stop_token_ids:
            row.finish_reason = "stop"
        elif len(row.token_ids) >= sampling.max_tokens:
            row.finish_reason = "length"
        if sampling.stop or row.job.on_piece:
            row.growing = row.growing or GrowingText(self.decode, stops=sampling.stop)
            if row.growing.add(row.token_ids, is_last=row.finish_reason is not None):
                row.finish_reason = "stop"

    def _tell(self, job: Job) -> None:
        """Hand out what is new; whoever cannot take it any more is not served further."""
        for index, row in enumerate(job.rows):
            if job.on_piece is None or row.num_told == len(row.token_ids):
                continue
            try:
                job.on_piece(row.new_piece(index))
            except RuntimeError:  # its event loop has ended
                job.future.cancel()

    def _settle(self, finished: Iterable[Row]) -> None:
        """Answer the requests whose last choice has finished."""
        for job in dict.fromkeys(row.job for row in finished):
            if any(row.finish_reason is None for row in job.rows):
                continue
            generation = Generation(
                prompt_token_ids=job.prompt, choices=tuple(map(self._choice, job.rows))
            )
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(generation)

    def _choice(self, row: Row) -> Choice:
        return Choice(
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            text=self.decode(row.token_ids) if row.growing is None else row.growing.text,
            finish_reason=row.finish_reason or "length",
            spans=tuple(row.spans),
        )

    def _fail(self, admitted: Iterable[Job], error: RefitError) -> None:
        jobs = dict.fromkeys([*admitted, *(row.job for row in self._batch.rows)])
        self._batch.clear()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)


def _new_batch(
    config: EngineConfig, sets: WeightSets | LoraSets | DeviceWeights, draft: LoadedModel | None
) -> RunningBatch | SoloBatches | AssistedBatches:
    """Return what holds the choices in flight."""
    if draft is not None and isinstance(sets, WeightSets):
        return AssistedBatches(sets.run, sets.run_draft, draft_tokens=draft.vocabulary_size)
    return (SoloBatches if config.reproducible else RunningBatch)(sets.run)


def _hold(
    config: EngineConfig, loaded: LoadedModel, draft: LoadedModel | None
) -> WeightSets | LoraSets | DeviceWeights:
    """Return what of the model comes as versions: its weights, or LoRAs of those it has.

    Raises:
        UsageError: a LoRA, a draft or a second set is wanted on a device.
        PreflightError: the model does not go there, or its bytes cannot be viewed.
    """
    if config.device != HOST:
        if config.lora or draft is not None or config.weights == "twice":
            raise UsageError(
                f"on {config.device!r} the engine holds a model's weights once, with a copy in "
                "host memory: leave out LoRAs, drafts and --weights twice, or use --device cpu"
            )
        return DeviceWeights(loaded.model, config.device, names=config.names)
    if config.lora:
        return LoraSets(loaded.model)
    return hold_weights(
        Models(main=loaded.model, draft=None if draft is None else draft.model),
        names=config.names,
        wanted=config.weights,
        memory_bytes=config.memory_bytes,
    )
