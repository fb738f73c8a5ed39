"""Which states a weight version has, which moves are legal, and what each state admits."""

from collections.abc import Mapping
from typing import Final

from paceline.refit.errors import PreconditionError
from paceline.refit.model import VersionState

MOVES: Final[Mapping[VersionState, frozenset[VersionState]]] = {
    VersionState.STAGING: frozenset({VersionState.READY, VersionState.RELEASING}),
    VersionState.READY: frozenset({VersionState.RELEASING}),
    VersionState.RELEASING: frozenset(),
}
"""From -> to. RELEASING is the last; its record goes away once nothing needs it."""

INITIAL: Final = frozenset({VersionState.STAGING, VersionState.READY})
"""READY only for what is complete from the start, such as a checkpoint in a bucket."""

PUBLISHABLE: Final = frozenset({VersionState.STAGING, VersionState.READY})
"""Shards may be added: the missing ones, then replicas."""

LEASABLE: Final = frozenset({VersionState.READY})
"""A reader without a live lease may take one."""

RENEWABLE: Final = frozenset({VersionState.READY, VersionState.RELEASING})
"""A live lease may be prolonged."""

EVICTABLE: Final = frozenset({VersionState.RELEASING})
"""Shards may be taken away, once no lease lives."""

_START = "[*]"


def move(uid: str, before: VersionState, after: VersionState) -> VersionState:
    """Return ``after`` if a version may go there; staying where it is is fine.

    Raises:
        PreconditionError: the move is not in the table.
    """
    if after is before or after in MOVES[before]:
        return after
    legal = ", ".join(sorted(MOVES[before])) or "nothing: it is being released"
    raise PreconditionError(
        f"version {uid!r} is {before} and cannot become {after}; from there it can become {legal}"
    )


def render_mermaid() -> str:
    """Return the state diagram of the docs, drawn from the tables."""
    edges: list[tuple[str, str]] = [(_START, state) for state in VersionState if state in INITIAL]
    edges += [(a, b) for a in VersionState for b in VersionState if b in MOVES[a]]
    edges += [(state, _START) for state in VersionState if not MOVES[state]]
    return "\n".join(["stateDiagram-v2", *(f"    {a} --> {b}" for a, b in edges)]) + "\n"
