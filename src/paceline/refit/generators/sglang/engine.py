"""The engine: verified weights on this side, an SGLang server that serves them on the other.

A version is written into our copy first, where a failure is undone as anywhere. Then the server
is paused, loads the tensors that changed, flushes its cache, says the new label, and goes on. If
it cannot be brought to say so, nobody knows what it holds, and nothing is served until a full
version is in.
"""

import logging
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError, PreflightError, UsageError
from paceline.refit.errors import (
    BadRequestError,
    EngineBusyError,
    EngineNotReadyError,
    RefitError,
    UncertainStateError,
)
from paceline.refit.generators.protocol import (
    Choice,
    EngineConfig,
    EngineLoad,
    Generation,
    InstalledVersion,
    Sampling,
    VersionSpan,
)
from paceline.refit.generators.sglang.client import Sample, SglangClient, SglangError
from paceline.refit.generators.sglang.weights import ShadowWeights, read_limits
from paceline.refit.model import TensorBuffer

log = logging.getLogger(__name__)

LABELS_KEPT = 64
"""Versions that a sample in flight may still name."""
UPDATE_TRIES = 2


class SglangEngine:
    """Signs RolloutEngine."""

    proof = "server-label"
    """What is proven are our copy and the server's word that it has loaded it."""

    def __init__(self, config: EngineConfig, *, clock: Clock, new_seed: Callable[[], int]) -> None:
        """Read the checkpoint; the server is asked for the first time by an install.

        Args:
            config: ``url`` is the server's, ``model_dir`` what it was started with.
            clock: measures the pause of an update.
            new_seed: draws seeds for requests without one.

        Raises:
            UsageError: no url.
            PreflightError: no checkpoint or tokenizer there, or no key in the file named.
        """
        if not config.url:
            raise UsageError("engine 'sglang' needs the server's address: --engine-url http://...")
        self._config = config
        self._clock = clock
        self._new_seed = new_seed
        self._vocabulary_size, self._context_size = read_limits(config.model_dir)
        self._tokenizer = _read_tokenizer(config.model_dir)
        self._weights = ShadowWeights(config.model_dir)
        self._client = SglangClient(config.url, key=_read_key(config.key_file))
        self._pool = ThreadPoolExecutor(config.max_batch, thread_name_prefix="sglang")
        self._spool = tempfile.TemporaryDirectory(prefix="paceline-sglang-")
        self._writer = threading.Lock()
        self._lock = threading.Lock()
        self._installed: InstalledVersion | None = None
        self._labels: OrderedDict[str, InstalledVersion] = OrderedDict()
        self._num_updates = 0
        self._in_flight: set[_Request] = set()
        self._is_closed = False

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return our copy, by the checkpoint's names."""
        return self._weights.live

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return the name that a tied checkpoint leaves out."""
        return self._weights.aliases

    def installed(self) -> InstalledVersion | None:
        """Return what is served."""
        return self._installed

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Write into our copy, then have the server take over what changed."""
        if not self._writer.acquire(timeout=timeout_s):
            raise DeadlineExceededError(f"no safe point within {timeout_s:g} s: another one writes")
        try:
            return self._write(write, installed)
        except UncertainStateError:
            self._installed = None
            self._weights.forget_sent()
            raise
        finally:
            self._writer.release()

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special ones added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        """Send one prompt to the server, a request for each choice; it batches them."""
        self._check(prompt, sampling)
        with self._lock:
            if self._is_closed or self._installed is None:
                raise EngineNotReadyError("the engine serves no version now; try another or wait")
            if len(self._in_flight) >= self._config.max_waiting + self._config.max_batch:
                raise EngineBusyError(f"{len(self._in_flight)} prompts are in flight already")
            seed = self._new_seed() if sampling.seed is None else sampling.seed
            request = _Request(
                tuple(prompt), sampling, seed=seed, at_start=self._installed, engine=self
            )
            self._in_flight.add(request)
        return request.start(self._pool)

    def load(self) -> EngineLoad:
        """Return what the server has been sent."""
        waiting = sum(not request.is_started for request in self._in_flight)
        return EngineLoad(running=len(self._in_flight) - waiting, waiting=waiting)

    def close(self, *, timeout_s: float) -> None:
        """Abort what runs and let the server be; it goes on serving whoever else asks it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            running = list(self._in_flight)
        for request in running:
            request.fail(EngineNotReadyError("the engine was closed"))
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait([call for request in running for call in request.calls], timeout=timeout_s)
        self._client.close()
        self._spool.cleanup()

    def ask(self, prompt: tuple[int, ...], params: Mapping[str, object], request_id: str) -> Sample:
        """Have the server continue a prompt once."""
        return self._client.generate(prompt, params, request_id=request_id)

    def abort(self, request_id: str) -> None:
        """Have the server drop a request, if it can be told."""
        try:
            self._client.abort(request_id)
        except SglangError as exc:
            log.info("request %s runs to its end at the server: %s", request_id, exc)

    def forget(self, request: "_Request") -> None:
        """Take a finished request off the list."""
        with self._lock:
            self._in_flight.discard(request)

    def choice(self, sample: Sample, *, at_start: InstalledVersion) -> Choice:
        """Return a sample with the versions behind its tokens.

        Raises:
            EngineNotReadyError: it crossed an update and the server does not say where.
        """
        spans = sample.spans or ((sample.version, 0, len(sample.token_ids)),)
        if not sample.spans and sample.version != at_start.version_id:
            raise EngineNotReadyError(
                "the sample crossed an update and this release of SGLang does not say where; ask "
                "again"
            )
        return Choice(
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            text=sample.text,
            finish_reason=sample.finish_reason,
            spans=tuple(
                VersionSpan(installed=self._version_of(label), start=start, end=end)
                for label, start, end in spans
            ),
        )

    def _version_of(self, label: str) -> InstalledVersion:
        with self._lock:
            known = self._labels.get(label)
        if known is None:
            raise EngineNotReadyError(f"the server names version {label!r}, which nobody installed")
        return known

    def _write(self, write: Callable[[], None], installed: InstalledVersion | None) -> float:
        write()
        if installed is None:
            self._installed = None
            self._weights.forget_sent()
            return 0.0
        names, marks = self._weights.changed()
        folder = Path(self._spool.name) / f"{self._num_updates:06d}"
        self._num_updates += 1
        with self._lock:
            self._labels[installed.version_id] = installed
            while len(self._labels) > LABELS_KEPT:
                self._labels.popitem(last=False)
        pause_s = self._hand_over(names, folder, label=installed.version_id)
        self._weights.note_sent(marks)
        self._installed = installed
        return pause_s

    def _hand_over(self, names: Sequence[str], folder: Path, *, label: str) -> float:
        """Have the server load tensors and say the label; all of it, or nobody knows."""
        try:
            self._weights.write(names, folder)
            began = self._clock.monotonic()
            try:
                self._client.pause()
                self._update(folder, label)
            finally:
                self._client.resume()
            pause_s = self._clock.monotonic() - began
            found = self._client.weight_version()
        except (SglangError, OSError) as exc:
            raise UncertainStateError(f"the server did not take version {label}: {exc}") from exc
        finally:
            _remove(folder)
        if found != label:
            raise UncertainStateError(f"the server says version {found!r} instead of {label!r}")
        return pause_s

    def _update(self, folder: Path, label: str) -> None:
        """Load, and once more if that failed: loading the same tensors twice does no harm."""
        for tries in range(1, UPDATE_TRIES + 1):
            try:
                self._client.update_from_disk(folder, label=label)
            except SglangError:
                if tries == UPDATE_TRIES:
                    raise
            else:
                return

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        if not prompt:
            raise BadRequestError("prompt", "must hold at least one token")
        if not all(0 <= token_id < self._vocabulary_size for token_id in prompt):
            raise BadRequestError(
                "prompt", f"holds a token outside 0 to {self._vocabulary_size - 1}"
            )
        if len(prompt) + sampling.max_tokens > self._context_size:
            raise BadRequestError(
                "max_tokens",
                f"and prompt together need {len(prompt) + sampling.max_tokens} positions; "
                f"the model has {self._context_size}",
            )
        if sampling.n > self._config.max_batch:
            raise BadRequestError("n", f"must be at most {self._config.max_batch} here")


class _Request:
    """One prompt on its way: a call of the server for each choice."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        *,
        seed: int,
        at_start: InstalledVersion,
        engine: SglangEngine,
    ) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self._engine = engine
        self._at_start = at_start
        self._ids = [f"{id(self):x}-{seed:x}-{at}" for at in range(sampling.n)]
        streams = np.random.SeedSequence(seed).spawn(sampling.n)
        self._seeds = [int(stream.generate_state(1)[0]) for stream in streams]
        self._choices: dict[int, Choice] = {}
        self._lock = threading.Lock()
        self._future: Future[Generation] = Future()
        self.is_started = False
        self.calls: list[Future[None]] = []

    def start(self, pool: ThreadPoolExecutor) -> "Future[Generation]":
        """Queue the calls."""
        self._future.add_done_callback(self._end)
        self.calls = [pool.submit(self._run, index) for index in range(self._sampling.n)]
        return self._future

    def fail(self, error: RefitError) -> None:
        """End with an error unless it has ended."""
        with self._lock:
            may = not self._future.done() and self._future.set_running_or_notify_cancel()
        if may:
            self._future.set_exception(error)

    def _run(self, index: int) -> None:
        self.is_started = True
        if self._future.done():
            return
        params = _params(self._sampling, seed=self._seeds[index])
        try:
            sample = self._engine.ask(self._prompt, params, self._ids[index])
            choice = self._engine.choice(sample, at_start=self._at_start)
        except RefitError as exc:
            self.fail(exc)
            return
        with self._lock:
            self._choices[index] = choice
            is_whole = len(self._choices) == self._sampling.n
            may = (
                is_whole and not self._future.done() and self._future.set_running_or_notify_cancel()
            )
        if may:
            choices = tuple(self._choices[at] for at in range(self._sampling.n))
            self._future.set_result(Generation(prompt_token_ids=self._prompt, choices=choices))

    def _end(self, future: "Future[Generation]") -> None:
        self._engine.forget(self)
        if future.cancelled() or future.exception() is not None:
            for index, request_id in enumerate(self._ids):
                if index not in self._choices:
                    self._engine.abort(request_id)


def _params(sampling: Sampling, *, seed: int) -> Mapping[str, object]:
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": seed,
    }


def _read_tokenizer(model_dir: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    except Exception as exc:  # tokenizers raises Exception itself
        raise PreflightError(f"{model_dir} holds no usable tokenizer.json: {exc}") from exc


def _read_key(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf8").strip()
    except (OSError, ValueError) as exc:
        raise PreflightError(f"the engine's key cannot be read: {exc}") from exc


def _remove(folder: Path) -> None:
    for file in folder.glob("*"):
        file.unlink(missing_ok=True)
    if folder.exists():
        folder.rmdir()
