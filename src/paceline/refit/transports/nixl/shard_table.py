"""The manifest of the public protocol's own receivers (``mx.reshard.shard_table.v1``). Pure.

They read tensors where they lie in a source's memory, by address, and know nothing of payload
objects or digests of ours. It is served by ``control.worker.ManifestServer``.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from paceline.refit.model import DTYPE_BITS
from paceline.refit.transports.nixl.table import Stretch

SCHEMA: Final = "mx.reshard.shard_table.v1"
_TORCH_NAMES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlace:
    """A whole tensor where it lies."""

    dtype: str
    shape: tuple[int, ...]
    where: Stretch


def render_shard_table(
    tensors: Mapping[str, TablePlace],
    *,
    agent_name: str,
    agent_metadata: bytes,
    metadata_endpoint: str,
    step: int | None = None,
) -> bytes:
    """Return the manifest of one process that holds whole tensors.

    Args:
        tensors: by the names that the engine knows.
        agent_name: the NIXL agent's; its metadata must not change between versions.
        agent_metadata: covers all of the memory.
        metadata_endpoint: ``host:port`` of the agent's metadata listener.
        step: of the trainer; None is unknown.
    """
    document: dict[str, object] = {
        "schema": SCHEMA,
        "agent_name": agent_name,
        "metadata_endpoint": metadata_endpoint,
        "agent_meta_b64": base64.b64encode(agent_metadata).decode("ascii"),
        "tensors": [_tensor(name, item, agent_name) for name, item in sorted(tensors.items())],
    }
    if step is not None:
        document["publisher_step"] = step
    return json.dumps(document).encode("ascii")


def _tensor(name: str, item: TablePlace, agent_name: str) -> dict[str, object]:
    return {
        "name": name,
        "dtype": f"torch.{_TORCH_NAMES[item.dtype]}",
        "elsize": DTYPE_BITS[item.dtype] // 8,
        "full_shape": list(item.shape),
        "shards": [
            {
                "agent_name": agent_name,
                "device_id": item.where.device,
                "addr": item.where.address,
                "shard_offset": [0] * len(item.shape),
                "shape": list(item.shape),
            }
        ],
    }
