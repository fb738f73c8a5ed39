"""What an engine may say of itself, and which versions it leaves alone for now: no I/O."""

from dataclasses import dataclass, replace

from paceline.core.retry import RetryPolicy
from paceline.refit.generators.protocol import EngineHealth, EngineState, InstalledVersion

TRIES_COUNTED_MAX = 30
"""Beyond this the delay has long reached its cap, and powers would only overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessBound:
    """From when on an engine stops serving because its weights are too old."""

    versions: int | None = None
    """How many sequences behind the newest READY one it may be; None is no limit."""
    silence_s: float = 60.0
    """How long nobody could say which one is the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a receiver knows at one moment."""

    installed: InstalledVersion | None
    newest: int
    """Highest READY sequence seen, -1 for none."""
    silent_s: float
    """Since the control service last answered."""
    is_draining: bool = False
    updating: str = ""
    """Why nothing new is taken until a version is in."""
    astray: str = ""
    """Why what is installed is not what this engine is pinned to, while it is not."""
    is_pinned: bool = False
    """It serves what it is pinned to, however old that is."""
    uncertain: str = ""
    """Why the live weights are no version, while they are none."""
    crash: str = ""
    """Why the receiver has stopped for good."""


def judge(seen: Observation, bound: StalenessBound) -> EngineHealth:
    """Return the state that the observation means, the gravest first."""
    installed, limit = seen.installed, bound.versions
    behind = 0 if installed is None else seen.newest - installed.sequence
    silence = f"the control service is silent since {seen.silent_s:.0f} s"
    lag = f"{behind} versions behind, at most {limit} are allowed"
    causes = (
        (seen.crash != "", EngineState.FAILED, f"the receiver stopped: {seen.crash}"),
        (seen.is_draining, EngineState.DRAINING, "the engine is shutting down"),
        (seen.uncertain != "", EngineState.FAILED, seen.uncertain),
        (installed is None, EngineState.LOADING, "no version is installed yet"),
        (seen.updating != "", EngineState.DRAINING, seen.updating),
        (seen.astray != "", EngineState.STALE, seen.astray),
        (seen.silent_s > bound.silence_s, EngineState.STALE, silence),
        (limit is not None and behind > limit and not seen.is_pinned, EngineState.STALE, lag),
    )
    for applies, state, reason in causes:
        if applies:
            return EngineHealth(state=state, installed=installed, reason=reason)
    return EngineHealth(state=EngineState.READY, installed=installed)


class Refusals:
    """Versions that failed here, each left alone for longer every time."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._tries: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def add(self, uid: str, *, now_s: float, chance: float) -> None:
        """Count a failure of ``uid``; the policy's number of attempts is no limit here."""
        tries = min(self._tries.get(uid, 0) + 1, TRIES_COUNTED_MAX)
        self._tries[uid] = tries
        delay_s = backoff_s(self._policy, tries, chance=chance)
        self._until[uid] = now_s + delay_s

    def current(self, *, now_s: float) -> frozenset[str]:
        """Return the uids to avoid now."""
        return frozenset(uid for uid, until in self._until.items() if now_s < until)

    def keep_only(self, uids: frozenset[str]) -> None:
        """Forget versions that are not there any more."""
        for gone in self._tries.keys() - uids:
            del self._tries[gone], self._until[gone]


def backoff_s(policy: RetryPolicy, tries: int, *, chance: float) -> float:
    """Return the policy's delay for something that is tried for ever."""
    endless = replace(policy, attempts=TRIES_COUNTED_MAX + 1)
    delay_s = endless.delay_s(min(tries, TRIES_COUNTED_MAX), chance=chance)
    return policy.delay_s_max if delay_s is None else delay_s
