"""A reader's hold on a version, renewed while the reader works, always given back."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.core.clock import Clock
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import ControlError, ControlUnavailableError

log = logging.getLogger(__name__)


class LeaseKeeper:
    """One live lease."""

    def __init__(
        self, control: ControlPlane, *, version_id: str, worker_id: str, ttl_s: int, clock: Clock
    ) -> None:
        self._control = control
        self._version_id = version_id
        self._worker_id = worker_id
        self._ttl_s = ttl_s
        self._clock = clock
        self._acquire()

    def renew_if_due(self) -> None:
        """Renew after a third of its time; a service that is down is asked again later.

        Nothing read under an expired lease can be wrong: every byte is proven by its hash.

        Raises:
            NotFoundError, PreconditionError: the version cannot be held any more.
        """
        if self._clock.monotonic() < self._renew_at:
            return
        try:
            self._acquire()
        except ControlUnavailableError as exc:
            log.warning("lease on %s not renewed: %s", self._version_id, exc)

    def release(self) -> None:
        """Give it back; if that fails it expires by itself, and the work done under it stands."""
        try:
            self._control.release_lease(self._lease)
        except ControlError as exc:
            log.warning("lease on %s not released, it will expire: %s", self._version_id, exc)

    def _acquire(self) -> None:
        # Counted from before the call: a slow answer must not make us renew too late.
        self._renew_at = self._clock.monotonic() + self._ttl_s / 3
        self._lease = self._control.acquire_lease(
            version_id=self._version_id, worker_id=self._worker_id, ttl_seconds=self._ttl_s
        )


@contextmanager
def hold_lease(
    control: ControlPlane, *, version_id: str, worker_id: str, ttl_s: int, clock: Clock
) -> Iterator[LeaseKeeper]:
    """Hold a lease for the length of the block.

    Raises:
        ControlError: it could not be taken.
    """
    keeper = LeaseKeeper(
        control, version_id=version_id, worker_id=worker_id, ttl_s=ttl_s, clock=clock
    )
    try:
        yield keeper
    finally:
        keeper.release()
