"""Manifest -> its one canonical byte string."""

import json

from paceline.refit.manifest.v1 import SCHEMA, Lora, Manifest, PayloadObject, Segment
from paceline.refit.model import TensorEntry


def render_manifest(manifest: Manifest) -> bytes:
    """Return ASCII JSON with sorted keys and no spaces; equal manifests give equal bytes."""
    document: dict[str, object] = {
        "schema": SCHEMA,
        "payload_format": manifest.payload_format.value,
        "source_slot_id": manifest.source_slot_id,
        "base_root": manifest.base_root,
        "root_digest": manifest.root_digest,
        "tensors": [_tensor(entry) for entry in manifest.tensors],
        "aliases": [list(pair) for pair in manifest.aliases],
        "objects": [_object(item) for item in manifest.objects],
        "segments": [_segment(segment) for segment in manifest.segments],
    }
    if manifest.lora is not None:
        document["lora"] = _lora(manifest.lora)
    text = json.dumps(document, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return text.encode("ascii")


def _tensor(entry: TensorEntry) -> dict[str, object]:
    fields: dict[str, object] = {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "digest": entry.digest,
        "num_bytes": entry.num_bytes,
    }
    if entry.region is not None:
        fields["region"] = {
            "global_shape": list(entry.region.global_shape),
            "offsets": list(entry.region.offsets),
        }
    return fields


def _object(item: PayloadObject) -> dict[str, object]:
    return {
        "object_id": item.object_id,
        "num_bytes": item.num_bytes,
        "chunk_bytes": item.chunk_bytes,
        "chunk_sha256": list(item.chunk_sha256),
    }


def _segment(segment: Segment) -> dict[str, object]:
    return {
        "tensor": segment.tensor,
        "scheme": segment.scheme.value,
        "object_id": segment.object_id,
        "offset": segment.offset,
        "num_bytes": segment.num_bytes,
        "changed_elements": segment.changed_elements,
    }


def _lora(lora: Lora) -> dict[str, object]:
    return {
        "model_root": lora.model_root,
        "is_rank_stabilised": lora.is_rank_stabilised,
        "modules": [
            {"name": module.name, "rank": module.rank, "alpha": module.alpha}
            for module in lora.modules
        ],
    }
