"""Versions on their way out: released, waited for, taken down, their memory given back.

A version leaves in this order, each step repeatable: RELEASING in the control service (no new
lease), its shard deleted (no lease lives), objects withdrawn (no reader inside), memory back.
"""

import logging
import threading
from collections.abc import Iterable

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import ControlError, NotFoundError, PreconditionError, PublishError
from paceline.refit.publisher.values import OwnVersion, WeightSource
from paceline.refit.retention import KeptVersion, plan_retention
from paceline.refit.staging.served import ServedShards
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.protocol import SupportsChain
from paceline.refit.transports.protocol import SupportsCommits

log = logging.getLogger(__name__)

_POLL_S = 0.1


class VersionShelf:
    """The versions that this process serves, and those that it is about to stop serving.

    Safe from several threads. No lock is held while somebody else is called, but for the one
    that lets a single thread release at a time.
    """

    def __init__(
        self,
        *,
        control: ControlPlane,
        chain: SupportsChain,
        source: WeightSource,
        slot: str,
        worker_id: str,
        clock: Clock,
    ) -> None:
        self._control = control
        self._chain = chain
        self._source = source
        self._slot = slot
        self._worker_id = worker_id
        self._clock = clock
        self._served: ServedShards[OwnVersion] = ServedShards(source)
        self._kept: list[OwnVersion] = []
        self._leaving: list[OwnVersion] = []
        self._books = threading.Lock()
        """Guards the two lists."""
        self._releasing = threading.Lock()
        self.trouble: ControlError | None = None
        """The control service's last refusal here; None once it answers again."""

    def serve(self, version: OwnVersion) -> None:
        """Make the bytes of a version readable; idempotent."""
        if version.is_served:
            return
        self._served.serve(version.buffers)
        version.is_served = True

    def abandon(self, buffers: StagedBuffers) -> None:
        """Withdraw what staging has made readable of a version that does not come out."""
        self._served.abandon(buffers)

    def keep(self, version: OwnVersion) -> None:
        """Enter a version that is READY."""
        with self._books:
            self._kept.append(version)

    def newest_full(self) -> int:
        """Return the sequence of the newest full version kept, -1 for none."""
        with self._books:
            return max(
                (item.description.sequence for item in self._kept if item.is_full), default=-1
            )

    def retain(self, *, keep_old: int) -> None:
        """Send off what a newer full version makes unnecessary."""
        with self._books:
            kept = [
                KeptVersion(uid=item.uid, sequence=item.description.sequence, is_full=item.is_full)
                for item in self._kept
            ]
            going = set(plan_retention(kept, keep_old=keep_old))
            self._leaving += [item for item in self._kept if item.uid in going]
            self._kept = [item for item in self._kept if item.uid not in going]

    def retire_composed(self, *, below: int) -> None:
        """Send off composed deltas to an earlier sequence: the newest leads everybody further."""
        with self._books:
            going = [
                item
                for item in self._kept
                if item.is_composed and item.description.sequence < below
            ]
            self._leaving += going
            self._kept = [item for item in self._kept if item not in going]

    def drop_oldest_unleased(self) -> bool:
        """Send off the oldest full version that nobody leases, and release; False for none.

        The newest version stays: the next one is built on it. Raises ControlError.
        """
        with self._books:
            newest = max((item.description.sequence for item in self._kept), default=-1)
            fulls = [item for item in self._kept if item.is_full]
        for item in sorted(fulls, key=lambda each: each.description.sequence):
            is_head = item.description.sequence == newest
            if not is_head and not self._control.list_leases(item.uid):
                with self._books:
                    self._kept = [each for each in self._kept if each is not item]
                    self._leaving.append(item)
                self.release()
                return True
        return False

    def all_there(self) -> list[OwnVersion]:
        """Return what is served, leaving or not."""
        with self._books:
            return [*self._kept, *self._leaving]

    def send_off(self, versions: Iterable[OwnVersion] | None = None) -> None:
        """Start taking versions away, all of those kept by default; ``release`` goes on."""
        with self._books:
            if versions is None:
                self._leaving += self._kept
                self._kept = []
            else:
                self._leaving += versions

    def release(self) -> None:
        """Take every leaving version as far as it goes now; never waits for a lease.

        A control service that does not answer is noted in ``trouble`` and asked again next time.
        """
        with self._releasing:
            with self._books:
                leaving = list(self._leaving)
            gone = []
            try:
                for version in leaving:
                    if self._take_away(version):
                        gone.append(version)  # noqa: PERF401 - what went before a failure counts
                self.trouble = None
            except ControlError as exc:
                self.trouble = exc
            with self._books:
                self._leaving = [item for item in self._leaving if item not in gone]

    def wait_released(self, timeout_s: float) -> bool:
        """Release until nothing is leaving any more; False at the deadline."""

        def is_done() -> bool:
            self.release()
            with self._books:
                return not self._leaving

        try:
            wait_until(
                is_done,
                what="releasing versions",
                clock=self._clock,
                timeout_s=timeout_s,
                interval_s=_POLL_S,
            )
        except DeadlineExceededError:
            return False
        return True

    def cut_off(self) -> None:
        """Take down what is left, leased or not: this process is going away."""
        with self._books:
            left, self._leaving = self._leaving, []
        for version in left:
            self.take_down(version)

    def take_down(self, version: OwnVersion) -> bool:
        """Stop serving and give the memory back; False if a reader does not leave. Repeatable."""
        free = [version]
        if version.is_served:
            try:
                if isinstance(self._source, SupportsCommits):
                    self._source.retire_version(version.uid)
                free = list(self._served.withdraw(version, version.buffers))
            except (
                PublishError
            ) as exc:  # its memory stays in use; asked again with the next release
                log.info("version %s cannot be taken down yet: %s", version.uid, exc)
                return False
            version.is_served = False
        self._source.release_manifest(version_id=version.uid, source_slot_id=self._slot)
        for item in free:
            if not item.is_composed:
                self._chain.release_staged(item.staged)
        return True

    def _take_away(self, version: OwnVersion) -> bool:
        """Return whether a version is gone. Raises ControlError if the service does not answer."""
        try:
            self._control.delete_version(version.uid)
            if version.is_advertised:
                self._control.delete_shard(
                    version_id=version.uid,
                    source_slot_id=self._slot,
                    worker_id=self._worker_id,
                )
        except PreconditionError:
            return False  # leased, or our registration has to be renewed first
        except NotFoundError:
            pass  # never created, or swept by the service: nobody can hold a lease
        return self.take_down(version)
