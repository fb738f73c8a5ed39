"""What a publisher is told and what it answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from paceline.refit.manifest.signature import Statement
from paceline.refit.model import (
    StagedWeightVersionShardData,
    TrainerStagingMode,
    VersionDescription,
    WeightPayloadFormat,
    WeightVersionShardManifest,
)
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.protocol import WeightVersionShardManifestPublisher
from paceline.refit.transports.protocol import ObjectServer

Notify = Callable[[str, Mapping[str, object]], None]
"""Takes an event's name and fields, see telemetry/events.py."""
Waiter = Callable[[float], bool]
"""Waits so many seconds and returns whether to stop."""


Sign = Callable[[bytes, Statement], bytes]
"""Takes a manifest and what to say of it; returns both, signed."""


class WeightSource(ObjectServer, WeightVersionShardManifestPublisher, Protocol):
    """Serves objects and manifests behind one endpoint."""


class WhenLeased(StrEnum):
    """What a publish does while all memory for staging holds versions that are still needed."""

    BLOCK = "block"
    """Training waits, ``stage_wait_s`` at most, until a version was published or a lease ended."""
    DROP = "drop"
    """The oldest version that nobody leases goes, one that is not out yet first; then as above."""
    SKIP = "skip"
    """This version is left out, and training goes on."""


class WhenInPlace(StrEnum):
    """What becomes of weights that are served in place when the optimizer is about to step."""

    WAIT = "wait"
    """The version goes, and the step waits for its readers."""
    COPY = "copy"
    """They are copied, and the version stays."""


class WhenUnproven(StrEnum):
    """What a trainer does that starts again with other weights than its run published last."""

    ANCHOR = "anchor"
    """It says so, and goes on at the next sequence with a full version that has no parent."""
    NEW_RUN = "new-run"
    """It says so, and starts a run of its own beside the old one: engines follow what they are
    told to follow."""
    REFUSE = "refuse"
    """It does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """Who publishes, what, and how patiently."""

    model_name: str
    run_id: str
    worker_id: str
    """Names this process; a restarted one takes another."""
    staging_mode: TrainerStagingMode = TrainerStagingMode.COPY_TO_HOST
    payload_format: WeightPayloadFormat = WeightPayloadFormat.XOR_DELTA
    anchor_every: int = 8
    """A full version beside the delta every so many sequences."""
    keep_old: int = 2
    """Versions older than the newest full one that stay READY."""
    when_leased: WhenLeased = WhenLeased.BLOCK
    when_in_place: WhenInPlace = WhenInPlace.WAIT
    when_unproven: WhenUnproven = WhenUnproven.ANCHOR
    stage_wait_s: float = 30.0
    """How long to wait for readers when nothing can be staged; 0 gives up at once."""
    publish_wait_s: float = 600.0
    """How long whoever wants to know how a publication ended waits for that."""
    control_wait_s: float = 15.0
    """How long a publish bears a control service that does not answer."""
    registration_ttl_s: int = 30
    close_wait_s: float = 10.0
    """How long closing waits for leases."""
    sign: Sign | None = None
    """Puts a signature behind a manifest; None publishes unsigned."""
    compose: bool = True
    """Also publish one delta from the newest full version, for engines that join late."""
    checkpoint_files: Mapping[str, bytes] = field(default_factory=dict)
    """What stands beside the weights of a checkpoint, such as ``config.json``."""
    incarnation: str = ""
    """Of a trainer of several processes: what a start of all of them is called, the same in each.
    What an earlier start left unfinished is then never gone on with."""
    slots_wait_s: float = 60.0
    """How long a version waits for processes that live and do not bring their slot."""
    together_ttl_s: int = 3
    """How soon the others of several processes notice that one is gone."""
    heartbeat_wait: Waiter | None = None
    """Paces the heartbeat; real time by default."""

    @property
    def wanted(self) -> WeightPayloadFormat:
        """What versions are once there is a base: no deltas in place, where no base is kept."""
        is_in_place = self.staging_mode is TrainerStagingMode.IN_PLACE
        if is_in_place and self.payload_format is WeightPayloadFormat.XOR_DELTA:
            return WeightPayloadFormat.FULL_TENSOR
        return self.payload_format


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """What one publish did."""

    version_id: str
    sequence: int
    step: int
    root_digest: str
    payload_format: WeightPayloadFormat
    payload_bytes: int
    full_bytes: int
    changed_elements: int
    total_elements: int
    publish_ms: float
    """From the call until it was READY."""
    stall_ms: float = 0.0
    """How long training stood for it."""
    anchor_id: str | None = None
    """The full version published beside it."""
    anchor_error: str | None = None
    """Why the anchor that was due is missing; it is tried again with the next version."""

    def to_fields(self) -> dict[str, object]:
        """Return the fields of the event ``version.published``."""
        fields: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "payload_format": self.payload_format.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The newest version of a run that came out: the parent of the next one."""

    uid: str
    root_digest: str
    """Of the version, as engines report it."""
    slot_root: str
    """Of what this process published of it: the same with one slot."""


