"""What a rollout engine signs: verified weights become its parameters, and it generates tokens.

``GeneratorEngineAdapter`` is the half that the receiver needs, ``RolloutEngine`` adds what the
serving routes need. The values of the second half are also what the rollout client speaks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline.core.errors import UsageError
from paceline.refit.errors import BadRequestError
from paceline.refit.manifest.v1 import Lora
from paceline.refit.model import TensorBuffer, TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledVersion:
    """What the live parameters are, exactly."""

    version_id: str
    sequence: int
    root_digest: str
    model_root: str = ""
    """Of the weights below, where the version is a LoRA; the version itself names it too."""


class GeneratorEngineAdapter(Protocol):
    """The live parameters of one rollout engine.

    The receiver calls from its own thread. Between calls the engine may run forward passes at
    any time; inside ``at_safe_point`` it runs none.
    """

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return every distinct tensor by canonical name, as writable views of the live bytes.

        The same memory each time, for the life of the engine, or until its two sets of weights
        are exchanged (``SupportsSpareWeights``). Tied names appear once, see ``tensor_aliases``.
        """
        ...

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return further names of a tensor -> the canonical one."""
        ...

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Run ``write`` while no forward pass runs and return the seconds no pass could start.

        If ``write`` returns, ``installed`` is what the engine serves from the next pass on
        (None: it must refuse to serve). If it raises, the label stays and the error passes;
        after an UncertainStateError there is no label any more, before another pass can start.

        Raises:
            DeadlineExceededError: no safe point within ``timeout_s``; ``write`` did not run.
        """
        ...

    def installed(self) -> InstalledVersion | None:
        """Return what is served, None before the first install or in an uncertain state."""
        ...


@runtime_checkable
class SupportsDeviceTensors(Protocol):
    """An engine with parameters on a device; their ``live_tensors`` are a copy in host memory.

    The receiver proves versions against that copy, writes changed elements to both, and reads the
    device back whenever it reads all live bytes.
    """

    def device_tensors(self) -> Mapping[str, Any]:
        """Return the torch tensors, contiguous, by their names in ``live_tensors``.

        The same memory each time; equal to the copy in every bit between installs. None for an
        engine that happens to run in host memory.
        """
        ...


def device_tensors_of(engine: GeneratorEngineAdapter) -> Mapping[str, Any]:
    """Return what an engine has on a device; nothing for one in host memory."""
    return engine.device_tensors() if isinstance(engine, SupportsDeviceTensors) else {}


class SpareWeights(Protocol):
    """A second set of an engine's weights, which no pass reads."""

    def tensors(self) -> Mapping[str, TensorBuffer]:
        """Return writable views of the set that is not live now, named as ``live_tensors``."""
        ...

    def exchange(self) -> None:
        """Make this set the live one and the live one the spare, in one step.

        Called inside a safe point; takes no longer for a larger model, and cannot fail half-way.
        """
        ...


@runtime_checkable
class SupportsSpareWeights(Protocol):
    """An engine that may hold its weights twice.

    Then the receiver writes and proves a version in the spare set while the engine serves, and all
    that is left for the safe point is to exchange the two. ``live_tensors`` are the same memory
    until then.
    """

    def spare_weights(self) -> SpareWeights | None:
        """Return the second set; None where weights are held once. The same for life."""
        ...


def spare_of(engine: "GeneratorEngineAdapter") -> SpareWeights | None:
    """Return an engine's second set of weights, if it has one."""
    return engine.spare_weights() if isinstance(engine, SupportsSpareWeights) else None


class TakesLoras(Protocol):
    """An engine's part that holds weights which stay, and LoRAs of them that come as versions."""

    @property
    def model_root(self) -> str:
        """The root digest of the weights that stay."""
        ...

    def make_room(self, lora: Lora | None, tensors: Sequence[TensorEntry]) -> bool:
        """Make the spare set one for such a LoRA; True if its tensors are other ones now.

        Nothing that is live changes, and no memory is taken for what does not fit.

        Raises:
            VerifyError: no LoRA, of other weights, or of modules that are not there or not so.
        """
        ...


@runtime_checkable
class SupportsLoras(Protocol):
    """An engine that may be one for LoRAs; it has a spare set then (``SupportsSpareWeights``)."""

    def lora_sets(self) -> TakesLoras | None:
        """Return the part that takes them; None where versions are whole models."""
        ...


def loras_of(engine: "GeneratorEngineAdapter") -> TakesLoras | None:
    """Return an engine's part that takes LoRAs, if it is an engine for them."""
    return engine.lora_sets() if isinstance(engine, SupportsLoras) else None


