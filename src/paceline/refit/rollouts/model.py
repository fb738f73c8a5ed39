"""What is asked of rollout engines and what comes back: plain values."""

from dataclasses import dataclass, field

from paceline.core.errors import UsageError
from paceline.core.retry import RetryPolicy
from paceline.refit.errors import RefitError
from paceline.refit.generators.protocol import Choice, Sampling, VersionSpan
from paceline.refit.model import InstalledReport
from paceline.refit.transports.routes import Routes


class EngineFailedError(RefitError):
    """An engine died, broke off or answered nonsense; another may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice of one prompt, with everything that training needs to know of its making."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    spans: tuple[VersionSpan, ...]
    staleness: int
    """Newest sequence when the answer came, less the oldest that produced a token; at least 0."""
    engine_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of a choice that is still growing; the last one of a choice says why it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    spans: tuple[VersionSpan, ...]
    """Counted from the first token of the whole choice."""
    finish_reason: str | None
    engine_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Who could be asked, and what is the newest version, at one moment."""

    reports: tuple[InstalledReport, ...]
    newest: int
    """Highest sequence published; -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One prompt, and who may answer it."""

    prompt: tuple[int, ...]
    sampling: Sampling
    version_id: str | None = None
    """Only engines that serve exactly this version; its age is then no matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How fresh completions must be and how patient the client is."""

    max_staleness: int
    """How many sequences behind the newest an engine may be when it is asked."""
    token: str = field(repr=False)
    """The run's data token."""
    model_name: str
    parallel: int = 16
    """Prompts in flight."""
    engine_wait_s: float = 120.0
    """How long to wait for an engine that qualifies."""
    request_timeout_s: float = 120.0
    """For one prompt at one engine."""
    avoid_s: float = 3.0
    """How long an engine that failed is left alone."""
    busy_s: float = 0.3
    """How long one that is busy or not ready is."""
    poll_interval_s: float = 0.1
    answer_bytes_max: int = 64 * 2**20
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(attempts=8, delay_s_max=5.0))
    """For one prompt over all engines; a first try at another engine needs no delay."""
    affinity_tokens: int = 64
    """Prompts that begin with the same so many tokens prefer the same engine, whose prefix cache
    knows them; 0 prefers nobody."""
    affinity_slack: int = 0
    """So many more choices than the least loaded engine the preferred one may have in flight."""
    hedge_after_s: float | None = None
    """After so long without an answer a second engine is asked too; None: never."""
    hedge_share: float = 0.1
    """At most this share of the prompts is asked twice: a slow fleet is not helped by more work."""

    routes: Routes = field(default_factory=Routes)
    """Shorter ways to engines than the addresses that they tell."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.poll_interval_s <= 0 or self.parallel < 1:
            raise UsageError(
                "max_staleness must be at least 0, parallel at least 1, poll_interval_s above 0"
            )
        if self.affinity_tokens < 0 or self.affinity_slack < 0 or not 0 <= self.hedge_share <= 1:
            raise UsageError(
                "affinity_tokens and affinity_slack must be at least 0, hedge_share from 0 to 1"
            )


def oldest_sequence(choice: Choice) -> int:
    """Return the sequence of the oldest weights behind a choice's tokens, -1 for no token."""
    return min((span.installed.sequence for span in choice.spans), default=-1)
