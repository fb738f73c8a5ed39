"""Rent machines from any provider through one interface. Re-exports only."""

from paceline.rental.backends.protocol import (
    BackendAdapter,
    SupportsListing,
    SupportsListingLag,
)
from paceline.rental.backends.registry import (
    BACKEND_REGISTRY,
    backend_names,
    load_backend,
    register_backend,
)
from paceline.rental.errors import (
    BackendError,
    CommandTimeoutError,
    GoneUnrecordedError,
    IllegalMoveError,
    InstanceNotFoundError,
    NoOffersError,
    NotProvenGoneError,
    ProvisionError,
    RemoteCommandError,
    SshUnreachableError,
)
from paceline.rental.model import (
    ExitCode,
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
)

__all__ = [
    "BACKEND_REGISTRY",
    "BackendAdapter",
    "BackendError",
    "CommandTimeoutError",
    "ExitCode",
    "GoneUnrecordedError",
    "IllegalMoveError",
    "InstanceHandle",
    "InstanceNotFoundError",
    "InstanceState",
    "InstanceStatus",
    "NoOffersError",
    "NotProvenGoneError",
    "Offer",
    "OfferConstraints",
    "ProvisionError",
    "RemoteCommandError",
    "SshUnreachableError",
    "SupportsListing",
    "SupportsListingLag",
    "backend_names",
    "load_backend",
    "register_backend",
]