@dataclass(slots=True, eq=False)
class OwnVersion:
    """A version of this publisher's, from its creation until its memory is back."""

    uid: str
    staged: StagedWeightVersionShardData
    buffers: StagedBuffers
    description: VersionDescription
    base_version_id: str | None
    is_composed: bool = False
    """Made here from deltas, in memory of its own."""
    is_served: bool = False
    is_advertised: bool = False
    """Somebody may know of it: a shard was sent to the control service."""
    whole: VersionDescription | None = None
    """Of all slots together, where there are several; known when the version is READY."""

    @property
    def root_digest(self) -> str:
        """Of the version, as engines report it."""
        return (self.whole or self.description).root_digest

    def manifest(self, sign: Sign | None) -> WeightVersionShardManifest:
        """Return the manifest as it is served: with the run's signature, if there is a key."""
        manifest, said = self.staged.manifest, self.description
        if sign is None:
            return manifest
        statement = Statement(
            run_id=said.run_id,
            version_id=self.uid,
            sequence=said.sequence,
            root_digest=said.root_digest,
            parent_root=said.parent_root,
        )
        return replace(manifest, data=sign(manifest.data, statement))

    @property
    def is_full(self) -> bool:
        """Whether readers can start from it."""
        return self.buffers.manifest.is_full


def published_version(version: OwnVersion, **more: Any) -> PublishedVersion:
    """Say what came of a version; ``more`` are the fields that it does not know itself."""
    said, buffers = version.whole or version.description, version.buffers
    return PublishedVersion(
        version_id=version.uid,
        sequence=said.sequence,
        step=said.step,
        root_digest=said.root_digest,
        payload_format=buffers.manifest.payload_format,
        payload_bytes=said.payload_bytes,
        full_bytes=said.full_bytes,
        changed_elements=said.changed_elements,
        total_elements=said.total_elements,
        **more,
    )


def member_end(run_id: str, slot: str) -> str:
    """Return what the worker ids of a slot's processes end with."""
    return f"@{run_id}/{slot}"


def version_uid(run_id: str, sequence: int) -> str:
    """Return the uid of a run's state of the weights; its anchor is called so with ``-full``."""
    return f"{run_id}-{sequence:06d}"


def anchor_uid(uid: str) -> str:
    """Return the uid of the full version beside a delta."""
    return f"{uid}-full"


def composed_uid(uid: str, *, base_sequence: int) -> str:
    """Return the uid of the delta to ``uid`` that starts at an earlier full version."""
    return f"{uid}-from-{base_sequence:06d}"


def sequence_of(uid: str, run_id: str) -> int:
    """Return the sequence that a uid of this run stands for, -1 for any other uid."""
    digits = uid.removeprefix(f"{run_id}-").removesuffix("-full").partition("-from-")[0]
    is_ours = uid.startswith(f"{run_id}-") and digits.isascii() and digits.isdecimal()
    return int(digits) if is_ours else -1
