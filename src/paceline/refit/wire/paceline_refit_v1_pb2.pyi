from paceline.refit.wire import refit_pb2 as _refit_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionDescription(_message.Message):
    __slots__ = ("run_id", "sequence", "step", "root_digest", "parent_root", "payload_bytes", "full_bytes", "changed_elements", "total_elements")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_ROOT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sequence: int
    step: int
    root_digest: str
    parent_root: str
    payload_bytes: int
    full_bytes: int
    changed_elements: int
    total_elements: int
    def __init__(self, run_id: _Optional[str] = ..., sequence: _Optional[int] = ..., step: _Optional[int] = ..., root_digest: _Optional[str] = ..., parent_root: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., full_bytes: _Optional[int] = ..., changed_elements: _Optional[int] = ..., total_elements: _Optional[int] = ...) -> None: ...

class VersionRecord(_message.Message):
    __slots__ = ("version", "description")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    version: _refit_pb2.WeightVersion
    description: VersionDescription
    def __init__(self, version: _Optional[_Union[_refit_pb2.WeightVersion, _Mapping]] = ..., description: _Optional[_Union[VersionDescription, _Mapping]] = ...) -> None: ...

class GetVersionRequest(_message.Message):
    __slots__ = ("uid",)
    UID_FIELD_NUMBER: _ClassVar[int]
    uid: str
    def __init__(self, uid: _Optional[str] = ...) -> None: ...

