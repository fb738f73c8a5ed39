from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_TRAINER: _ClassVar[WorkerRole]
    WORKER_ROLE_GENERATOR: _ClassVar[WorkerRole]

class WeightPayloadFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_PAYLOAD_FORMAT_UNSPECIFIED: _ClassVar[WeightPayloadFormat]
    WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR: _ClassVar[WeightPayloadFormat]
    WEIGHT_PAYLOAD_FORMAT_XOR_DELTA: _ClassVar[WeightPayloadFormat]
    WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT: _ClassVar[WeightPayloadFormat]

class WeightVersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_VERSION_STATE_UNSPECIFIED: _ClassVar[WeightVersionState]
    WEIGHT_VERSION_STATE_STAGING: _ClassVar[WeightVersionState]
    WEIGHT_VERSION_STATE_READY: _ClassVar[WeightVersionState]
    WEIGHT_VERSION_STATE_RELEASING: _ClassVar[WeightVersionState]

class ObjectStorageType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OBJECT_STORAGE_TYPE_UNSPECIFIED: _ClassVar[ObjectStorageType]
    OBJECT_STORAGE_TYPE_S3: _ClassVar[ObjectStorageType]
    OBJECT_STORAGE_TYPE_AZURE: _ClassVar[ObjectStorageType]
    OBJECT_STORAGE_TYPE_GCS: _ClassVar[ObjectStorageType]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_TRAINER: WorkerRole
WORKER_ROLE_GENERATOR: WorkerRole
WEIGHT_PAYLOAD_FORMAT_UNSPECIFIED: WeightPayloadFormat
WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR: WeightPayloadFormat
WEIGHT_PAYLOAD_FORMAT_XOR_DELTA: WeightPayloadFormat
WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT: WeightPayloadFormat
WEIGHT_VERSION_STATE_UNSPECIFIED: WeightVersionState
WEIGHT_VERSION_STATE_STAGING: WeightVersionState
WEIGHT_VERSION_STATE_READY: WeightVersionState
WEIGHT_VERSION_STATE_RELEASING: WeightVersionState
OBJECT_STORAGE_TYPE_UNSPECIFIED: ObjectStorageType
OBJECT_STORAGE_TYPE_S3: ObjectStorageType
OBJECT_STORAGE_TYPE_AZURE: ObjectStorageType
OBJECT_STORAGE_TYPE_GCS: ObjectStorageType

