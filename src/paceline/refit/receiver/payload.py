"""A payload on its way in: every chunk is proven before it counts, and what counts stays."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.refit.manifest.payload import verify_chunk
from paceline.refit.manifest.v1 import Manifest, PayloadObject
from paceline.refit.plan.sources import all_chunks
from paceline.refit.receiver.spool import Spool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk of a payload; they are counted through the objects in the manifest's order."""

    item: PayloadObject
    index: int
    """In its object."""
    offset: int
    size: int

    @property
    def sha256(self) -> str:
        """What proves it, and what it is served on as."""
        return self.item.chunk_sha256[self.index]


def chunks_of(manifest: Manifest) -> Sequence[Chunk]:
    """Return all chunks of a manifest's objects, in order."""
    return [
        Chunk(
            item=item,
            index=index,
            offset=offset,
            size=min(item.chunk_bytes, item.num_bytes - offset),
        )
        for item in manifest.objects
        for index, offset in enumerate(range(0, item.num_bytes, item.chunk_bytes))
    ]


class PayloadBuffer:
    """Memory for a manifest's objects, filled in any order; safe from several threads."""

    def __init__(self, manifest: Manifest, spool: Spool) -> None:
        """Take the memory: whoever calls has checked the sizes. Raises NoRoomError."""
        self.chunks = chunks_of(manifest)
        self._data = {item.object_id: spool.open(item.num_bytes) for item in manifest.objects}
        self._have = 0
        self._lock = threading.Lock()

    @property
    def have(self) -> int:
        """The chunks that are here and proven, as bits."""
        return self._have

    @property
    def is_complete(self) -> bool:
        """Whether all of them are."""
        return self._have == all_chunks(len(self.chunks))

    @property
    def num_bytes(self) -> int:
        """Of all objects."""
        return sum(len(data.view) for data in self._data.values())

    def accept(self, number: int, data: memoryview) -> bool:
        """Keep a chunk; False if it is here already.

        Raises:
            VerifyError: these are other bytes.
            NoRoomError: the disk did not take them.
        """
        chunk = self.chunks[number]
        verify_chunk(chunk.item, chunk.index, data)
        if self._have >> number & 1:
            return False
        self._data[chunk.item.object_id].write(chunk.offset, data)
        with self._lock:
            if self._have >> number & 1:  # two reads of one chunk: they wrote the same
                return False
            self._have |= 1 << number
            return True

    def view(self, number: int) -> memoryview:
        """Return a proven chunk."""
        chunk = self.chunks[number]
        data = self._data[chunk.item.object_id].view
        return data[chunk.offset : chunk.offset + chunk.size].toreadonly()

    def objects(self) -> Mapping[str, memoryview]:
        """Return the objects; whole once ``is_complete``."""
        return {object_id: data.view.toreadonly() for object_id, data in self._data.items()}
