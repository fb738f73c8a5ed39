"""The descriptor pool of our generated messages.

The process-wide default pool admits one definition per symbol, and a rollout engine may well
import another generated copy of ``model_express.refit``: with a pool of our own both load and
read each other's bytes. Files are found in it only if they were added first, so the well-known
types that a .proto of ours may import are put in here.
"""

from google.protobuf import (
    any_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)

_WELL_KNOWN = (
    any_pb2,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)

POOL = descriptor_pool.DescriptorPool()
for _module in _WELL_KNOWN:
    POOL.AddSerializedFile(_module.DESCRIPTOR.serialized_pb)
