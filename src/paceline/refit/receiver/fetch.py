"""Getting a version's bytes: sizes are checked before memory is taken, hashes as bytes arrive."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.refit.errors import FetchError, VerifyError
from paceline.refit.manifest.parse import MANIFEST_BYTES_MAX, parse_manifest
from paceline.refit.manifest.payload import verify_chunk
from paceline.refit.manifest.v1 import Manifest, PayloadObject
from paceline.refit.model import ObjectRange, Shard
from paceline.refit.transports.protocol import ObjectReader, read_object

T = TypeVar("T")


class Fetcher:
    """Reads manifests and objects from whichever source of a slot answers rightly."""

    def __init__(
        self, reader: ObjectReader, *, read_timeout_s: float, between_reads: Callable[[], None]
    ) -> None:
        """Take what is needed for every read.

        Args:
            reader: moves bytes; proves nothing.
            read_timeout_s: for one manifest or one chunk.
            between_reads: called before each read; what it raises ends the fetch.
        """
        self._reader = reader
        self._read_timeout_s = read_timeout_s
        self._between_reads = between_reads

    def fetch_manifest(self, sources: Sequence[Shard]) -> Manifest:
        """Return the manifest that the shards advertise.

        Raises:
            FetchError: no source gave it.
            VerifyError: what came has another digest than advertised, or breaks the format.
        """

        def read(source: Shard) -> Manifest:
            data = self._reader.read_manifest(
                source.manifest_endpoint,
                size_max=MANIFEST_BYTES_MAX,
                timeout_s=self._read_timeout_s,
            )
            found = hashlib.sha256(data).hexdigest()
            if found != source.manifest_digest:
                raise VerifyError(
                    f"the manifest at {source.manifest_endpoint} has SHA-256 {found}, "
                    f"advertised was {source.manifest_digest}"
                )
            return parse_manifest(data)

        return self._from_any(sources, read)

    def fetch_objects(
        self, manifest: Manifest, sources: Sequence[Shard], *, bytes_max: int
    ) -> dict[str, memoryview]:
        """Return every object of a manifest, whole and proven chunk by chunk.

        Raises:
            FetchError: no source gave a chunk.
            VerifyError: the objects are larger than ``bytes_max``, or a chunk has another hash.
        """
        total = sum(item.num_bytes for item in manifest.objects)
        if total > bytes_max:
            raise VerifyError(f"the payload is {total} bytes; at most {bytes_max} can be right")
        return {item.object_id: self._fetch_object(item, sources) for item in manifest.objects}

    def _fetch_object(self, item: PayloadObject, sources: Sequence[Shard]) -> memoryview:
        data = memoryview(bytearray(item.num_bytes))
        for index, offset in enumerate(range(0, item.num_bytes, item.chunk_bytes)):
            target = data[offset : offset + item.chunk_bytes]
            wanted = ObjectRange(object_id=item.object_id, offset=offset, size=len(target))
            self._fetch_chunk(item, index, wanted, target, sources)
        return data.toreadonly()

    def _fetch_chunk(
        self,
        item: PayloadObject,
        index: int,
        wanted: ObjectRange,
        target: memoryview,
        sources: Sequence[Shard],
    ) -> None:
        def read(source: Shard) -> None:
            endpoint = self._reader.source_endpoint(source.manifest_endpoint)
            read_object(self._reader, endpoint, wanted, target, timeout_s=self._read_timeout_s)
            verify_chunk(item, index, target)

        self._from_any(sources, read)

    def _from_any(self, sources: Sequence[Shard], read: Callable[[Shard], T]) -> T:
        """Return the first good answer; replicas of a slot are equal by digest."""
        problems: list[FetchError | VerifyError] = []
        for source in sources:
            self._between_reads()
            try:
                return read(source)
            except (FetchError, VerifyError) as exc:
                problems.append(exc)
        if len(problems) == 1:
            raise problems[0]
        raise FetchError(f"no source answered rightly: {'; '.join(map(str, problems))}")
