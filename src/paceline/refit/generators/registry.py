"""Rollout engines by name."""

from paceline.core.registry import LazyEntry

ROLLOUT_ENGINES: dict[str, LazyEntry] = {
    "transformers": LazyEntry(
        "paceline.refit.generators.transformers.engine", "TransformersEngine", "hf"
    ),
    "sglang": LazyEntry("paceline.refit.generators.sglang.engine", "SglangEngine", "hf"),
}
"""Name -> class that signs RolloutEngine."""

ENGINE_SERVERS: dict[str, LazyEntry] = {
    "vllm": LazyEntry("paceline.refit.generators.vllm.command", "server_command", "vllm"),
}
"""Engines with a server of their own -> function that returns the command which starts it."""

VLLM_PARTS: dict[str, LazyEntry] = {
    "register": LazyEntry("paceline.refit.generators.vllm.plugin", "register_backend", "vllm"),
    "worker": LazyEntry(
        "paceline.refit.generators.vllm.worker", "PacelineWeightTransferEngine", "vllm"
    ),
    "offline": LazyEntry("paceline.refit.generators.vllm.driver", "OfflineDriver", "vllm"),
    "online": LazyEntry("paceline.refit.generators.vllm.driver", "OnlineDriver", "vllm"),
    "engine": LazyEntry("paceline.refit.generators.vllm.engine", "VllmEngine", "vllm"),
}
"""What the composition root needs to be a plugin of vLLM."""
