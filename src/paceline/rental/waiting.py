"""Waiting for a machine, the same for every backend."""

from collections.abc import Callable

from paceline.core.clock import Clock
from paceline.core.waiting import wait_until
from paceline.rental.errors import InstanceNotFoundError
from paceline.rental.model import InstanceState, InstanceStatus


def wait_running(
    status: Callable[[], InstanceStatus],
    *,
    clock: Clock,
    timeout_s: float,
    what: str = "the machine",
    interval_s: float = 5.0,
) -> None:
    """Ask ``status`` until it says running.

    Raises:
        DeadlineExceededError: it did not within ``timeout_s``.
        InstanceNotFoundError: it says destroyed.
    """

    def is_running() -> bool:
        state = InstanceState.parse(status().state)
        if state is InstanceState.DESTROYED:
            raise InstanceNotFoundError(
                f"{what} went away while it was expected to start; rent another"
            )
        return state is InstanceState.RUNNING

    wait_until(
        is_running,
        what=f"{what} becoming usable",
        clock=clock,
        timeout_s=timeout_s,
        interval_s=interval_s,
    )