class EngineState(StrEnum):
    """What a rollout engine tells whoever wants to send it work."""

    LOADING = "loading"
    """No version is installed yet."""
    READY = "ready"
    DRAINING = "draining"
    """It finishes what it has and takes nothing new."""
    STALE = "stale"
    """What it serves is older than the bound, or nobody could say for too long."""
    FAILED = "failed"
    """Its parameters are uncertain; it refuses until a full version is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """An engine's state, what it has installed, and why it is so."""

    state: EngineState
    installed: InstalledVersion | None
    reason: str = ""


THREADS_MAX = 1024
"""More than any machine has cores; the math library ends the process when it cannot start them."""

NAMES = ("memory", "checkpoint")
"""How versions may call tensors."""

WEIGHTS = ("auto", "once", "twice")
"""How often an engine may be told to hold its weights."""

TEMPERATURE_MIN = 1e-5
"""Below it logits divided by it leave float32, and one request's NaN would cost its whole batch."""

PROMPT_STRIDE = 2**32
"""Seeds of one call's prompts are this far apart, far beyond the choices of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; checked when made, so that an engine never meets a bad one."""

    max_tokens: int = 16
    temperature: float = 1.0
    """0 takes the most likely token; otherwise at least TEMPERATURE_MIN."""
    top_p: float = 1.0
    top_k: int = 0
    """Only the k most likely tokens; 0 is no limit."""
    n: int = 1
    """Choices per prompt."""
    seed: int | None = None
    """Makes the choices repeatable with the same weights; each choice has its own stream."""
    stop: tuple[str, ...] = ()
    """Text that ends a choice. Its tokens stay in the choice, its text does not."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end a choice, beside the model's own end token; they stay in it."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("n", self.n >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or TEMPERATURE_MIN <= self.temperature < math.inf,
                f"0, or finite and at least {TEMPERATURE_MIN:g}",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (no limit) or more"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("stop", all(self.stop), "made of texts that are not empty"),
        )
        for each, is_good, wanted in checks:
            if not is_good:
                raise BadRequestError(each, f"must be {wanted}")

    def for_prompt(self, index: int) -> "Sampling":
        """Return the same with a seed of its own for the ``index``-th of several prompts.

        Otherwise equal prompts of one call would get equal choices.
        """
        if self.seed is None:
            return self
        return replace(self, seed=(self.seed + index * PROMPT_STRIDE) % 2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from; the implementation is picked by name."""

    model_dir: Path
    """A directory with ``config.json`` and a tokenizer; weights come as versions."""
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = 1
    """Of the math library."""
    max_batch: int = 32
    """Choices that are generated together."""
    max_waiting: int = 256
    """Prompts that may wait for a place; more are refused."""
    reproducible: bool = False
    """A choice gets the same tokens whoever runs beside it, to the last bit of its logits, at the
    price of a pass of its own. Otherwise rounding may differ with the batch, as everywhere."""
    names: str = "memory"
    """How versions call tensors: ``memory``, as the trainer's own ``state_dict`` does, or
    ``checkpoint``, as files do, which have a tensor for each expert of a mixture."""
    weights: str = "auto"
    """How often they are held: ``once``; ``twice``, so that an update pauses the engine for
    microseconds; ``auto`` is twice where ``memory_bytes`` allow it."""
    memory_bytes: int = 0
    """What this process may still take, for ``auto``; 0 is unknown."""
    draft_dir: Path | None = None
    """A directory like ``model_dir``, of a draft model whose weights are part of every version,
    under names that begin with ``draft.``; None: there is none."""
    quantised: Mapping[str, str] = field(default_factory=dict)
    """Glob over tensor names -> ``fp8-block`` or ``int8-channel``: what the trainer quantises, and
    codes are live here."""
    lora: bool = False
    """The weights are those in ``model_dir``, and versions are LoRAs of them."""
    url: str = ""
    """Of a server that runs already, for engines that drive one."""
    key_file: Path | None = None
    """Holds that server's key, where it wants one."""

    def __post_init__(self) -> None:
        for each in ("threads", "max_batch", "max_waiting"):
            if getattr(self, each) < 1:
                raise UsageError(f"{each} must be at least 1")
        for each, words in (("weights", WEIGHTS), ("names", NAMES)):
            found = getattr(self, each)
            if found not in words:
                raise UsageError(f"{each} is {found!r}; it can be {', '.join(words)}")
        if self.lora and (self.draft_dir is not None or self.quantised):
            raise UsageError("with LoRAs there are no draft models and no codes: leave one out")
        if self.threads > THREADS_MAX:
            raise UsageError(f"threads must be at most {THREADS_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Which weights produced tokens ``start`` (inclusive) to ``end`` (exclusive) of a choice."""

    installed: InstalledVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One continuation of a prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithm of each token's probability under softmax(logits / temperature), before
    top_k and top_p cut anything off: the behaviour policy that importance sampling divides by.
    Greedy choices report softmax(logits)."""
    text: str
    finish_reason: str
    """stop | length"""
    spans: tuple[VersionSpan, ...]
    """In order, without gaps, from 0 to the number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """All choices for one prompt."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePiece:
    """Tokens of one choice that have come since the piece before."""

    index: int
    """Which of the prompt's choices."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    """Of all pieces together: the choice's text."""
    spans: tuple[VersionSpan, ...]
    """Of these tokens, counted from the first token of the choice."""
    finish_reason: str | None = None
    """Set in the last piece of a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How much an engine has to do."""

    running: int
    """Choices in the batch."""
    waiting: int
    """Prompts in the queue."""


class RolloutEngine(GeneratorEngineAdapter, Protocol):
    """An engine that also generates. Every method may be called from any thread."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special ones added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        ...

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        """Queue one prompt and return at once. Cancelling the future frees its place.

        The future raises EngineNotReadyError when the engine stops serving meanwhile, and
        GenerationError when the model fails.

        Raises:
            BadRequestError: empty or too long a prompt, an unknown token, too many choices.
            EngineBusyError: the queue is full; nothing was queued.
            EngineNotReadyError: nothing is installed, or the engine is closed.
        """
        ...

    def load(self) -> EngineLoad:
        """Return what runs and what waits; no I/O."""
        ...

    def close(self, *, timeout_s: float) -> None:
        """Stop; what has not finished fails with EngineNotReadyError. Idempotent."""
        ...


OnPiece = Callable[[ChoicePiece], None]
"""Called from the engine's thread; must return at once."""


PROVEN = "live-bytes"
"""How a report's root digest was proven: it was computed from the live parameters."""


@runtime_checkable
class SaysHowProven(Protocol):
    """An engine whose live bytes are not all within our reach."""

    @property
    def proof(self) -> str:
        """The word for how it is known that the engine holds what was installed."""
        ...


def proof_of(engine: GeneratorEngineAdapter) -> str:
    """Return the word for how an engine's weights are proven."""
    return engine.proof if isinstance(engine, SaysHowProven) else PROVEN


@runtime_checkable
class SaysHowHeld(Protocol):
    """An engine that can say how often it holds its weights."""

    @property
    def weights_held(self) -> str:
        """Return ``once`` or ``twice``."""
        ...


def held_of(engine: GeneratorEngineAdapter) -> str:
    """Return how often an engine holds its weights; empty where it cannot say."""
    return engine.weights_held if isinstance(engine, SaysHowHeld) else ""


@runtime_checkable
class SupportsStreaming(Protocol):
    """Tells of tokens while a choice grows."""

    def submit_stream(
        self, prompt: Sequence[int], sampling: Sampling, on_piece: OnPiece
    ) -> "Future[Generation]":
        """Do what RolloutEngine.submit does and call ``on_piece`` with every token on the way.

        The last piece of every choice comes before the future is done.
        """
        ...


def submit_stream(
    engine: RolloutEngine, prompt: Sequence[int], sampling: Sampling, on_piece: OnPiece
) -> "Future[Generation]":
    """Submit to an engine that streams, or have each choice told as one piece when all are done."""
    if isinstance(engine, SupportsStreaming):
        return engine.submit_stream(prompt, sampling, on_piece)
    told: Future[Generation] = Future()
    inner = engine.submit(prompt, sampling)

    def tell(done: "Future[Generation]") -> None:
        if done.cancelled():
            told.cancel()
            return
        error = done.exception()
        if error is None:
            for index, choice in enumerate(done.result().choices):
                on_piece(whole_piece(index, choice))
        if not told.set_running_or_notify_cancel():
            return
        if error is None:
            told.set_result(done.result())
        else:
            told.set_exception(error)

    told.add_done_callback(lambda future: inner.cancel() if future.cancelled() else None)
    inner.add_done_callback(tell)
    return told


def whole_piece(index: int, choice: Choice) -> ChoicePiece:
    """Return a finished choice as one piece."""
    return ChoicePiece(
        index=index,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        text=choice.text,
        spans=choice.spans,
        finish_reason=choice.finish_reason,
    )
