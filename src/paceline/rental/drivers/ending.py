"""Ends machines and sees them gone."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.rental.backends.protocol import SupportsListing, SupportsResidue, SupportsSeenGone
from paceline.rental.drivers.looking import Looker
from paceline.rental.drivers.parts import POLL_S, RentalParts, not_proven_gone
from paceline.rental.errors import (
    AuthError,
    BackendError,
    GoneUnrecordedError,
    IllegalMoveError,
    NotProvenGoneError,
)
from paceline.rental.lifecycle import MachineState, is_over
from paceline.rental.model import InstanceHandle, InstanceState
from paceline.rental.records import Machine
from paceline.store.protocol import StoreError

_GONE_TIMEOUT_S = 120.0
_ORDER_EVERY_S = 20.0
"""An order that was answered and not followed is given again."""

_TOLD = "told to go"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was read after a machine was told to go."""

    label: str
    backend: str
    instance_id: str
    at_s: float
    reads: Sequence[str]
    """Each thing that was verified, in words."""

    def __str__(self) -> str:
        """Return it as a person is told."""
        return f"{self.label} ({self.backend} {self.instance_id}): {', '.join(self.reads)}"


class Ender:
    """Destroys machines; whatever cannot be proven gone stays on record."""

    def __init__(self, parts: RentalParts) -> None:
        self._parts = parts
        self._looker = Looker(parts)

    def destroy(self, machine: Machine | str, *, is_thorough: bool = False) -> Proof | None:
        """End a machine on record and see it gone; None for one that is over already.

        ``is_thorough`` also reads the listing, and what the machine may have left.

        A record that cannot be read or written holds nothing up: a machine that goes on billing
        because a disk is full is the worse of the two.
        """
        found = self._find(machine)
        if is_over(found.state):
            return None
        try:
            return self._destroy(found, is_thorough=is_thorough)
        except IllegalMoveError:
            if is_over(self._find(machine).state):
                return None  # somebody else ended it meanwhile
            raise

    def _destroy(self, found: Machine, *, is_thorough: bool) -> Proof | None:
        if found.instance is None:
            found, _ = self._looker.resolve(found, waits=True)
            if found.state is MachineState.NEVER_CREATED:
                return None
        if found.state is not MachineState.ENDING:
            # GONE follows from every state, so it does not matter whether this was written.
            with suppress(StoreError):
                found = self._parts.ledger.move(found, MachineState.ENDING)
        said = self._order(found)
        sees_gone = isinstance(self._parts.backend(found.backend), SupportsSeenGone)
        if said != _TOLD or not sees_gone:
            self._see_gone(found, said=said)
        proof = self._proof(found, is_thorough=is_thorough)
        try:
            self._parts.end(found)
        except IllegalMoveError:
            return proof  # somebody else saw it gone meanwhile
        except StoreError as exc:
            raise GoneUnrecordedError(
                f"machine {found.label} is gone, but that is not on record: {exc}. Mend that, then "
                "run `paceline gc`"
            ) from exc
        return proof

    def discard(self, machine: Machine, instance: InstanceHandle, cause: Exception) -> None:
        """Tear down what could not be put on record. Raises NotProvenGoneError if that fails."""
        try:
            self._parts.backend(machine.backend).teardown(instance)
        except BackendError as worse:
            raise not_proven_gone(machine, f"id {instance.instance_id}: {worse}") from cause

    def _order(self, machine: Machine) -> str:
        """Tell the machine to go; return what came of it, which proves nothing.

        Raises NotProvenGoneError where telling it again does not help either.
        """
        try:
            self._parts.backend(machine.backend).teardown(machine.handle)
        except (AuthError, NotProvenGoneError) as exc:
            raise not_proven_gone(machine, str(exc)) from exc
        except BackendError as exc:
            return str(exc)
        return _TOLD

    def _find(self, machine: Machine | str) -> Machine:
        """Return the record of a machine; if none can be read, the machine as it was handed in."""
        if isinstance(machine, str):
            return self._parts.ledger.find(machine)
        try:
            return self._parts.ledger.again(machine)
        except StoreError:
            return machine

    def _see_gone(self, machine: Machine, *, said: str) -> None:
        """Read until the backend says gone, and give the order again where it is not followed.

        Raises NotProvenGoneError if it is not seen gone in time.
        """
        ordered_s = self._parts.clock.monotonic()

        def is_gone() -> bool:
            nonlocal said, ordered_s
            try:
                if self._parts.clock.monotonic() - ordered_s >= _ORDER_EVERY_S:
                    ordered_s = self._parts.clock.monotonic()
                    self._order(machine)
                said = f"state {self._looker.state_of(machine)}"
            except BackendError as exc:
                said = str(exc)
                return False
            return said == f"state {InstanceState.DESTROYED}"

        try:
            wait_until(
                is_gone,
                what=machine.label,
                clock=self._parts.clock,
                timeout_s=_GONE_TIMEOUT_S,
                interval_s=POLL_S,
            )
        except DeadlineExceededError as exc:
            raise not_proven_gone(machine, f"last read: {said}") from exc

    def _proof(self, machine: Machine, *, is_thorough: bool) -> Proof:
        backend = self._parts.backend(machine.backend)
        handle = machine.handle
        reads = ["its state reads destroyed"]
        if is_thorough and isinstance(backend, SupportsListing):
            reads.append(_listed(backend, machine))
        if is_thorough and isinstance(backend, SupportsResidue):
            reads.append(_left(backend, handle))
        return Proof(
            label=machine.label,
            backend=machine.backend,
            instance_id=handle.instance_id,
            at_s=self._parts.clock.time(),
            reads=tuple(reads),
        )


def _listed(backend: SupportsListing, machine: Machine) -> str:
    """Say what the listing shows; it may be late, so it proves less than the state."""
    try:
        listed = backend.list_instances(label_prefix=machine.label)
    except BackendError as exc:
        return f"the listing could not be read ({exc})"
    ids = {instance.instance_id for instance in listed}
    is_listed = machine.handle.instance_id in ids
    return "the listing shows it still, as listings do for a while" if is_listed else "not listed"


def _left(backend: SupportsResidue, handle: InstanceHandle) -> str:
    try:
        left = backend.residue(handle)
    except BackendError as exc:
        return f"what it may have left could not be read ({exc})"
    return f"left and may bill: {', '.join(left)}" if left else "no disk of it is left"
