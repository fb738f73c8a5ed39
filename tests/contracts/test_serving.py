"""Engines behind the routes keep the serving contract."""

from contracts.engines import TinySglang, TinyTransformers
from paceline.testing.contracts.serving import ServingContract


class TestTransformers(TinyTransformers, ServingContract):
    """The embedded engine."""


class TestSglang(TinySglang, ServingContract):
    """The stand-in for an SGLang server."""