class WorkerRegistration(_message.Message):
    __slots__ = ("worker_id", "role", "model_name", "expires_at_unix_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    model_name: str
    expires_at_unix_ms: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., model_name: _Optional[str] = ..., expires_at_unix_ms: _Optional[int] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker", "ttl_seconds")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRegistration
    ttl_seconds: int
    def __init__(self, worker: _Optional[_Union[WorkerRegistration, _Mapping]] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRegistration
    def __init__(self, worker: _Optional[_Union[WorkerRegistration, _Mapping]] = ...) -> None: ...

class ObjectStorageSource(_message.Message):
    __slots__ = ("uri", "storage_type")
    URI_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    uri: str
    storage_type: ObjectStorageType
    def __init__(self, uri: _Optional[str] = ..., storage_type: _Optional[_Union[ObjectStorageType, str]] = ...) -> None: ...

class WeightVersion(_message.Message):
    __slots__ = ("uid", "model_name", "idempotency_key", "payload_format", "base_version_id", "expected_source_slots", "layout_signature", "state", "created_at_unix_ms", "object_storage")
    UID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SOURCE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_STORAGE_FIELD_NUMBER: _ClassVar[int]
    uid: str
    model_name: str
    idempotency_key: str
    payload_format: WeightPayloadFormat
    base_version_id: str
    expected_source_slots: _containers.RepeatedScalarFieldContainer[str]
    layout_signature: str
    state: WeightVersionState
    created_at_unix_ms: int
    object_storage: ObjectStorageSource
    def __init__(self, uid: _Optional[str] = ..., model_name: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., payload_format: _Optional[_Union[WeightPayloadFormat, str]] = ..., base_version_id: _Optional[str] = ..., expected_source_slots: _Optional[_Iterable[str]] = ..., layout_signature: _Optional[str] = ..., state: _Optional[_Union[WeightVersionState, str]] = ..., created_at_unix_ms: _Optional[int] = ..., object_storage: _Optional[_Union[ObjectStorageSource, _Mapping]] = ...) -> None: ...

class CreateWeightVersionRequest(_message.Message):
    __slots__ = ("model_name", "idempotency_key", "payload_format", "base_version_id", "expected_source_slots", "object_storage", "state", "uid")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SOURCE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_STORAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    idempotency_key: str
    payload_format: WeightPayloadFormat
    base_version_id: str
    expected_source_slots: _containers.RepeatedScalarFieldContainer[str]
    object_storage: ObjectStorageSource
    state: WeightVersionState
    uid: str
    def __init__(self, model_name: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., payload_format: _Optional[_Union[WeightPayloadFormat, str]] = ..., base_version_id: _Optional[str] = ..., expected_source_slots: _Optional[_Iterable[str]] = ..., object_storage: _Optional[_Union[ObjectStorageSource, _Mapping]] = ..., state: _Optional[_Union[WeightVersionState, str]] = ..., uid: _Optional[str] = ...) -> None: ...

class CreateWeightVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class GetWeightVersionRequest(_message.Message):
    __slots__ = ("uid",)
    UID_FIELD_NUMBER: _ClassVar[int]
    uid: str
    def __init__(self, uid: _Optional[str] = ...) -> None: ...

class GetWeightVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class DeleteWeightVersionRequest(_message.Message):
    __slots__ = ("uid",)
    UID_FIELD_NUMBER: _ClassVar[int]
    uid: str
    def __init__(self, uid: _Optional[str] = ...) -> None: ...

class DeleteWeightVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class UpdateWeightVersionStateRequest(_message.Message):
    __slots__ = ("uid", "state")
    UID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    uid: str
    state: WeightVersionState
    def __init__(self, uid: _Optional[str] = ..., state: _Optional[_Union[WeightVersionState, str]] = ...) -> None: ...

class UpdateWeightVersionStateResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class WeightVersionShard(_message.Message):
    __slots__ = ("version_id", "source_slot_id", "worker_id", "tensor_count", "total_bytes", "manifest_digest", "manifest_endpoint")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    source_slot_id: str
    worker_id: str
    tensor_count: int
    total_bytes: int
    manifest_digest: str
    manifest_endpoint: str
    def __init__(self, version_id: _Optional[str] = ..., source_slot_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., tensor_count: _Optional[int] = ..., total_bytes: _Optional[int] = ..., manifest_digest: _Optional[str] = ..., manifest_endpoint: _Optional[str] = ...) -> None: ...

class CreateWeightVersionShardRequest(_message.Message):
    __slots__ = ("shard",)
    SHARD_FIELD_NUMBER: _ClassVar[int]
    shard: WeightVersionShard
    def __init__(self, shard: _Optional[_Union[WeightVersionShard, _Mapping]] = ...) -> None: ...

class CreateWeightVersionShardResponse(_message.Message):
    __slots__ = ("shard", "version")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    shard: WeightVersionShard
    version: WeightVersion
    def __init__(self, shard: _Optional[_Union[WeightVersionShard, _Mapping]] = ..., version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class ListWeightVersionShardsRequest(_message.Message):
    __slots__ = ("version_id",)
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    def __init__(self, version_id: _Optional[str] = ...) -> None: ...

class ListWeightVersionShardsResponse(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[WeightVersionShard]
    def __init__(self, shards: _Optional[_Iterable[_Union[WeightVersionShard, _Mapping]]] = ...) -> None: ...

class GetWeightVersionShardManifestRequest(_message.Message):
    __slots__ = ("version_id", "source_slot_id")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    source_slot_id: str
    def __init__(self, version_id: _Optional[str] = ..., source_slot_id: _Optional[str] = ...) -> None: ...

class GetWeightVersionShardManifestResponse(_message.Message):
    __slots__ = ("manifest", "manifest_digest")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    manifest_digest: str
    def __init__(self, manifest: _Optional[bytes] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class DeleteWeightVersionShardRequest(_message.Message):
    __slots__ = ("version_id", "source_slot_id", "worker_id")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    source_slot_id: str
    worker_id: str
    def __init__(self, version_id: _Optional[str] = ..., source_slot_id: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class DeleteWeightVersionShardResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: bool = ...) -> None: ...

class VersionLease(_message.Message):
    __slots__ = ("lease_id", "version_id", "worker_id", "expires_at_unix_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    version_id: str
    worker_id: str
    expires_at_unix_ms: int
    def __init__(self, lease_id: _Optional[str] = ..., version_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., expires_at_unix_ms: _Optional[int] = ...) -> None: ...

class RegisterVersionLeaseRequest(_message.Message):
    __slots__ = ("version_id", "worker_id", "ttl_seconds")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    worker_id: str
    ttl_seconds: int
    def __init__(self, version_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class RegisterVersionLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: VersionLease
    def __init__(self, lease: _Optional[_Union[VersionLease, _Mapping]] = ...) -> None: ...

class DeleteVersionLeaseRequest(_message.Message):
    __slots__ = ("version_id", "lease_id", "worker_id")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    lease_id: str
    worker_id: str
    def __init__(self, version_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class DeleteVersionLeaseResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: bool = ...) -> None: ...
