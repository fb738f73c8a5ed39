"""Processes of one start that have to know what all of them begin with.

Each tells the run of its own slot's root, and reads what the others told; then each of them makes
the same root digest of the same parts. Nobody has to hear of the decision: all of them make it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from paceline.core.clock import Clock
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.digest import version_root
from paceline.refit.model import Event, WorkerRole
from paceline.refit.publisher.patience import persist
from paceline.refit.publisher.values import PublisherOptions, member_end

TOLD: Final = "chain.slot"
LOOK_S = 0.1
GRACE_S = 2.0
"""How long after a registration can have run out whoever still lives has not just died."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one process began with."""

    worker_id: str
    slot: str
    last_version_id: str
    """What its run had published last; empty: nothing."""
    root_digest: str
    """Of its slot, as it has it."""


class Meeting:
    """One process's part in it; belongs to the thread that starts the publisher."""

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
        self._told: dict[str, Told] = {}
        self._index = 0

    def root_of_all(self, last_version_id: str, root_digest: str) -> str:
        """Tell what is here, wait for the others, and return the root digest of all slots.

        Empty if there is none: somebody does not come, or is from another start and went on since.

        Args:
            last_version_id: what the run published last; with none, nobody is waited for.
            root_digest: of this process's slot.

        Raises:
            ControlError: the control service does not answer, or refuses.
        """
        self._tell(last_version_id, root_digest)
        if not last_version_id:
            return ""
        options, began = self._options, self._clock.monotonic()
        while True:
            told = self._listen()
            alike = {
                slot: each.root_digest
                for slot, each in told.items()
                if each.last_version_id == last_version_id
            }
            if len(alike) == len(self._slots):
                return version_root(alike)
            waited_s = self._clock.monotonic() - began
            lived_on = waited_s > options.registration_ttl_s + GRACE_S
            others = [each.worker_id for slot, each in told.items() if slot not in alike]
            if waited_s > options.slots_wait_s or (lived_on and self._is_alive(others)):
                return ""
            self._clock.sleep(LOOK_S)

    def _tell(self, last_version_id: str, root_digest: str) -> None:
        event = Event(
            worker_id=self._options.worker_id,
            name=TOLD,
            at_unix_ms=int(self._clock.time() * 1000),
            fields={
                "run_id": self._options.run_id,
                "slot": self._slot,
                "incarnation": self._options.incarnation,
                "last_version_id": last_version_id,
                "root_digest": root_digest,
            },
        )
        self._persist(lambda: self._control.record_event(event))

    def _listen(self) -> dict[str, Told]:
        """Return the last that every slot of this start told."""
        while True:
            events = self._persist(lambda: self._control.list_events(after=self._index))
            if not events:
                return self._told
            self._index = events[-1].index
            for told in filter(None, map(self._of_this_start, events)):
                self._told[told.slot] = told

    def _of_this_start(self, event: Event) -> Told | None:
        said = {name: str(value) for name, value in event.fields.items()}
        slot = said.get("slot", "")
        is_ours = (
            event.name == TOLD
            and slot in self._slots
            and event.worker_id.endswith(member_end(self._options.run_id, slot))
            and said.get("incarnation") == self._options.incarnation
        )
        if not is_ours:
            return None
        return Told(
            worker_id=event.worker_id,
            slot=slot,
            last_version_id=said.get("last_version_id", ""),
            root_digest=said.get("root_digest", ""),
        )

    def _is_alive(self, worker_ids: Sequence[str]) -> bool:
        """Say whether one of these processes lives: it has begun before, and does not begin now."""
        workers = self._persist(lambda: self._control.list_workers(self._options.model_name))
        living = {each.worker_id for each in workers if each.role is WorkerRole.TRAINER}
        return not living.isdisjoint(worker_ids)

    def _persist(self, call: Callable[[], _T]) -> _T:
        return persist(call, clock=self._clock, wait_s=self._options.control_wait_s)
