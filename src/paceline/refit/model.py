"""The nouns of refit: versions, shards, leases, tensors, and the values of the trainer contract."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cached_property


class TrainerStagingMode(str, Enum):
    """How a trainer keeps a version's source bytes from changing."""

    UNSPECIFIED = "UNSPECIFIED"
    COPY_TO_DEVICE = "COPY_TO_DEVICE"
    COPY_TO_HOST = "COPY_TO_HOST"
    WRITE_TO_STORAGE = "WRITE_TO_STORAGE"
    IN_PLACE = "IN_PLACE"


class WeightPayloadFormat(str, Enum):
    """How one version's weights are represented."""

    UNSPECIFIED = "UNSPECIFIED"
    FULL_TENSOR = "FULL_TENSOR"
    XOR_DELTA = "XOR_DELTA"
    FULL_HF_CHECKPOINT = "FULL_HF_CHECKPOINT"


FULL_FORMATS = frozenset({WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.FULL_HF_CHECKPOINT})
"""Every tensor as it is: in an object of ours, or in the files of a checkpoint."""


@dataclass(frozen=True)
class CompletionFence:
    """Something asynchronous of an adapter's that can be waited for."""

    _wait: Callable[[], None]

    def wait(self) -> None:
        """Block until it is done; what the operation raised is raised here."""
        self._wait()


@dataclass(frozen=True)
class WeightVersionShardManifest:
    """One trainer process's source buffers, described without regard to the engine."""

    data: bytes
    tensor_count: int
    total_bytes: int
    transport: str

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("manifest data must not be empty")
        if self.tensor_count <= 0:
            raise ValueError("tensor_count must be positive")
        if self.total_bytes <= 0:
            raise ValueError("total_bytes must be positive")
        if not self.transport:
            raise ValueError("transport must not be empty")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of ``data``, lower-case hex: what the control plane advertises."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class StagedWeightVersionShardData:
    """Immutable buffers that an adapter owns, and the manifest that describes them."""

    manifest: WeightVersionShardManifest
    publish_ready: CompletionFence
    buffer_owner: object | None = None


class VersionState(StrEnum):
    """Where a weight version is in its life."""

    STAGING = "STAGING"
    READY = "READY"
    RELEASING = "RELEASING"


class WorkerRole(StrEnum):
    """The two kinds of process that register with the control service."""

    TRAINER = "TRAINER"
    GENERATOR = "GENERATOR"


