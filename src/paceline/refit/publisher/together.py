"""One version by several processes: which one it is, and what to do when one of them is gone.

Nobody leads and nothing is sent between them. Whoever comes first creates the version of a step;
the others find it there. It is READY with the last slot; until then everybody looks whether those
who are missing still live, and gives the version up when one does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.core.clock import Clock
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import NotFoundError, PreconditionError, PublishError
from paceline.refit.model import (
    FULL_FORMATS,
    VersionRequest,
    VersionState,
    WeightVersion,
    WorkerRole,
)
from paceline.refit.publisher.meeting import Meeting
from paceline.refit.publisher.patience import persist
from paceline.refit.publisher.values import (
    PublisherOptions,
    WhenLeased,
    member_end,
    sequence_of,
    version_uid,
)

LOOK_S = 0.1
"""How often it is looked who is missing; well below the life of a registration."""
NAMES_SHOWN = 3
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a process publishes next."""

    sequence: int
    is_full: bool
    """Stage everything: somebody has no base for a delta."""


class Together:
    """One process's part in versions of several slots; belongs to the thread that publishes."""

    def __init__(
        self,
        *,
        control: ControlPlane,
        clock: Clock,
        options: PublisherOptions,
        slot: str,
        slots: Sequence[str],
    ) -> None:
        """Take the parts; ``options`` are those of ``options_of``."""
        self._control = control
        self._clock = clock
        self._options = options
        self._slot = slot
        self._slots = tuple(slots)
        self._seen_alive: set[str] = set()
        self.run_id = options.run_id
        """The run that is published to; another than asked for only with ``new-run``."""
        self.root_of_all = Meeting(
            control=control, clock=clock, options=options, slot=slot, slots=slots
        ).root_of_all
        """What all processes start with."""

    def start(self) -> None:
        """Give up what a process before this one left unfinished in this slot: its bytes are gone.

        Raises:
            ControlError: the control service does not answer, or refuses.
        """
        for version in self._of_run():
            if version.state is VersionState.STAGING and self._slot in self._covered(version.uid):
                self._give_up(version.uid)

    def agree(self, *, step: int, after: int, head_uid: str | None, needs_full: bool) -> Turn:
        """Return which version this step is, and how it must be staged here.

        Args:
            step: the framework's, the same in all processes.
            after: the highest sequence that this process has used.
            head_uid: the version that a delta from here applies to.
            needs_full: this process has no base.
        """
        found = self._of_run()
        newest = max([after, *(self._sequence(version) for version in found)])
        for version in found:
            sequence = self._sequence(version)
            if sequence <= after or not self._is_this(version, sequence, step):
                continue
            is_full = version.payload_format in FULL_FORMATS
            if is_full or (not needs_full and version.base_version_id == head_uid):
                return Turn(sequence=sequence, is_full=is_full)
            self._give_up(version.uid)  # a delta to what is not here: all have to start anew
            return Turn(sequence=newest + 1, is_full=True)
        return Turn(sequence=newest + 1, is_full=needs_full)

    def request(self, request: VersionRequest, *, step: int) -> VersionRequest:
        """Return what all processes ask for: equal, so that one version comes of it."""
        key = _key(request.idempotency_key, step, self._options.incarnation)
        return replace(request, idempotency_key=key, expected_source_slots=self._slots)

    def wait_ready(self, uid: str) -> None:
        """Return when every slot is in.

        Raises:
            PublishError: a process that is missing is gone, or does not come, or gave it up.
            ControlError: the control service does not answer, or refuses.
        """
        deadline = self._clock.monotonic() + self._options.slots_wait_s
        while True:
            state, missing = self._look(uid)
            if state is VersionState.READY:
                return
            if state is not VersionState.STAGING:
                raise PublishError(f"version {uid} was given up by another process of this trainer")
            alive = self._alive()
            gone = sorted((set(missing) & self._seen_alive) - alive)
            self._seen_alive |= alive
            if gone:
                raise PublishError(f"version {uid} lacks {_shown(gone)}, whose process is gone")
            if self._clock.monotonic() + LOOK_S > deadline:
                raise PublishError(
                    f"version {uid} lacks {_shown(missing)} after "
                    f"{self._options.slots_wait_s:g} s; publish the same step in every process"
                )
            self._clock.sleep(LOOK_S)

    def _look(self, uid: str) -> tuple[VersionState, Sequence[str]]:
        try:
            state = self._persist(lambda: self._control.get_version(uid)).state
        except NotFoundError:
            return VersionState.RELEASING, ()
        covered = self._covered(uid) if state is VersionState.STAGING else frozenset(self._slots)
        return state, [slot for slot in self._slots if slot not in covered]

    def _covered(self, uid: str) -> frozenset[str]:
        try:
            shards = self._persist(lambda: self._control.list_shards(uid))
        except NotFoundError:
            return frozenset()
        return frozenset(shard.source_slot_id for shard in shards)

    def _alive(self) -> set[str]:
        """Return the slots that a living process of this run fills."""
        workers = self._persist(lambda: self._control.list_workers(self._options.model_name))
        ends = {member_end(self._options.run_id, slot): slot for slot in self._slots}
        return {
            slot
            for worker in workers
            if worker.role is WorkerRole.TRAINER
            for end, slot in ends.items()
            if worker.worker_id.endswith(end)
        }

    def _of_run(self) -> Sequence[WeightVersion]:
        found = self._persist(lambda: self._control.list_versions(self._options.model_name))
        return [version for version in found if self._sequence(version) >= 0]

    def _sequence(self, version: WeightVersion) -> int:
        return sequence_of(version.uid, self.run_id)

    def _is_this(self, version: WeightVersion, sequence: int, step: int) -> bool:
        """Say whether somebody has created this step's version and waits for this slot."""
        uid = version_uid(self.run_id, sequence)
        key = _key(uid, step, self._options.incarnation)
        return version.state is VersionState.STAGING and version.idempotency_key == key

    def _give_up(self, uid: str) -> None:
        try:
            self._persist(lambda: self._control.delete_version(uid))
        except (NotFoundError, PreconditionError):
            return  # gone already

    def _persist(self, call: Callable[[], _T]) -> _T:
        return persist(call, clock=self._clock, wait_s=self._options.control_wait_s)


def options_of(options: PublisherOptions, slot: str) -> PublisherOptions:
    """Return the options of one process among several.

    Its worker id says which slot it fills, so that the others can tell whether that one lives; and
    its registration is short, so that they can tell soon. Composed deltas are not made: whether one
    pays is decided by sizes, which differ between processes.

    Raises:
        ValueError: versions are to be left out when memory is full, which is each process's own.
    """
    if options.when_leased is not WhenLeased.BLOCK:
        raise ValueError(
            f"several processes cannot leave versions out ({options.when_leased}): one's memory is "
            "full when another's is not, and the version would lack a slot; use block"
        )
    return replace(
        options,
        worker_id=options.worker_id + member_end(options.run_id, slot),
        registration_ttl_s=min(options.registration_ttl_s, options.together_ttl_s),
        compose=False,
    )


def _key(uid: str, step: int, incarnation: str) -> str:
    return f"{uid}:step {step}:{incarnation}"


def _shown(slots: Sequence[str]) -> str:
    more = len(slots) - NAMES_SHOWN
    return ", ".join(slots[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
