"""Which versions a publisher may let go: decided from what is kept, nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVersion:
    """A READY version that this publisher serves."""

    uid: str
    sequence: int
    is_full: bool


def plan_retention(kept: Sequence[KeptVersion], *, keep_old: int) -> tuple[str, ...]:
    """Return the uids to release, oldest first.

    Whoever joins late starts at the newest full version, and whoever follows needs the deltas
    after it; the base of the next delta is never older than that. So only versions of an
    earlier sequence may go, and of these the newest ``keep_old`` stay for readers on their way.
    """
    fulls = [version.sequence for version in kept if version.is_full]
    if not fulls:
        return ()
    old = sorted(
        (version for version in kept if version.sequence < max(fulls)),
        key=lambda version: (version.sequence, version.uid),
    )
    return tuple(version.uid for version in old[: max(0, len(old) - keep_old)])
