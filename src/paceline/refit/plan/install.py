"""Which versions an engine installs next, in which order: decided from records alone.

A state of the weights is its root digest. A full version leads to its root from anywhere, a
delta from its parent's root to its own; versions with equal roots are the same weights, so a
delta also applies to what a full version of its parent's sequence left behind. A composed delta
is a delta like any other whose parent is several sequences below it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, pairwise

from paceline.refit.model import (
    FULL_FORMATS,
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
)

INSTALLABLE = FULL_FORMATS | {WeightPayloadFormat.XOR_DELTA}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The weights that an engine has."""

    sequence: int
    root_digest: str


STEPS_MAX = 64
"""Of one plan: whoever is further behind starts from a full version, or comes closer first."""


class PlanKind(StrEnum):
    """What a plan amounts to."""

    NOTHING = "nothing"
    FULL = "full"
    DELTA = "delta"
    COMPOSED = "composed"
    """One delta over several sequences."""
    CHAIN = "chain"
    """Several deltas, one after another."""
    SNAPSHOT = "snapshot"
    """A full version and what follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a step takes besides its bytes, as measured."""

    bytes_per_s: float | None = None
    """Of the way to the sources; None counts bytes only."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """The same by version uid, where sources of one are nearer than those of another."""
    step_s: float = 0.0
    """Of an install, whatever its size: leases, proofs, the pause."""

    def seconds(self, version: WeightVersion, num_bytes: int) -> float:
        """Return what a step takes; bytes where no rate is known, so that plans still compare."""
        rate = self.rates.get(version.uid, self.bytes_per_s)
        return float(num_bytes) if rate is None else num_bytes / rate + self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way that was weighed."""

    kind: PlanKind
    uids: tuple[str, ...]
    sequence: int
    payload_bytes: int
    seconds: float | None
    """As far as can be told; None where no rate is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPlan:
    """What to install, one after another; nothing if ``path`` is empty."""

    path: tuple[WeightVersion, ...]
    payload_bytes: int
    reason: str
    """A sentence for people."""
    options: tuple[Option, ...] = ()
    """The ways that were weighed, the chosen one first."""

    @property
    def kind(self) -> PlanKind:
        """What it amounts to."""
        return self.options[0].kind if self.options else PlanKind.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A version that may be part of a path, with its description at hand."""

    version: WeightVersion
    said: VersionDescription

    @property
    def is_full(self) -> bool:
        return self.version.payload_format in FULL_FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    steps: tuple[_Candidate, ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def sequence(self) -> int:
        return self.steps[-1].said.sequence if self.steps else -1

    @property
    def rank(self) -> tuple[int, float, int, int, tuple[str, ...]]:
        """Smaller is better: the newest weights, less time, fewer bytes, fewer steps, names."""
        names = tuple(step.version.uid for step in self.steps)
        return (-self.sequence, self.seconds, self.num_bytes, len(self.steps), names)

    def extended(self, step: _Candidate, costs: Costs) -> "_Route":
        num_bytes = step.said.payload_bytes
        return _Route(
            steps=(*self.steps, step),
            num_bytes=self.num_bytes + num_bytes,
            seconds=self.seconds + costs.seconds(step.version, num_bytes),
        )


def plan_install(
    versions: Iterable[WeightVersion],
    *,
    held: Holding | None,
    target: int | None = None,
    avoid: frozenset[str] = frozenset(),
    costs: Costs | None = None,
) -> InstallPlan:
    """Plan the cheapest way to the newest weights that can be reached.

    Cheap is what takes little time where rates are known, and few bytes where not. Never plans a
    version that is not newer than what is held, nor more than STEPS_MAX of them.

    Args:
        versions: those of one run of one model, in any order and state.
        held: what the engine has; None plans from nothing, so the path starts with a full one.
        target: the highest sequence to go to; None is no limit.
        avoid: uids that must not be part of the path.
        costs: what was measured.
    """
    costs = costs or Costs()
    newer = [
        each
        for each in _candidates(versions)
        if (held is None or each.said.sequence > held.sequence)
        and (target is None or each.said.sequence <= target)
    ]
    allowed = [each for each in newer if each.version.uid not in avoid]
    deltas = [each for each in allowed if not each.is_full]
    start = {} if held is None else {held.root_digest: _Route()}
    chain = _Route() if held is None else _best_route(deltas, start, costs)
    fresh = _best_route(allowed, {}, costs)
    best = min(chain, fresh, key=lambda route: route.rank)
    whole = _best_route([each for each in allowed if each.is_full], {}, costs)
    return InstallPlan(
        path=tuple(step.version for step in best.steps),
        payload_bytes=best.num_bytes,
        reason=_reason(best, other=fresh if best is chain else chain, newer=newer, held=held),
        options=_options([best, chain, fresh, whole], held=held, costs=costs),
    )


def newest_sequence(versions: Iterable[WeightVersion]) -> int:
    """Return the highest sequence that is READY, -1 for none."""
    return max((each.said.sequence for each in _candidates(versions)), default=-1)


def _candidates(versions: Iterable[WeightVersion]) -> Sequence[_Candidate]:
    return [
        _Candidate(version=version, said=version.description)
        for version in versions
        if version.state is VersionState.READY
        and version.description is not None
        and _is_ours(version)
    ]


def _is_ours(version: WeightVersion) -> bool:
    """Leave out checkpoints that are files alone, without a source that tells where tensors are."""
    is_checkpoint = version.payload_format is WeightPayloadFormat.FULL_HF_CHECKPOINT
    return version.payload_format in INSTALLABLE and not (
        is_checkpoint and not version.expected_source_slots
    )


def _options(routes: Sequence[_Route], *, held: Holding | None, costs: Costs) -> tuple[Option, ...]:
    """Return the different ways among these, each once."""
    found = dict.fromkeys(route for route in routes if route.steps)
    return tuple(
        Option(
            kind=_kind(route, held),
            uids=tuple(step.version.uid for step in route.steps),
            sequence=route.sequence,
            payload_bytes=route.num_bytes,
            seconds=route.seconds if _all_known(route, costs) else None,
        )
        for route in found
    )


def _all_known(route: _Route, costs: Costs) -> bool:
    names = {step.version.uid for step in route.steps}
    return costs.bytes_per_s is not None or names <= costs.rates.keys()


def _kind(route: _Route, held: Holding | None) -> PlanKind:
    if route.steps[0].is_full:
        return PlanKind.FULL if len(route.steps) == 1 else PlanKind.SNAPSHOT
    if len(route.steps) > 1:
        return PlanKind.CHAIN
    before = -1 if held is None else held.sequence
    return PlanKind.DELTA if route.sequence == before + 1 else PlanKind.COMPOSED


def _best_route(
    candidates: Iterable[_Candidate], start: Mapping[str, _Route], costs: Costs
) -> _Route:
    """Return the best route over ``candidates`` from the roots of ``start``, or an empty one.

    Sequences only rise along a route, so one pass in their order sees every base before what
    stands on it, and a cycle of digests cannot trap it.
    """
    by_root = dict(start)
    best = _Route()
    ordered = sorted(candidates, key=lambda each: (each.said.sequence, each.version.uid))
    for _, group in groupby(ordered, key=lambda each: each.said.sequence):
        found = []
        for each in group:
            base = _Route() if each.is_full else by_root.get(each.said.parent_root or "")
            if base is not None and len(base.steps) < STEPS_MAX:
                found.append(base.extended(each, costs))
        best = min([best, *found], key=lambda route: route.rank)
        for route in found:
            root = route.steps[-1].said.root_digest
            known = by_root.get(root)
            if known is None or _cost(route) < _cost(known):
                by_root[root] = route
    return best


def _cost(route: _Route) -> tuple[float, int, int]:
    return (route.seconds, route.num_bytes, len(route.steps))


def _reason(
    best: _Route, *, other: _Route, newer: Sequence[_Candidate], held: Holding | None
) -> str:
    have = "nothing is installed" if held is None else f"sequence {held.sequence} is installed"
    if not newer:
        return f"{have} and nothing newer is READY"
    newest = max(newer, key=lambda each: (each.said.sequence, each.version.uid))
    parts = [f"{have}; {_shown(best)}" if best.steps else have]
    if other.steps and other.sequence == best.sequence:
        parts.append(f"{_shown(other)} would cost more")
    if best.sequence < newest.said.sequence:
        parts.append(_unreachable(newest))
    return "; ".join(parts)


def _shown(route: _Route) -> str:
    num_full = sum(step.is_full for step in route.steps)
    num_deltas = len(route.steps) - num_full
    words = [f"full version {route.steps[0].version.uid}"] if num_full else []
    if num_deltas:
        composed = "composed " if num_deltas == 1 and _skips(route) else ""
        words.append(f"{num_deltas} {composed}delta{'s' if num_deltas > 1 else ''}")
    return f"{' and '.join(words)} to sequence {route.sequence} ({route.num_bytes:,} bytes)"


def _skips(route: _Route) -> bool:
    """Say whether a delta after a full version goes over more than one sequence."""
    return any(
        after.said.sequence > before.said.sequence + 1 for before, after in pairwise(route.steps)
    )


def _unreachable(newest: _Candidate) -> str:
    uid, sequence = newest.version.uid, newest.said.sequence
    if newest.is_full:
        return f"sequence {sequence} ({uid}) was refused here and is not tried now"
    return (
        f"sequence {sequence} ({uid}) cannot be reached: it or a version below it was refused, "
        f"or no READY chain or full version leads to its parent {newest.said.parent_root}"
    )
