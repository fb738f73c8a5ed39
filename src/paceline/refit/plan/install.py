"""Which versions an engine installs next, in which order: decided from records alone.

A state of the weights is its root digest. A full version leads to its root from anywhere, a
delta from its parent's root to its own; versions with equal roots are the same weights, so a
delta also applies to what a full version of its parent's sequence left behind.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from paceline.refit.model import (
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
)

INSTALLABLE = frozenset({WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA})


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The weights that an engine has."""

    sequence: int
    root_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPlan:
    """What to install, one after another; nothing if ``path`` is empty."""

    path: tuple[WeightVersion, ...]
    payload_bytes: int
    reason: str
    """A sentence for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A version that may be part of a path, with its description at hand."""

    version: WeightVersion
    said: VersionDescription

    @property
    def is_full(self) -> bool:
        return self.version.payload_format is WeightPayloadFormat.FULL_TENSOR


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    steps: tuple[_Candidate, ...] = ()
    num_bytes: int = 0

    @property
    def sequence(self) -> int:
        return self.steps[-1].said.sequence if self.steps else -1

    @property
    def rank(self) -> tuple[int, int, int, tuple[str, ...]]:
        """Smaller is better: the newest weights, then fewer bytes, fewer steps, earlier names."""
        names = tuple(step.version.uid for step in self.steps)
        return (-self.sequence, self.num_bytes, len(self.steps), names)

    def extended(self, step: _Candidate) -> "_Route":
        return _Route(steps=(*self.steps, step), num_bytes=self.num_bytes + step.said.payload_bytes)


def plan_install(
    versions: Iterable[WeightVersion],
    *,
    held: Holding | None,
    target: int | None = None,
    avoid: frozenset[str] = frozenset(),
) -> InstallPlan:
    """Plan the cheapest way, in bytes, to the newest weights that can be reached.

    Never plans a version that is not newer than what is held.

    Args:
        versions: those of one run of one model, in any order and state.
        held: what the engine has; None plans from nothing, so the path starts with a full one.
        target: the highest sequence to go to; None is no limit.
        avoid: uids that must not be part of the path.
    """
    newer = [
        each
        for each in _candidates(versions)
        if (held is None or each.said.sequence > held.sequence)
        and (target is None or each.said.sequence <= target)
    ]
    allowed = [each for each in newer if each.version.uid not in avoid]
    deltas = [each for each in allowed if not each.is_full]
    chain = _Route() if held is None else _best_route(deltas, {held.root_digest: _Route()})
    fresh = _best_route(allowed, {})
    best = min(chain, fresh, key=lambda route: route.rank)
    return InstallPlan(
        path=tuple(step.version for step in best.steps),
        payload_bytes=best.num_bytes,
        reason=_reason(best, other=fresh if best is chain else chain, newer=newer, held=held),
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
        and version.payload_format in INSTALLABLE
    ]


def _best_route(candidates: Iterable[_Candidate], start: Mapping[str, _Route]) -> _Route:
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
            if base is not None:
                found.append(base.extended(each))
        best = min([best, *found], key=lambda route: route.rank)
        for route in found:
            root = route.steps[-1].said.root_digest
            known = by_root.get(root)
            if known is None or _cost(route) < _cost(known):
                by_root[root] = route
    return best


def _cost(route: _Route) -> tuple[int, int]:
    return (route.num_bytes, len(route.steps))


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
        words.append(f"{num_deltas} delta{'s' if num_deltas > 1 else ''}")
    return f"{' and '.join(words)} to sequence {route.sequence} ({route.num_bytes:,} bytes)"


def _unreachable(newest: _Candidate) -> str:
    uid, sequence = newest.version.uid, newest.said.sequence
    if newest.is_full:
        return f"sequence {sequence} ({uid}) was refused here and is not tried now"
    return (
        f"sequence {sequence} ({uid}) cannot be reached: it or a version below it was refused, "
        f"or no READY chain or full version leads to its parent {newest.said.parent_root}"
    )
