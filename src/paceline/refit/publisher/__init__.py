"""A training loop's way to publish: start, publish after a step, close."""

from paceline.refit.publisher.canonical import CanonicalPublisher
from paceline.refit.publisher.line import Publication, PublicationState
from paceline.refit.publisher.publish import Publisher
from paceline.refit.publisher.values import (
    Notify,
    PublishedVersion,
    PublisherOptions,
    Waiter,
    WeightSource,
    WhenInPlace,
    WhenLeased,
    WhenUnproven,
)

__all__ = [
    "CanonicalPublisher",
    "Notify",
    "Publication",
    "PublicationState",
    "PublishedVersion",
    "Publisher",
    "PublisherOptions",
    "Waiter",
    "WeightSource",
    "WhenInPlace",
    "WhenLeased",
    "WhenUnproven",
]
