"""What a trainer engine signs, and what publication needs around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from paceline.refit.manifest.v1 import Lora
from paceline.refit.model import (
    Region,
    StagedWeightVersionShardData,
    TrainerStagingMode,
    WeightPayloadFormat,
    WeightVersionShardManifest,
)

if TYPE_CHECKING:
    import torch


Quantise: TypeAlias = Callable[[str, Any], Mapping[str, Any] | None]
"""Name and tensor -> the named tensors that engines serve instead; None: the tensor itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What of a model one process publishes, as it is now."""

    tensors: dict[str, torch.Tensor]
    """By canonical name; a part of a tensor where ``regions`` says so."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of these tensors -> the canonical one."""
    regions: dict[str, Region] = field(default_factory=dict)
    made: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Makes the content of these tensors when it is asked for; what stands under ``tensors`` has
    its dtype and shape."""
    buffers: frozenset[str] = frozenset()
    """Names of what is no parameter, as far as that is known."""
    lora: Lora | None = None
    """The tensors are those of a LoRA."""

    def read(self, name: str) -> torch.Tensor:
        """Return what a tensor holds now."""
        make = self.made.get(name)
        return self.tensors[name] if make is None else make()


class NixlMetadataProvider(Protocol):
    """What publication over NIXL asks of a NIXL agent.

    Only registered memory can be read by others, so whoever owns source buffers registers them
    before the manifest is built; the manifest then carries metadata that covers them.
    """

    @property
    def agent_name(self) -> str:
        """Name of the local agent, unique among the manifests of one version."""
        ...

    @property
    def nixl_metadata(self) -> bytes:
        """The local agent's serialized metadata."""
        ...

    @property
    def listen_port(self) -> int | None:
        """Port of the agent's metadata listener, None when it has none."""
        ...

    def register_tensors(self, tensors: dict[str, torch.Tensor]) -> bytes:
        """Register buffers and return the metadata that now covers them."""
        ...


class TrainerEngineAdapter(ABC):
    """How one training library's weights become immutable source bytes.

    Runs inside the trainer process. The publisher calls ``bind_tensors`` once, then
    ``stage_shard`` per version; it waits on ``publish_ready`` before it tells anybody.
    """

    @property
    @abstractmethod
    def source_slot_id(self) -> str:
        """The contribution that this process must make to every version."""

    @abstractmethod
    def bind_tensors(self, tensors: Any) -> str:
        """Take the engine's stable tensors, once, and return the slot they fill."""

    @property
    @abstractmethod
    def supported_staging_modes(self) -> frozenset[TrainerStagingMode]:
        """The staging modes that ``stage_shard`` accepts."""

    @property
    @abstractmethod
    def supported_payload_formats(self) -> frozenset[WeightPayloadFormat]:
        """The payload formats that ``stage_shard`` accepts."""

    @abstractmethod
    def stage_shard(
        self,
        *,
        tensors: Any,
        staging_mode: TrainerStagingMode,
        payload_format: WeightPayloadFormat,
    ) -> StagedWeightVersionShardData:
        """Capture one immutable shard of this process.

        Raises:
            ValueError: mode or format is UNSPECIFIED or not supported.
            StagingError: the bytes cannot be kept still now.
        """


class WeightVersionShardManifestPublisher(Protocol):
    """Where a manifest can be fetched before anybody is told of it."""

    def publish_manifest(
        self,
        *,
        version_id: str,
        source_slot_id: str,
        manifest: WeightVersionShardManifest,
    ) -> str:
        """Serve ``manifest`` and return the address of this worker that answers for it.

        Idempotent; a different manifest under the same key raises PublishError.
        """
        ...

    def release_manifest(self, *, version_id: str, source_slot_id: str) -> None:
        """Stop serving it; idempotent."""
        ...


@runtime_checkable
class SupportsCapture(Protocol):
    """A trainer adapter whose staging has a short part and a long one.

    ``capture`` belongs to the training thread and costs a copy of the weights at most; when it has
    returned the optimizer may step. The other methods belong to one other thread at a time, and
    come in the order of the captures. ``stage_shard`` is both parts, one after the other.
    """

    def prepare(self, *, payload_format: WeightPayloadFormat) -> None:
        """Get ready whatever the next version of this format would otherwise have to wait for."""
        ...

    def capture(
        self, *, staging_mode: TrainerStagingMode, payload_format: WeightPayloadFormat
    ) -> object:
        """Keep the weights as they are now.

        Args:
            staging_mode: where.
            payload_format: what is wanted of them; XOR_DELTA also before the first commit.

        Raises:
            ValueError: not supported.
            NoFreeArenaError: the memory for it is in use.
            StagingError: their layout moved.
        """
        ...

    def stage_captured(
        self, captured: Any, *, payload_format: WeightPayloadFormat
    ) -> StagedWeightVersionShardData:
        """Make a shard of a capture, which is used up by that, also when it fails.

        Raises:
            ValueError: a delta before the first commit.
            StagingError: the bytes did not stand still.
        """
        ...

    def drop_captured(self, captured: Any) -> None:
        """Give a capture back that is not to be staged."""
        ...


@runtime_checkable
class SupportsCopyOut(Protocol):
    """A trainer adapter that sees whether what it serves in place stands still, and can copy it."""

    def require_still(self, staged: StagedWeightVersionShardData) -> None:
        """Refuse a shard that is served in place and was written to; cheap.

        Raises:
            StagingError: its bytes are not what its manifest says any more.
        """
        ...

    def copy_out(
        self,
        staged: StagedWeightVersionShardData,
        replace: Callable[[str, Sequence[memoryview]], None],
    ) -> None:
        """Copy the bytes of a shard that is served in place, and let the weights move.

        Does nothing for a shard with memory of its own; may be called again after a failure.

        Args:
            staged: which.
            replace: has an object served from the copy; returns when nobody reads live weights.

        Raises:
            NoFreeArenaError: there is no memory for the copy.
            PublishError: what ``replace`` raises; the weights must not move.
        """
        ...


@runtime_checkable
class SupportsChain(Protocol):
    """A trainer adapter that can express a version as the change since an earlier one.

    The base moves only at commit: a version that was staged and never became READY leaves no
    trace, and the next one is a delta to the same base.
    """

    def commit_staged(self, staged: StagedWeightVersionShardData) -> None:
        """Make the staged bytes the base of the next delta."""
        ...

    def discard_staged(self, staged: StagedWeightVersionShardData) -> None:
        """Forget the staged bytes; the base stays."""
        ...

    def release_staged(self, staged: StagedWeightVersionShardData) -> None:
        """Give the buffers of a released version back to the ring."""
        ...


@runtime_checkable
class SupportsSlots(Protocol):
    """A trainer adapter of one process among several that publish one version together."""

    @property
    def expected_source_slots(self) -> tuple[str, ...]:
        """The slots of all of them, in the same order everywhere; known once tensors are bound."""
        ...


@runtime_checkable
class SupportsAnchors(Protocol):
    """A trainer adapter that can stage what it committed last as a full version, uncopied."""

    def stage_committed(self) -> StagedWeightVersionShardData:
        """Stage the last committed weights as FULL_TENSOR. Raises ValueError without any."""
        ...