class GetVersionResponse(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: VersionRecord
    def __init__(self, record: _Optional[_Union[VersionRecord, _Mapping]] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("model_name", "run_id")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    run_id: str
    def __init__(self, model_name: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[VersionRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[VersionRecord, _Mapping]]] = ...) -> None: ...

class DescribeVersionRequest(_message.Message):
    __slots__ = ("uid", "description", "source_slot_id")
    UID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    uid: str
    description: VersionDescription
    source_slot_id: str
    def __init__(self, uid: _Optional[str] = ..., description: _Optional[_Union[VersionDescription, _Mapping]] = ..., source_slot_id: _Optional[str] = ...) -> None: ...

class DescribeVersionResponse(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: VersionRecord
    def __init__(self, record: _Optional[_Union[VersionRecord, _Mapping]] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("version_id",)
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    def __init__(self, version_id: _Optional[str] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[_refit_pb2.VersionLease]
    def __init__(self, leases: _Optional[_Iterable[_Union[_refit_pb2.VersionLease, _Mapping]]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "draining")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_refit_pb2.WorkerRegistration]
    draining: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[_Union[_refit_pb2.WorkerRegistration, _Mapping]]] = ..., draining: _Optional[_Iterable[str]] = ...) -> None: ...

class InstalledReport(_message.Message):
    __slots__ = ("worker_id", "model_name", "endpoint", "version_id", "sequence", "root_digest", "state", "installed_at_unix_ms", "fetched_bytes", "refit_ms", "pause_ms", "verified")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFIT_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model_name: str
    endpoint: str
    version_id: str
    sequence: int
    root_digest: str
    state: str
    installed_at_unix_ms: int
    fetched_bytes: int
    refit_ms: float
    pause_ms: float
    verified: str
    def __init__(self, worker_id: _Optional[str] = ..., model_name: _Optional[str] = ..., endpoint: _Optional[str] = ..., version_id: _Optional[str] = ..., sequence: _Optional[int] = ..., root_digest: _Optional[str] = ..., state: _Optional[str] = ..., installed_at_unix_ms: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., refit_ms: _Optional[float] = ..., pause_ms: _Optional[float] = ..., verified: _Optional[str] = ...) -> None: ...

class ReportInstalledRequest(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: InstalledReport
    def __init__(self, report: _Optional[_Union[InstalledReport, _Mapping]] = ...) -> None: ...

class ReportInstalledResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListInstalledRequest(_message.Message):
    __slots__ = ("model_name", "include_expired")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    include_expired: bool
    def __init__(self, model_name: _Optional[str] = ..., include_expired: bool = ...) -> None: ...

class ListInstalledResponse(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[InstalledReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[InstalledReport, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("worker_id", "name", "at_unix_ms", "fields_json", "index")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    name: str
    at_unix_ms: int
    fields_json: str
    index: int
    def __init__(self, worker_id: _Optional[str] = ..., name: _Optional[str] = ..., at_unix_ms: _Optional[int] = ..., fields_json: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class RecordEventRequest(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: Event
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...

class RecordEventResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("after", "limit")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    after: int
    limit: int
    def __init__(self, after: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ListEventsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class WatchVersionsRequest(_message.Message):
    __slots__ = ("model_name", "run_id", "after")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    run_id: str
    after: int
    def __init__(self, model_name: _Optional[str] = ..., run_id: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class WatchVersionsResponse(_message.Message):
    __slots__ = ("revision", "records", "removed", "reset")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    revision: int
    records: _containers.RepeatedCompositeFieldContainer[VersionRecord]
    removed: _containers.RepeatedScalarFieldContainer[str]
    reset: bool
    def __init__(self, revision: _Optional[int] = ..., records: _Optional[_Iterable[_Union[VersionRecord, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ..., reset: bool = ...) -> None: ...

class WatchWorkersRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class WatchWorkersResponse(_message.Message):
    __slots__ = ("workers", "draining")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_refit_pb2.WorkerRegistration]
    draining: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[_Union[_refit_pb2.WorkerRegistration, _Mapping]]] = ..., draining: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchLeasesRequest(_message.Message):
    __slots__ = ("version_id",)
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    def __init__(self, version_id: _Optional[str] = ...) -> None: ...

class WatchLeasesResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[_refit_pb2.VersionLease]
    def __init__(self, leases: _Optional[_Iterable[_Union[_refit_pb2.VersionLease, _Mapping]]] = ...) -> None: ...

class GetChainRequest(_message.Message):
    __slots__ = ("uid",)
    UID_FIELD_NUMBER: _ClassVar[int]
    uid: str
    def __init__(self, uid: _Optional[str] = ...) -> None: ...

class GetChainResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[VersionRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[VersionRecord, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("base_version_id", "target_version_id", "payload_bytes", "digest", "uri", "created_at_unix_ms")
    BASE_VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    base_version_id: str
    target_version_id: str
    payload_bytes: int
    digest: str
    uri: str
    created_at_unix_ms: int
    def __init__(self, base_version_id: _Optional[str] = ..., target_version_id: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., uri: _Optional[str] = ..., created_at_unix_ms: _Optional[int] = ...) -> None: ...

class RecordDeltaRequest(_message.Message):
    __slots__ = ("delta",)
    DELTA_FIELD_NUMBER: _ClassVar[int]
    delta: Delta
    def __init__(self, delta: _Optional[_Union[Delta, _Mapping]] = ...) -> None: ...

class RecordDeltaResponse(_message.Message):
    __slots__ = ("delta",)
    DELTA_FIELD_NUMBER: _ClassVar[int]
    delta: Delta
    def __init__(self, delta: _Optional[_Union[Delta, _Mapping]] = ...) -> None: ...

class ListDeltasRequest(_message.Message):
    __slots__ = ("target_version_id",)
    TARGET_VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    target_version_id: str
    def __init__(self, target_version_id: _Optional[str] = ...) -> None: ...

class ListDeltasResponse(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    def __init__(self, deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ...) -> None: ...

class SourceRate(_message.Message):
    __slots__ = ("worker_id", "bytes_per_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    bytes_per_s: float
    def __init__(self, worker_id: _Optional[str] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("version_id", "source_slot_id", "worker_id", "manifest_endpoint", "region", "chunks", "is_complete", "load", "rates", "updated_at_unix_ms", "coming")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    source_slot_id: str
    worker_id: str
    manifest_endpoint: str
    region: str
    chunks: bytes
    is_complete: bool
    load: int
    rates: _containers.RepeatedCompositeFieldContainer[SourceRate]
    updated_at_unix_ms: int
    coming: bytes
    def __init__(self, version_id: _Optional[str] = ..., source_slot_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., manifest_endpoint: _Optional[str] = ..., region: _Optional[str] = ..., chunks: _Optional[bytes] = ..., is_complete: bool = ..., load: _Optional[int] = ..., rates: _Optional[_Iterable[_Union[SourceRate, _Mapping]]] = ..., updated_at_unix_ms: _Optional[int] = ..., coming: _Optional[bytes] = ...) -> None: ...

class AnnounceReplicaRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: Replica
    def __init__(self, replica: _Optional[_Union[Replica, _Mapping]] = ...) -> None: ...

class AnnounceReplicaResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class ListReplicasRequest(_message.Message):
    __slots__ = ("version_id",)
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    def __init__(self, version_id: _Optional[str] = ...) -> None: ...

class ListReplicasResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class WithdrawReplicaRequest(_message.Message):
    __slots__ = ("version_id", "source_slot_id", "worker_id")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    source_slot_id: str
    worker_id: str
    def __init__(self, version_id: _Optional[str] = ..., source_slot_id: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class WithdrawReplicaResponse(_message.Message):
    __slots__ = ("withdrawn",)
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    withdrawn: bool
    def __init__(self, withdrawn: bool = ...) -> None: ...

class RetentionPolicy(_message.Message):
    __slots__ = ("keep_last", "anchors_every", "anchor_cost")
    KEEP_LAST_FIELD_NUMBER: _ClassVar[int]
    ANCHORS_EVERY_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_COST_FIELD_NUMBER: _ClassVar[int]
    keep_last: int
    anchors_every: int
    anchor_cost: float
    def __init__(self, keep_last: _Optional[int] = ..., anchors_every: _Optional[int] = ..., anchor_cost: _Optional[float] = ...) -> None: ...

class SetRetentionRequest(_message.Message):
    __slots__ = ("model_name", "policy")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    policy: RetentionPolicy
    def __init__(self, model_name: _Optional[str] = ..., policy: _Optional[_Union[RetentionPolicy, _Mapping]] = ...) -> None: ...

class SetRetentionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRetentionRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class GetRetentionResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: RetentionPolicy
    def __init__(self, policy: _Optional[_Union[RetentionPolicy, _Mapping]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "resume")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    resume: bool
    def __init__(self, worker_id: _Optional[str] = ..., resume: bool = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tombstone(_message.Message):
    __slots__ = ("uid", "model_name", "removed_at_unix_ms", "object_storage", "is_collected")
    UID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    REMOVED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_STORAGE_FIELD_NUMBER: _ClassVar[int]
    IS_COLLECTED_FIELD_NUMBER: _ClassVar[int]
    uid: str
    model_name: str
    removed_at_unix_ms: int
    object_storage: _refit_pb2.ObjectStorageSource
    is_collected: bool
    def __init__(self, uid: _Optional[str] = ..., model_name: _Optional[str] = ..., removed_at_unix_ms: _Optional[int] = ..., object_storage: _Optional[_Union[_refit_pb2.ObjectStorageSource, _Mapping]] = ..., is_collected: bool = ...) -> None: ...

class ListTombstonesRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class ListTombstonesResponse(_message.Message):
    __slots__ = ("tombstones",)
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    tombstones: _containers.RepeatedCompositeFieldContainer[Tombstone]
    def __init__(self, tombstones: _Optional[_Iterable[_Union[Tombstone, _Mapping]]] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("model_name", "workers", "version_id")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    workers: str
    version_id: str
    def __init__(self, model_name: _Optional[str] = ..., workers: _Optional[str] = ..., version_id: _Optional[str] = ...) -> None: ...

class SetPinRequest(_message.Message):
    __slots__ = ("model_name", "workers", "version_id")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    workers: str
    version_id: str
    def __init__(self, model_name: _Optional[str] = ..., workers: _Optional[str] = ..., version_id: _Optional[str] = ...) -> None: ...

class SetPinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    def __init__(self, pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ...) -> None: ...
