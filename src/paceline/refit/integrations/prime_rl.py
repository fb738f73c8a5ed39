"""A `prime-rl` weight broadcast: versions instead of a checkpoint per step on a shared disk.

`prime-rl` (seen in 2026) calls ``broadcast_weights(model, step)`` on every rank, and its
orchestrator takes a file ``broadcasts/step_N/STABLE`` as the word that step N can be served.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.refit.integrations.streams import Publishes

FOLDER = "broadcasts"
STABLE = "STABLE"


class WeightBroadcast:
    """Has the methods of prime-rl's WeightBroadcast; no rank gathers, each publishes its part."""

    def __init__(
        self,
        output_dir: Path,
        publisher_of: Callable[[Any], Publishes],
        *,
        is_master: bool = True,
    ) -> None:
        """Do nothing yet.

        Args:
            output_dir: where the orchestrator looks.
            publisher_of: makes a publisher of the model, such as ``run.publisher``; called once.
            is_master: whether this rank tells the orchestrator.
        """
        self._output_dir = output_dir
        self._publisher_of = publisher_of
        self._is_master = is_master
        self._model: Any = None
        self._publisher: Publishes | None = None

    def broadcast_weights(self, model: Any, step: int) -> None:
        """Publish the weights; the orchestrator hears of them when every part is READY.

        Raises:
            ValueError: another model than before.
            PublishError: it could not be made fetchable; the orchestrator hears nothing.
        """
        if self._publisher is None:
            publisher = self._publisher_of(model)
            publisher.start()
            self._model, self._publisher = model, publisher
        if model is not self._model:
            raise ValueError("this is not the model that was broadcast before")
        self._publisher.publish(step=step).result()
        if self._is_master:
            folder = self._output_dir / FOLDER / f"step_{step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / STABLE).touch()

    def maybe_clean(self, interval_to_keep: int | None) -> None:
        """Do nothing: the publisher retires what no engine needs."""

    def shutdown(self) -> None:
        """Leave the run; idempotent."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None
