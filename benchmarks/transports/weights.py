"""One full version of noise, and where a receiver is told that it is."""

import numpy as np

from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import Shard, TensorBuffer
from paceline.testing.payloads import full_payload

_CHUNK = 8 * 2**20


def noise(num_bytes: int, *, tensors: int) -> tuple[Manifest, memoryview]:
    """Return a version of so many tensors, and its one object, in memory such as arenas have."""
    data = np.random.default_rng(1).integers(0, 2**16, num_bytes // 2, dtype=np.uint16)
    parts = np.array_split(data, tensors)
    manifest, whole = full_payload(
        (
            TensorBuffer(
                name=f"w{index:03d}", dtype="BF16", shape=(len(part),), data=part.data.cast("B")
            )
            for index, part in enumerate(parts)
        ),
        chunk_bytes=_CHUNK,
    )
    return manifest, np.array(np.frombuffer(whole, dtype=np.uint8)).data


def shard_at(endpoint: str) -> Shard:
    """Return what the control service says of a source."""
    return Shard(
        version_id="v",
        source_slot_id="s",
        worker_id="t",
        tensor_count=1,
        total_bytes=1,
        manifest_digest="",
        manifest_endpoint=f"{endpoint}/v1/manifests/v/s",
    )