class ObjectStorageType(StrEnum):
    """Which object store a version's URI is in."""

    S3 = "S3"
    AZURE = "AZURE"
    GCS = "GCS"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStorageSource:
    """Where a version that lives in an object store is found."""

    uri: str
    storage_type: ObjectStorageType


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDescription:
    """What Paceline records about a version beside the public protocol; set once, never changed."""

    run_id: str
    sequence: int
    """Count of weight states in this run, from 0; an anchor shares it with the delta it equals."""
    step: int
    """The framework's own optimizer step."""
    root_digest: str
    parent_root: str | None
    """Root digest of the state before; None for the first of a run."""
    payload_bytes: int
    full_bytes: int
    changed_elements: int
    total_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """One immutable, named set of weights as the control service records it."""

    uid: str
    model_name: str
    idempotency_key: str
    payload_format: WeightPayloadFormat
    base_version_id: str | None
    expected_source_slots: tuple[str, ...]
    layout_signature: str
    state: VersionState
    created_at_unix_ms: int
    object_storage: ObjectStorageSource | None = None
    description: VersionDescription | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRequest:
    """What a version is asked for with; equal requests give one version."""

    model_name: str
    idempotency_key: str
    payload_format: WeightPayloadFormat
    base_version_id: str | None = None
    expected_source_slots: tuple[str, ...] = ()
    object_storage: ObjectStorageSource | None = None
    state: VersionState = VersionState.STAGING
    uid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One worker's publication for one slot of one version."""

    version_id: str
    source_slot_id: str
    worker_id: str
    tensor_count: int
    total_bytes: int
    manifest_digest: str
    manifest_endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A reader's hold on a version until a moment of the store's clock."""

    lease_id: str
    version_id: str
    worker_id: str
    expires_at_unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRegistration:
    """One process lifetime, known to the control service until it expires."""

    worker_id: str
    role: WorkerRole
    model_name: str
    expires_at_unix_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledReport:
    """What a generator says it serves, computed from its live parameters."""

    worker_id: str
    model_name: str
    endpoint: str
    """Where its rollout routes are, ``http://host:port``; empty while there are none."""
    version_id: str
    """Empty while nothing is installed."""
    sequence: int
    """-1 while nothing is installed."""
    root_digest: str
    state: str
    """loading | ready | draining | stale | failed"""
    installed_at_unix_ms: int
    fetched_bytes: int
    refit_ms: float
    """From seeing the version READY to serving it."""
    pause_ms: float
    """How long no forward pass could start."""
    verified: str = ""
    """How the root digest was proven, a word of the reporter's; empty for not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a worker wants the run to know: live progress and the report are made of these."""

    worker_id: str
    name: str
    at_unix_ms: int
    fields: dict[str, object]
    index: int = 0
    """Position in the service's list, from 1; set by the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChanges:
    """What happened to a model's versions since a revision."""

    revision: int
    """Of the model: grows with every change of one of its versions."""
    versions: tuple[WeightVersion, ...] = ()
    """As they are now, in the order of creation."""
    removed: tuple[str, ...] = ()
    """Uids that are gone."""
    reset: bool = False
    """The versions are all there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One artefact that leads from a base to a target, over several versions perhaps."""

    base_version_id: str
    target_version_id: str
    payload_bytes: int
    digest: str
    """Of the artefact's bytes."""
    uri: str
    """Where it is fetched."""
    created_at_unix_ms: int = 0
    """Set by the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One generator's copy of a shard's payload, whole or growing, and what it knows of others."""

    version_id: str
    source_slot_id: str
    worker_id: str
    manifest_endpoint: str = ""
    """Where others read the manifest and the chunks; empty: it serves nobody."""
    region: str = ""
    """Workers of one region reach each other cheaply."""
    chunks: bytes = b""
    """Which chunks it has: bit ``n % 8`` of byte ``n // 8``, counted through the objects."""
    is_complete: bool = False
    """It has all of them, whatever ``chunks`` says."""
    coming: bytes = b""
    """Which chunks it is reading from far away now, written as ``chunks`` is."""
    load: int = 0
    """Reads of others that it answers now."""
    rates: tuple[tuple[str, float], ...] = ()
    """(source's worker id, bytes per second) as it measured them."""
    updated_at_unix_ms: int = 0
    """Set by the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Which READY versions of a model stay; see retention.plan_releases."""

    keep_last: int = 0
    """The newest that stay; 0: the service retires nothing by itself."""
    anchors_every: int = 0
    """Older full versions whose sequence is a multiple of this stay; 0: none does."""
    anchor_cost: float = 0.0
    """Older full versions stay where the deltas since the one before weigh so many times as much
    as a full version; 0: none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Which version some generators serve instead of the newest one."""

    model_name: str
    workers: str
    """A worker id, or a pattern of ids with ``*`` and ``?``."""
    version_id: str
    """Empty only in a request: the pattern's pin is taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """A version that is gone; its name is not used again while this is kept."""

    uid: str
    model_name: str
    removed_at_unix_ms: int
    object_storage: ObjectStorageSource | None = None
    is_collected: bool = True
    """Its object has been removed, or there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRange:
    """Bytes ``offset`` (inclusive) to ``offset + size`` (exclusive) of one payload object."""

    object_id: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"bytes {self.offset}-{self.offset + self.size} of object {self.object_id[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where a part of a tensor lies in the whole one; see manifest.region for the geometry."""

    global_shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the part begins in each dimension. One number for a tensor of several: the part is a
    run of its elements in row-major order, and begins at that element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a version, or a part of one: its identity in the root digest."""

    name: str
    dtype: str
    """A key of DTYPE_BITS, the words of safetensors."""
    shape: tuple[int, ...]
    """Of what is here: of the part, if it is one."""
    digest: str
    """Content digest of the row-major little-endian bytes, see refit.digest."""
    num_bytes: int
    region: Region | None = None
    """Which part it is; None is the whole tensor."""

    @property
    def key(self) -> str:
        """What tells it from every other entry of one version: a tensor may come in parts."""
        return self.name if self.region is None else f"{self.name}@{self.region.offsets}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBuffer:
    """A tensor's bytes in this process, dense, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    """Flat, format ``B``; writable where the holder may write."""


DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element per dtype word of safetensors."""
