"""Reading a version in another layout than it was published in: only the chunks that are needed.

A reader says what it wants, as parts of tensors or as what is fused of them, and gets dense bytes
for each. Every chunk is proven by the manifests before any byte of it is used, and memory is what
is wanted and one window: nobody holds the whole model for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from paceline.refit.errors import VerifyError
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import ObjectRange, Shard
from paceline.refit.plan.resharding import (
    Copy,
    Source,
    Want,
    chunks_needed,
    plan_copies,
    sources_of,
)
from paceline.refit.receiver.fetch import Fetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSource:
    """One slot of a full version: its manifest, proven, and who serves it."""

    manifest: Manifest
    shards: Sequence[Shard]
    fetcher: Fetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharded:
    """What was wanted, by its name."""

    data: Mapping[str, memoryview]
    fetched_bytes: int


def read_wants(
    wants: Mapping[str, Want], slots: Sequence[SlotSource], *, bytes_max: int
) -> Resharded:
    """Read what is wanted of a full version.

    Args:
        wants: by a name of the reader's own.
        slots: all slots of the version.
        bytes_max: more than this cannot be right for all wants together.

    Raises:
        FetchError: no source gave a chunk.
        VerifyError: the version does not have what is wanted, or a chunk has another hash.
    """
    sources = sources_of(slot.manifest for slot in slots)
    plans = {name: plan_copies(want, sources) for name, want in wants.items()}
    sizes = {name: sum(copy.size for copy in copies) for name, copies in plans.items()}
    if sum(sizes.values()) > bytes_max:
        raise VerifyError(f"{sum(sizes.values())} bytes are wanted; at most {bytes_max} can be")
    data = {name: bytearray(size) for name, size in sizes.items()}
    pending = _by_object(plans, sources)
    fetched = 0
    for slot in slots:
        chunk_bytes = {item.object_id: item.chunk_bytes for item in slot.manifest.objects}
        own = [
            copy
            for copies in plans.values()
            for copy in copies
            if sources[copy.source].object_id in chunk_bytes
        ]
        needed = chunks_needed(own, sources, chunk_bytes)

        def take(wanted: ObjectRange, chunk: memoryview) -> None:
            for name, copy, start in pending[wanted.object_id]:
                _put(data[name], copy, start, wanted, chunk)

        fetched += slot.fetcher.fetch_chunks(slot.manifest, slot.shards, needed, take)
    return Resharded(
        data={name: memoryview(bytes_).toreadonly() for name, bytes_ in data.items()},
        fetched_bytes=fetched,
    )


_Pending = Mapping[str, Sequence[tuple[str, Copy, int]]]


def _by_object(plans: Mapping[str, Sequence[Copy]], sources: Sequence[Source]) -> _Pending:
    """Return by object what is copied from it: to which want, how, and from where on."""
    found = [
        (source.object_id, name, copy, source.offset + copy.source_offset)
        for name, copies in plans.items()
        for copy in copies
        for source in [sources[copy.source]]
    ]
    found.sort(key=lambda each: (each[0], each[3]))
    return {
        object_id: [(name, copy, start) for _, name, copy, start in some]
        for object_id, some in groupby(found, key=lambda each: each[0])
    }


def _put(target: bytearray, copy: Copy, start: int, wanted: ObjectRange, chunk: memoryview) -> None:
    """Copy what a chunk has of one copy."""
    first = max(start, wanted.offset)
    stop = min(start + copy.size, wanted.offset + wanted.size)
    if first < stop:
        at = copy.target_offset + first - start
        target[at : at + stop - first] = chunk[first - wanted.offset : stop - wanted.offset]
