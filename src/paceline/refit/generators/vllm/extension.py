"""Further methods of vLLM's workers, for ``collective_rpc``: staging ahead, and looking at it.

Named by ``worker_extension_cls``. Everything returns at once: a worker's thread also runs the
model. vLLM refuses names that a worker has already, hence the prefix.
"""

from collections.abc import Mapping
from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class by vLLM itself."""

    weight_transfer_engine: Any
    speculative_config: Any

    start_weight_update: Any
    update_weights: Any

    def paceline_stage(self, version_id: str, known: list[str] | None = None) -> None:
        """Begin to fetch and prove a version while the model generates."""
        engine = self.weight_transfer_engine
        draft = getattr(self, "get_draft_model", lambda: None)()
        if draft is not None:
            engine.follow_draft(draft, self.speculative_config.draft_model_config)
        engine.stage(version_id, known=None if known is None else frozenset(known))

    def paceline_status(self) -> Mapping[str, Any]:
        """Return the fields of workers.WorkerStatus."""
        status: Mapping[str, Any] = self.weight_transfer_engine.status()
        return status

    def paceline_update(self, info: dict[str, Any]) -> Mapping[str, Any]:
        """Do what vLLM's own calls do, start and update, in one call: the engine is paused."""
        self.start_weight_update()
        self.update_weights(info)
        return self.paceline_status()

    def paceline_prove(self) -> str:
        """Hash everything that is live and return its root digest."""
        root: str = self.weight_transfer_engine.prove()
        return root

    def paceline_ways(self) -> Mapping[str, str]:
        """Return how each parameter is reached."""
        ways: Mapping[str, str] = self.weight_transfer_engine.ways()
        return ways
