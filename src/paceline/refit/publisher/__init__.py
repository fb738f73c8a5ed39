"""A training loop's way to publish: start, publish after a step, close."""

from paceline.refit.publisher.canonical import CanonicalPublisher
from paceline.refit.publisher.publish import Publisher
from paceline.refit.publisher.values import (
    Notify,
    PublishedVersion,
    PublisherOptions,
    Waiter,
    WeightSource,
)

__all__ = [
    "CanonicalPublisher",
    "Notify",
    "PublishedVersion",
    "Publisher",
    "PublisherOptions",
    "Waiter",
    "WeightSource",
]
