"""Callbacks publish when the optimizer has stepped, and report what was logged."""

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from paceline.refit.errors import VersionSkippedError
from paceline.refit.integrations.transformers import PublishCallback, ReportCallback


class RecordingPublisher:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_full = False

    def publish(self, *, step: int) -> "RecordingPublisher":
        self.calls.append(f"publish {step}")
        return self

    def result(self) -> None:
        self.calls.append("ready")
        if self.is_full:
            raise VersionSkippedError("no room")

    def flush(self, *, timeout_s: float) -> bool:
        self.calls.append("flush")
        return timeout_s > 0

    def before_step(self) -> None:
        self.calls.append("before")


def drive(callback: PublishCallback, steps: int) -> None:
    """Call the hooks in the order in which the Trainer does."""
    args, state, control = TrainingArguments(), TrainerState(), TrainerControl()
    callback.on_train_begin(args, state, control)
    for step in range(1, steps + 1):
        callback.on_pre_optimizer_step(args, state, control)
        state.global_step = step
        callback.on_step_end(args, state, control)
    callback.on_train_end(args, state, control)


def test_first_version_is_published_before_training() -> None:
    """The weights that training starts from are version 0."""
    publisher = RecordingPublisher()
    drive(PublishCallback(publisher), 0)
    assert publisher.calls == ["publish 0", "ready", "flush"]


def test_every_second_step_is_published() -> None:
    """With every=2 odd steps are not published, and readers are waited for at each step."""
    publisher = RecordingPublisher()
    drive(PublishCallback(publisher, every=2), 4)
    assert publisher.calls == [
        "publish 0",
        "ready",
        "before",
        "before",
        "publish 2",
        "ready",
        "before",
        "before",
        "publish 4",
        "ready",
        "flush",
    ]


def test_training_need_not_wait() -> None:
    """With wait=False nothing is waited for until the end, where failures are raised."""
    publisher = RecordingPublisher()
    drive(PublishCallback(publisher, wait=False), 1)
    assert publisher.calls == ["publish 0", "before", "publish 1", "flush"]


def test_versions_left_out_do_not_end_training() -> None:
    """A policy that leaves versions out is no failure."""
    publisher = RecordingPublisher()
    publisher.is_full = True
    drive(PublishCallback(publisher), 1)
    assert publisher.calls.count("ready") == 2


def test_every_below_one_is_refused() -> None:
    """A callback that would never publish is a mistake."""
    with pytest.raises(ValueError, match="at least 1"):
        PublishCallback(RecordingPublisher(), every=0)


def test_logged_steps_are_told_and_summaries_are_not() -> None:
    """Only logs with a reward are steps."""
    told: list[tuple[str, dict[str, object]]] = []
    callback = ReportCallback(
        lambda name, fields: told.append((name, dict(fields))), staleness=lambda: 0.5
    )
    args, state, control = TrainingArguments(), TrainerState(), TrainerControl()
    state.global_step = 3
    callback.on_log(args, state, control, logs={"reward": 0.25, "loss": 0.1, "step_time": 1.5})
    callback.on_log(args, state, control, logs={"train_runtime": 9.0})
    callback.on_log(args, state, control)
    assert told == [
        (
            "train.step",
            {"step": 3, "reward": 0.25, "loss": 0.1, "staleness": 0.5, "step_s": 1.5},
        )
    ]
