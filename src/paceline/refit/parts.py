"""A version of several shards, as one install: every shard is proven, all are written together.

Each shard is staged against its own view of the live tensors: stretches of live memory, and dense
copies of what is none. So full payloads and deltas go the same way as those of one shard, and what
is written is undone together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.refit.apply import FULL, Checks, StagedInstall, stage_install
from paceline.refit.delta.order import as_words, kind_of
from paceline.refit.digest import version_root
from paceline.refit.errors import VerifyError
from paceline.refit.manifest.fit import (
    check_shards,
    dense_part,
    part_of,
    refuse_names,
    strided_part,
)
from paceline.refit.manifest.region import block_of
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import TensorBuffer, TensorEntry
from paceline.refit.writing import Scatter, TensorWrite


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchedShard:
    """One slot's manifest and all of its objects."""

    manifest: Manifest
    objects: Mapping[str, memoryview]

    @property
    def num_bytes(self) -> int:
        """Of all objects."""
        return sum(len(data) for data in self.objects.values())


def stage_shards(
    shards: Sequence[FetchedShard],
    *,
    live: Mapping[str, TensorBuffer],
    aliases: Mapping[str, str],
    base: Mapping[str, TensorEntry] | None,
    checks: Checks = FULL,
) -> StagedInstall:
    """Prove all shards of a version and write nothing; see ``apply.stage_install``.

    Args:
        shards: of every slot.
        live: the whole live tensors by canonical name, writable.
        aliases: further name -> canonical name of the live tensors.
        base: what the live tensors are known to be, by ``TensorEntry.key``.
        checks: how they are proven.

    Raises:
        VerifyError: a shard is not right, or they are not the live tensors, each element once.
    """
    manifests = [shard.manifest for shard in shards]
    check_shards(manifests, live, aliases, lora=checks.lora)
    found = [_stage(shard, live, base, checks) for shard in shards]
    return StagedInstall(
        root_digest=version_root({each.source_slot_id: each.root_digest for each in manifests}),
        entries=tuple(entry for manifest in manifests for entry in manifest.tensors),
        writes=tuple(write for staged, _ in found for write in staged.writes),
        changed_elements=sum(staged.changed_elements for staged, _ in found),
        total_elements=sum(staged.total_elements for staged, _ in found),
        scatters=tuple(scatter for _, scatters in found for scatter in scatters),
        has_parts=True,
    )


def _stage(
    shard: FetchedShard,
    live: Mapping[str, TensorBuffer],
    base: Mapping[str, TensorEntry] | None,
    checks: Checks,
) -> tuple[StagedInstall, Sequence[Scatter]]:
    manifest = shard.manifest
    view = {entry.name: dense_part(live[entry.name], entry) for entry in manifest.tensors}
    staged = stage_install(
        manifest,
        shard.objects,
        live=view,
        aliases=dict(manifest.aliases),
        base=None if base is None else _base_of(manifest, base),
        checks=checks,
    )
    entries = {entry.name: entry for entry in manifest.tensors}
    scatters = [
        _scatter(live[write.name], view[write.name], entries[write.name])
        for write in staged.writes
        if part_of(live[write.name], entries[write.name]) is None
    ]
    writes = tuple(_placed(write, entries[write.name]) for write in staged.writes)
    return replace(staged, writes=writes), scatters


def _base_of(manifest: Manifest, base: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """Return the part of the known weights that a shard is of."""
    missing = sorted(entry.key for entry in manifest.tensors if entry.key not in base)
    if missing and not manifest.is_full:
        refuse_names(missing, "the version is cut otherwise than its base; install a full one")
    own = {entry.name: base[entry.key] for entry in manifest.tensors if entry.key in base}
    if not manifest.is_full and any(
        own[entry.name].region != entry.region for entry in manifest.tensors
    ):
        raise VerifyError("the version is cut otherwise than its base; install a full one")
    return own


def _placed(write: TensorWrite, entry: TensorEntry) -> TensorWrite:
    """Say where the written words lie in their tensor, for whoever has to take them back."""
    if entry.region is None:
        return write
    block = block_of(entry.region, entry.shape)
    return write if block is None else replace(write, first=block[0])


def _scatter(live: TensorBuffer, copy: TensorBuffer, entry: TensorEntry) -> Scatter:
    there = strided_part(live, entry)
    words = np.frombuffer(copy.data, dtype=there.dtype).reshape(entry.shape)
    whole = as_words(live.data, kind_of(live.dtype).width)
    return Scatter(name=entry.name, live=there, copy=words, whole=whole)
