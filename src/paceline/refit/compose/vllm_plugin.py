"""What vLLM finds under ``vllm.general_plugins``: light, for each of its processes loads it."""

from typing import Any

from paceline.core.registry import load_entry
from paceline.refit.generators.registry import VLLM_PARTS


def register() -> None:
    """Tell vLLM of the backend ``paceline``; it is imported when it is chosen."""
    register_backend: Any = load_entry(VLLM_PARTS, "register", port="part for vLLM")
    register_backend("paceline.refit.compose.vllm_worker", "Backend")
