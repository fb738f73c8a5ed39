"""A trainer that starts again: does it have the weights that its run published last?

If it can prove that it has, the chain goes on. If not, whoever looks at the run is told, and no
version says that it follows from one that it does not follow from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.refit.errors import PublishError
from paceline.refit.model import (
    TrainerStagingMode,
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
)
from paceline.refit.publisher.values import Head, PublisherOptions, WhenUnproven, sequence_of
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.protocol import SupportsChain, TrainerEngineAdapter

CONTINUED: Final = "chain.continued"
BROKEN: Final = "chain.broken"
RootOfAll = Callable[[str, str], str]
"""Takes the last version's uid and this process's root; returns that of all processes together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where a publisher starts."""

    run_id: str
    next_sequence: int = 0
    head: Head | None = None
    """What the next version follows from; None: from nothing."""
    event: str = ""
    """What to tell; empty at the beginning of a run."""
    last: WeightVersion | None = None
    """What the run published last."""
    root_digest: str = ""
    """What the trainer has."""
    reason: str = ""

    def to_fields(self) -> dict[str, object]:
        """Return the fields of the event."""
        return {
            "run_id": self.run_id,
            "sequence": self.next_sequence,
            "last_version_id": "" if self.last is None else self.last.uid,
            "root_digest": self.root_digest,
            "reason": self.reason,
        }


def last_version(versions: Sequence[WeightVersion], run_id: str) -> WeightVersion | None:
    """Return the newest state of a run that came out, by the name that others build on."""
    ready = [
        version
        for version in versions
        if version.state is VersionState.READY
        and version.description is not None
        and version.description.run_id == run_id
        and "-from-" not in version.uid
    ]
    return max(ready, key=lambda each: (_said(each).sequence, -len(each.uid)), default=None)


def begin(
    versions: Sequence[WeightVersion],
    *,
    run_id: str,
    root_digest: str,
    policy: WhenUnproven,
    slot_root: str = "",
) -> Beginning:
    """Decide where to start, given what the trainer has and what the run has published.

    Args:
        versions: what the run has.
        run_id: which one that is.
        root_digest: of all weights; empty: several processes could not say it together.
        policy: what becomes of other weights.
        slot_root: of this process's part of them; empty: it has all.

    Raises:
        PublishError: the weights are others than the last ones, and the policy is to refuse.
    """
    next_sequence = 1 + max((sequence_of(each.uid, run_id) for each in versions), default=-1)
    last = last_version(versions, run_id)
    if last is None:
        return Beginning(run_id=run_id, next_sequence=next_sequence)
    said = _said(last)
    if said.root_digest == root_digest:
        return Beginning(
            run_id=run_id,
            next_sequence=next_sequence,
            head=Head(uid=last.uid, root_digest=root_digest, slot_root=slot_root or root_digest),
            event=CONTINUED,
            last=last,
            root_digest=root_digest,
            reason=f"the weights are those of {last.uid}",
        )
    reason = _difference(versions, last, root_digest)
    if policy is WhenUnproven.REFUSE:
        raise PublishError(
            f"{reason}; load the weights of step {said.step}, take a new run id, or let the chain "
            "start anew (when_unproven: anchor)"
        )
    is_new = policy is WhenUnproven.NEW_RUN
    return Beginning(
        run_id=_free_run_id(versions, run_id) if is_new else run_id,
        next_sequence=0 if is_new else next_sequence,
        event=BROKEN,
        last=last,
        root_digest=root_digest,
        reason=reason,
    )


def alone(last_version_id: str, root_digest: str) -> str:
    """Return the root digest of all weights, where one process has them."""
    return root_digest


def take_up(
    versions: Sequence[WeightVersion],
    trainer: TrainerEngineAdapter,
    options: PublisherOptions,
    *,
    root_of_all: RootOfAll = alone,
) -> Beginning:
    """Compare what the trainer has with what its run published last, and decide where to start.

    Equal weights become the base of the next delta; of several processes, if all have them.

    Raises:
        StagingError: the weights cannot be kept still.
        ControlError: the control service does not answer, or refuses.
        PublishError: they are others, and the policy is to refuse.
    """
    run_id, policy = options.run_id, options.when_unproven
    last = last_version(versions, run_id)
    if last is None:
        root_of_all("", "")
        return begin(versions, run_id=run_id, root_digest="", policy=policy)
    assert isinstance(trainer, SupportsChain)  # noqa: S101 - the publisher has seen to it
    host = TrainerStagingMode.COPY_TO_HOST
    staged = trainer.stage_shard(
        tensors=None,
        staging_mode=host if host in trainer.supported_staging_modes else options.staging_mode,
        payload_format=WeightPayloadFormat.FULL_TENSOR,
    )
    try:
        buffers = staged.buffer_owner
        if not isinstance(buffers, StagedBuffers):
            raise TypeError(f"the trainer adapter staged a {type(buffers).__name__}")
        slot_root = buffers.manifest.root_digest
        found = begin(
            versions,
            run_id=run_id,
            root_digest=root_of_all(last.uid, slot_root),
            policy=policy,
            slot_root=slot_root,
        )
        if found.head is not None and options.wanted is WeightPayloadFormat.XOR_DELTA:
            trainer.commit_staged(staged)
        return found
    finally:
        trainer.release_staged(staged)


def _difference(versions: Sequence[WeightVersion], last: WeightVersion, root_digest: str) -> str:
    if not root_digest:
        return (
            f"not every process of this trainer has said that it starts after {last.uid}; start "
            "all of them together"
        )
    run_id = _said(last).run_id
    same = [
        each
        for each in versions
        if each.description is not None
        and each.description.run_id == run_id
        and each.description.root_digest == root_digest
    ]
    if same:
        older = max(same, key=lambda each: _said(each).sequence)
        have = f"those of {older.uid} (step {_said(older).step})"
    else:
        have = f"{root_digest[:12]}, which the run has no version of"
    return f"the trainer starts with weights that are {have}, not those of {last.uid}"


def _free_run_id(versions: Sequence[WeightVersion], run_id: str) -> str:
    used = {each.description.run_id for each in versions if each.description is not None}
    number = 2
    while f"{run_id}.{number}" in used:
        number += 1
    return f"{run_id}.{number}"


def _said(version: WeightVersion) -> VersionDescription:
    assert version.description is not None  # noqa: S101 - filtered by it
    return version.description
