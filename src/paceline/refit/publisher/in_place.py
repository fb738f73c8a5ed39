"""Live weights that are published where they lie, and the optimizer that wants to write them."""

import logging
from collections.abc import Callable
from typing import Protocol

from paceline.refit.errors import PublishError, StagingError
from paceline.refit.publisher.line import Line
from paceline.refit.publisher.shelf import VersionShelf
from paceline.refit.publisher.values import PublisherOptions, WeightSource, WhenInPlace
from paceline.refit.trainers.protocol import SupportsCopyOut, TrainerEngineAdapter
from paceline.refit.transports.protocol import SupportsReplace

log = logging.getLogger(__name__)


class HasStepHook(Protocol):
    """The part of a torch optimizer that is needed here."""

    def register_step_pre_hook(self, hook: Callable[..., None]) -> object:
        """Call ``hook`` before every step."""
        ...


class LiveWeights:
    """Takes live weights back before a step, as the policy says."""

    def __init__(
        self,
        *,
        trainer: TrainerEngineAdapter,
        source: WeightSource,
        line: Line,
        shelf: VersionShelf,
        options: PublisherOptions,
    ) -> None:
        self._trainer = trainer
        self._source = source
        self._line = line
        self._shelf = shelf
        self._options = options

    def take_back(self) -> None:
        """Return when the optimizer may write.

        Raises:
            StagingError: readers still hold a version after ``stage_wait_s``.
        """
        if not self._line.wait_idle(self._options.stage_wait_s):
            raise StagingError("the live weights are still being published; step a little later")
        if self._options.when_in_place is WhenInPlace.COPY and self._copy_out():
            return
        self._shelf.send_off()
        if not self._shelf.wait_released(self._options.stage_wait_s):
            raise StagingError(
                "engines still read the live weights, so the optimizer must not step; wait for "
                "their leases to end, or stage with COPY_TO_HOST"
            )

    def _copy_out(self) -> bool:
        """Copy what is served in place; False if it has to go instead."""
        if not isinstance(self._trainer, SupportsCopyOut):
            return False
        if not isinstance(self._source, SupportsReplace):
            return False
        try:
            for version in self._shelf.all_there():
                self._trainer.copy_out(version.staged, self._source.replace_object)
        except PublishError as exc:
            log.info("weights in place could not be copied, so the step waits: %s", exc)
            return False
        return True
