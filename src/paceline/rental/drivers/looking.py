"""Finds out what became of a create call that was not answered, by its label."""

from dataclasses import dataclass

from paceline.rental.backends.protocol import SupportsListing
from paceline.rental.drivers.parts import (
    POLL_S,
    SETTLE_S,
    SETTLE_S_MAX,
    RentalParts,
    lag_of,
    not_proven_gone,
)
from paceline.rental.errors import BackendError, InstanceNotFoundError
from paceline.rental.lifecycle import MachineState
from paceline.rental.model import InstanceHandle, InstanceState
from paceline.rental.records import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a look for a label gave: a machine, or none and whether that proves anything."""

    instance: InstanceHandle | None = None
    proves_absence: bool = False
    note: str = ""


class Looker:
    """Asks backends about machines on record."""

    def __init__(self, parts: RentalParts) -> None:
        self._parts = parts

    def look(self, machine: Machine) -> Look:
        """Ask the backend once for the machine's label."""
        backend = self._parts.backend(machine.backend)
        if not isinstance(backend, SupportsListing):
            return Look(note=f"{machine.backend} cannot list machines")
        age_s = self._parts.clock.time() - machine.intended_at
        try:
            listed = backend.list_instances(label_prefix=machine.label)
        except BackendError as exc:
            return Look(note=str(exc))
        for instance in listed:
            if instance.label == machine.label:
                return Look(instance=instance)
        lag_s = lag_of(backend)
        note = f"not listed {age_s:.0f} s after its create call; listings may be {lag_s:g} s late"
        return Look(proves_absence=age_s >= lag_s, note=note)

    def resolve(
        self, machine: Machine, *, waits: bool, failure: Exception | None = None
    ) -> tuple[Machine, Look]:
        """Find out what became of an intent; with ``waits``, wait some time for a late listing.

        Raises NotProvenGoneError if that cannot be found out now.
        """
        clock = self._parts.clock
        deadline = clock.monotonic() + (self._settle_s(machine) if waits else 0.0)
        look = self.look(machine)
        while look.instance is None and not look.proves_absence:
            left_s = deadline - clock.monotonic()
            backend = self._parts.backend(machine.backend)
            if left_s <= 0 or not isinstance(backend, SupportsListing):
                raise not_proven_gone(machine, look.note) from failure
            clock.sleep(min(POLL_S, left_s))
            look = self.look(machine)
        if look.instance is not None:
            return self._parts.take(machine, look.instance), look
        return self._parts.end(machine, MachineState.NEVER_CREATED), look

    def state_of(self, machine: Machine) -> InstanceState:
        """Ask once how a machine is. Raises BackendError where it cannot be asked."""
        try:
            status = self._parts.backend(machine.backend).status(machine.handle)
        except InstanceNotFoundError:
            return InstanceState.DESTROYED
        return InstanceState.parse(status.state)

    def _settle_s(self, machine: Machine) -> float:
        lag_s = lag_of(self._parts.backend(machine.backend))
        return max(SETTLE_S, lag_s + POLL_S) if lag_s <= SETTLE_S_MAX else SETTLE_S
