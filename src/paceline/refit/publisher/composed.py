"""One delta from the newest full version to the newest weights, kept up step by step.

Whoever joins late then fetches two things, however many steps the full version is old. The
trainer composes, because it alone can sign what leads to its weights, and because it has the
deltas in memory; it never looks at a weight for it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.refit.errors import VerifyError
from paceline.refit.inspection import Version, compose_versions
from paceline.refit.model import CompletionFence, StagedWeightVersionShardData, VersionDescription
from paceline.refit.publisher.values import OwnVersion
from paceline.refit.staging.shard import StagedBuffers, StagedObject

log = logging.getLogger(__name__)

WORTH = 0.25
"""Deltas that weigh more than this part of a full version are not composed: the time that it
takes grows with them, and what it saves shrinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedDelta:
    """A delta over several versions, ready to be published."""

    base_uid: str
    base: VersionDescription
    staged: StagedWeightVersionShardData


class Composer:
    """Follows a publisher's versions; belongs to its training thread."""

    def __init__(self) -> None:
        self._base: tuple[str, VersionDescription] | None = None
        self._so_far: Version | None = None
        self._num_deltas = 0

    def start_from(self, uid: str, full: VersionDescription) -> None:
        """Begin anew at a full version."""
        self._base, self._so_far, self._num_deltas = (uid, full), None, 0

    def extend(self, delta: OwnVersion, *, transport: str) -> ComposedDelta | None:
        """Take the next delta in; None if there is nothing to be gained from composing now."""
        if self._base is None:
            return None
        try:
            self._take(_version_of(delta))
        except VerifyError as exc:
            log.info("no composed deltas until the next full version: %s", exc)
            self._base = None
            return None
        if self._so_far is None or _size(self._so_far) > WORTH * delta.buffers.full_bytes:
            self._base = None
            return None
        if self._num_deltas == 1:
            return None  # it is the delta itself
        base_uid, base = self._base
        staged = _staged(self._so_far, delta, transport=transport)
        return ComposedDelta(base_uid=base_uid, base=base, staged=staged)

    def _take(self, version: Version) -> None:
        before = self._so_far
        self._so_far = version if before is None else compose_versions(before, version)
        self._num_deltas += 1


def _version_of(own: OwnVersion) -> Version:
    """Return a delta with bytes of its own: the publisher's may go before the next one comes."""
    objects: Mapping[str, memoryview] = {
        item.object_id: memoryview(b"".join(item.parts)) for item in own.buffers.objects
    }
    return own.buffers.manifest, objects


def _size(version: Version) -> int:
    return sum(item.num_bytes for item in version[0].objects)


def _staged(
    version: Version, newest: OwnVersion, *, transport: str
) -> StagedWeightVersionShardData:
    manifest, objects = version
    buffers = StagedBuffers(
        manifest=manifest,
        objects=tuple(
            StagedObject(object_id=uid, num_bytes=len(data), parts=(data.toreadonly(),))
            for uid, data in objects.items()
        ),
        changed_elements=sum(segment.changed_elements for segment in manifest.segments),
        total_elements=newest.buffers.total_elements,
        full_bytes=newest.buffers.full_bytes,
    )
    return StagedWeightVersionShardData(
        manifest=buffers.to_shard_manifest(transport=transport),
        publish_ready=CompletionFence(lambda: None),
        buffer_owner=buffers,
    )
