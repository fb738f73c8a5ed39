"""Callbacks for the `transformers` Trainer and everything built on it (TRL, Accelerate)."""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from paceline.refit.errors import VersionSkippedError

log = logging.getLogger(__name__)

END_WAIT_S: Final = 600.0


class Ends(Protocol):
    """The part of a publication that a training loop may wait for."""

    def result(self) -> object:
        """Wait until the version is READY."""
        ...


class Publishes(Protocol):
    """The part of a publisher that a training loop meets."""

    def publish(self, *, step: int) -> Ends:
        """Publish the weights as they are now."""
        ...

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything is out; raises what failed."""
        ...

    def before_step(self) -> None:
        """Wait until the optimizer may change weights that are served in place."""
        ...


class PublishCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for us
    """Publishes what training starts from, and the weights after every k-th optimizer step."""

    def __init__(self, publisher: Publishes, *, every: int = 1, wait: bool = True) -> None:
        """Take a started publisher.

        Args:
            publisher: belongs to the caller.
            every: after how many optimizer steps.
            wait: until each version is READY, so that the next rollouts can have it; without it
                training goes on as soon as the weights are copied, and a failure is raised by the
                publish after it, or at the end of training.

        Raises:
            ValueError: ``every`` is below 1.
        """
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self._publisher = publisher
        self._every = every
        self._wait = wait

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Publish the first version, so that the first rollouts are on-policy."""
        self._publish(state.global_step)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Let readers of weights that are served in place finish."""
        self._publisher.before_step()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Publish after the optimizer has stepped and before the next rollouts begin."""
        if state.global_step % self._every == 0:
            self._publish(state.global_step)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Have the last version out before training is said to be done."""
        if not self._publisher.flush(timeout_s=END_WAIT_S):
            log.warning("the last version is not out %g s after the end of training", END_WAIT_S)

    def _publish(self, step: int) -> None:
        publication = self._publisher.publish(step=step)
        if self._wait:
            try:
                publication.result()
            except VersionSkippedError as exc:
                log.info("training goes on: %s", exc)


class ReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for us
    """Tells the run of every logged step: reward, loss, staleness, seconds."""

    def __init__(
        self,
        notify: Callable[[str, Mapping[str, object]], None],
        *,
        staleness: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Take where events go, and who knows how old the last rollouts were."""
        self._notify = notify
        self._staleness = staleness

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Pass on the figures of a step; the summary at the end of training has no reward."""
        if logs is None or "reward" not in logs:
            return
        self._notify(
            "train.step",
            {
                "step": state.global_step,
                "reward": logs["reward"],
                "loss": logs.get("loss"),
                "staleness": self._staleness(),
                "step_s": logs.get("step_time"),
            },
        )
