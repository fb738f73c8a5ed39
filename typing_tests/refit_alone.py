"""A training loop beside refit type-checks: nothing here runs."""

from paceline.refit import TrainerStagingMode, WeightPayloadFormat, WeightVersionShardManifest
from paceline.rental import BackendAdapter, Offer, OfferConstraints, load_backend


def cheapest(name: str) -> Offer:
    """Return the cheapest offer of a backend."""
    backend: BackendAdapter = load_backend(name)()
    return backend.search_offers(OfferConstraints(gpu_target="h100-1x"))[0]


def is_delta(payload: WeightPayloadFormat, mode: TrainerStagingMode) -> bool:
    """Return whether a delta is staged on the host."""
    return (
        payload is WeightPayloadFormat.XOR_DELTA and mode.value == TrainerStagingMode.COPY_TO_HOST
    )


def digest(manifest: WeightVersionShardManifest) -> str:
    """Return the digest that is advertised."""
    return manifest.digest
