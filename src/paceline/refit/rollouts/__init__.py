"""A client of many rollout engines: least loaded first, fresh enough, another one when one dies."""

from paceline.refit.rollouts.blocking import RolloutClient
from paceline.refit.rollouts.client import AsyncRolloutClient
from paceline.refit.rollouts.model import (
    Completion,
    EngineFailedError,
    Fleet,
    Piece,
    RolloutConfig,
    Want,
)
from paceline.refit.rollouts.registry import FleetWatch, fleet_of

__all__ = [
    "AsyncRolloutClient",
    "Completion",
    "EngineFailedError",
    "Fleet",
    "FleetWatch",
    "Piece",
    "RolloutClient",
    "RolloutConfig",
    "Want",
    "fleet_of",
]
