"""What becomes of requests in flight when a version is ready to go in: one table, no I/O."""

from enum import StrEnum


class UpdatePolicy(StrEnum):
    """How an engine goes from one version to the next."""

    IMMEDIATE = "immediate"
    """Between two forward passes; choices in flight go on and record both versions."""
    DRAIN = "drain"
    """Nothing new is taken until what runs has finished; what has not in time is aborted."""
    ABORT = "abort"
    """What runs is aborted at once; whoever asked asks another engine, or again."""


class Step(StrEnum):
    """What to do now."""

    WRITE = "write"
    WAIT = "wait"
    ABORT = "abort"


def next_step(policy: UpdatePolicy, *, in_flight: int, waited_s: float, drain_s: float) -> Step:
    """Return what an update does next.

    Args:
        policy: as configured.
        in_flight: requests that have not finished.
        waited_s: since nothing new is taken.
        drain_s: how long that may last.
    """
    table = {
        UpdatePolicy.IMMEDIATE: Step.WRITE,
        UpdatePolicy.DRAIN: Step.WAIT if waited_s < drain_s else Step.ABORT,
        UpdatePolicy.ABORT: Step.ABORT,
    }
    return table[policy] if in_flight else Step.WRITE
