"""Move weight versions from trainers to rollout engines. Re-exports only."""

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.refit.errors import (
    ApplyError,
    ControlError,
    FetchError,
    PublishError,
    RefitError,
    StagingError,
    StaleVersionError,
    UncertainStateError,
    VerifyError,
)
from paceline.refit.model import (
    CompletionFence,
    Lease,
    Shard,
    StagedWeightVersionShardData,
    TensorBuffer,
    TensorEntry,
    TrainerStagingMode,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
    WeightVersionShardManifest,
    WorkerRole,
)
from paceline.refit.trainers.protocol import (
    NixlMetadataProvider,
    SupportsChain,
    TrainerEngineAdapter,
    WeightVersionShardManifestPublisher,
)

if TYPE_CHECKING:
    from paceline.refit.compose import TrainerConnection, join_run
    from paceline.refit.generators.protocol import Sampling

_LATE = {
    "Sampling": "paceline.refit.generators.protocol",
    "TrainerConnection": "paceline.refit.compose",
    "join_run": "paceline.refit.compose",
}
"""Names that are imported when they are used, so that the front door stays light."""


def __getattr__(name: str) -> object:
    """Import one of the late names."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_LATE[name]), name)
    return found


__all__ = [
    "ApplyError",
    "CompletionFence",
    "ControlError",
    "FetchError",
    "Lease",
    "NixlMetadataProvider",
    "PublishError",
    "RefitError",
    "Sampling",
    "Shard",
    "StagedWeightVersionShardData",
    "StagingError",
    "StaleVersionError",
    "SupportsChain",
    "TensorBuffer",
    "TensorEntry",
    "TrainerConnection",
    "TrainerEngineAdapter",
    "TrainerStagingMode",
    "UncertainStateError",
    "VerifyError",
    "VersionState",
    "WeightPayloadFormat",
    "WeightVersion",
    "WeightVersionShardManifest",
    "WeightVersionShardManifestPublisher",
    "WorkerRole",
    "join_run",
]
