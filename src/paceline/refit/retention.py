"""Which versions may go: a publisher's own, or a model's on the control service's behalf.

Both are decided from what is kept and nothing else.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.refit.model import RetentionPolicy, VersionState, WeightPayloadFormat, WeightVersion


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


def plan_releases(
    versions: Sequence[WeightVersion], *, policy: RetentionPolicy, leased: Collection[str]
) -> tuple[str, ...]:
    """Return the uids of READY versions that the policy retires, oldest first.

    What stays: the newest ``keep_last``, the anchors that the policy names, whatever is leased,
    and everything that one of these or a STAGING version is built on, down to a full version.

    Args:
        versions: all of one model, in the order of creation.
        policy: with ``keep_last`` 0 nothing is retired.
        leased: uids that somebody holds.
    """
    if policy.keep_last == 0:
        return ()
    ready = [version for version in versions if version.state is VersionState.READY]
    kept = {version.uid for version in ready[-policy.keep_last :]} | set(leased)
    kept |= {v.uid for v in versions if v.state is VersionState.STAGING}
    kept |= _anchors(ready, policy)
    bases = {version.uid: version.base_version_id for version in versions}
    for uid in tuple(kept):
        base = bases.get(uid)
        while base is not None and base not in kept:
            kept.add(base)
            base = bases.get(base)
    return tuple(version.uid for version in ready if version.uid not in kept)


def _anchors(ready: Sequence[WeightVersion], policy: RetentionPolicy) -> set[str]:
    """Return the uids of full versions that stay for those who start late."""
    anchors: set[str] = set()
    replay_bytes = 0
    for version in ready:
        described = version.description
        if described is None:
            continue
        if version.payload_format is WeightPayloadFormat.XOR_DELTA:
            replay_bytes += described.payload_bytes
            continue
        is_due = policy.anchors_every > 0 and described.sequence % policy.anchors_every == 0
        is_worth = policy.anchor_cost > 0 and (
            not anchors or replay_bytes >= policy.anchor_cost * described.full_bytes
        )
        if is_due or is_worth:
            anchors.add(version.uid)
            replay_bytes = 0
    return anchors
