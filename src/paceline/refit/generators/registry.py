"""Rollout engines by name."""

from paceline.core.registry import LazyEntry

ROLLOUT_ENGINES: dict[str, LazyEntry] = {
    "transformers": LazyEntry(
        "paceline.refit.generators.transformers.engine", "TransformersEngine", "hf"
    ),
    "sglang": LazyEntry("paceline.refit.generators.sglang.engine", "SglangEngine", "hf"),
}
"""Name -> class that signs RolloutEngine."""
