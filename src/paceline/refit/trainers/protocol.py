"""What a trainer engine signs, and what publication needs around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

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
