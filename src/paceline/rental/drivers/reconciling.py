"""Compares the record with what backends say, and mends the record. Destroys nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.core.errors import PacelineError
from paceline.rental.backends.protocol import SupportsDeathCause, SupportsListing
from paceline.rental.death import Death, Seen, bills, cause_of
from paceline.rental.drivers.looking import Looker
from paceline.rental.drivers.parts import RentalParts, lag_of
from paceline.rental.errors import (
    BackendError,
    IllegalMoveError,
    InstanceNotFoundError,
    NotProvenGoneError,
)
from paceline.rental.failover import FailureKind
from paceline.rental.lifecycle import MachineState, is_over
from paceline.rental.model import DeathCause, InstanceHandle, InstanceState, InstanceStatus
from paceline.rental.records import LABEL_PREFIX, Finding, FindingKind, Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """What one backend lists."""

    backend: str
    prefix: str
    instances: Sequence[InstanceHandle] = ()
    problem: str = ""
    is_absent: bool = False
    """Nothing can be asked of it here: a part is missing, or a setting is wrong."""

    @property
    def ids(self) -> frozenset[str]:
        """Return how the backend names them."""
        return frozenset(one.instance_id for one in self.instances)


class Reconciler:
    """Looks at machines on record, and for machines that are on none."""

    def __init__(self, parts: RentalParts) -> None:
        self._parts = parts
        self._looker = Looker(parts)

    def reconcile(
        self, *, run_id: str | None, backends: Iterable[str], without: frozenset[str]
    ) -> tuple[Finding, ...]:
        """Bring every record up to date; ``without`` are labels that somebody works on now."""
        records = self._parts.ledger.machines(run_id)
        names = sorted({machine.backend for machine in records} | set(backends))
        listings = {name: self._list(name, run_id) for name in names}
        findings = [
            finding
            for machine in records
            if not is_over(machine.state) and machine.label not in without
            for finding in self._compare(machine, listings[machine.backend])
        ]
        known = {machine.label: machine for machine in self._parts.ledger.machines()}
        for listing in listings.values():
            findings += self._find_unrecorded(listing, known, without)
        return tuple(findings)

    def autopsy(self, machine: Machine, *, answers: bool) -> Death | None:
        """Return why a machine is missed; None where it is not, or where we ended it."""
        status, told, reason = self._ask(machine)
        state = None if status is None else InstanceState.parse(status.state)
        record = self._parts.ledger.again(machine)
        cause = cause_of(
            Seen(
                record=record.state,
                is_spot=machine.offer.is_spot,
                answers=answers,
                state=state,
                told=told,
                reason=reason,
            )
        )
        if cause is None:
            return None
        death = Death(label=machine.label, cause=cause, reason=reason, bills=bills(state))
        if death.blames_host:
            self._parts.memory.remember_death(
                machine, FailureKind.VANISHED, reason=reason, now_s=self._parts.clock.time()
            )
        fields = {"role": machine.role, "index": machine.index, "label": machine.label}
        self._parts.notify("machine.died", {**fields, "cause": cause.value, "reason": reason})
        return death

    def _ask(self, machine: Machine) -> tuple[InstanceStatus | None, DeathCause | None, str]:
        backend = self._parts.backend(machine.backend)
        try:
            status = backend.status(machine.handle)
        except InstanceNotFoundError as exc:
            gone = InstanceStatus(InstanceState.DESTROYED.value, "", 0, None, None, {})
            return gone, None, str(exc)
        except BackendError as exc:
            return None, None, f"{machine.backend} could not be asked: {exc}"
        told = None
        if isinstance(backend, SupportsDeathCause):
            told = backend.death_cause(status, is_spot=machine.offer.is_spot)
        return status, told, f"{machine.backend} says {status.state}"

    def _compare(self, machine: Machine, listing: _Listing) -> list[Finding]:
        """Bring one live record up to date, where the listing leaves something to ask."""
        if listing.is_absent:
            return [_finding(FindingKind.NOT_PROVEN, machine, listing.problem)]
        if _is_in(machine, listing.ids):
            return []
        return self._unless_moved(machine, partial(self._check, machine))

    def _check(self, machine: Machine) -> list[Finding]:
        """Bring one live record up to date."""
        if machine.instance is None:
            return [self._check_intent(machine)]
        try:
            state = self._looker.state_of(machine)
        except BackendError as exc:
            return [_finding(FindingKind.NOT_PROVEN, machine, str(exc))]
        # Right after a create call some providers do not know the machine yet.
        age_s = self._parts.clock.time() - machine.intended_at
        is_settled = age_s >= lag_of(self._parts.backend(machine.backend))
        if state is not InstanceState.DESTROYED:
            return []
        if machine.state is MachineState.CREATED and not is_settled:
            return [_finding(FindingKind.NOT_PROVEN, machine, "not known there yet, or gone")]
        return [_finding(FindingKind.GONE, self._parts.end(machine))]

    def _check_intent(self, machine: Machine) -> Finding:
        try:
            found, look = self._looker.resolve(machine, waits=False)
        except NotProvenGoneError as exc:
            return _finding(FindingKind.NOT_PROVEN, machine, str(exc))
        kind = FindingKind.ADOPTED if look.instance else FindingKind.NEVER_CREATED
        return _finding(kind, found, look.note)

    def _list(self, name: str, run_id: str | None) -> _Listing:
        """Return what a backend lists under labels of ours: one call for all its machines."""
        prefix = LABEL_PREFIX if run_id is None else f"{LABEL_PREFIX}{run_id}-"
        try:
            backend = self._parts.backend(name)
        except PacelineError as exc:  # one backend that is not there holds up no other
            problem = f"cannot be asked: {exc}"
            return _Listing(backend=name, prefix=prefix, problem=problem, is_absent=True)
        if not isinstance(backend, SupportsListing):
            return _Listing(backend=name, prefix=prefix)
        try:
            listed = backend.list_instances(label_prefix=prefix)
        except BackendError as exc:
            return _Listing(backend=name, prefix=prefix, problem=f"cannot be listed: {exc}")
        return _Listing(backend=name, prefix=prefix, instances=tuple(listed))

    def _find_unrecorded(
        self, listing: _Listing, known: Mapping[str, Machine], without: frozenset[str]
    ) -> list[Finding]:
        """Look for machines with labels of ours that are on no live record."""
        if listing.problem:
            return [
                Finding(
                    kind=FindingKind.NOT_PROVEN,
                    label=f"{listing.prefix}*",
                    backend=listing.backend,
                    instance=None,
                    note=listing.problem,
                )
            ]
        return [
            finding
            for instance in listing.instances
            if instance.label not in without
            for finding in self._check_listed(instance, listing.backend, known.get(instance.label))
        ]

    def _check_listed(
        self, instance: InstanceHandle, name: str, record: Machine | None
    ) -> list[Finding]:
        if record is None:
            return [
                Finding(
                    kind=FindingKind.STRAY, label=instance.label, backend=name, instance=instance
                )
            ]
        if not is_over(record.state):
            return []
        return self._unless_moved(record, lambda: self._come_back(record, instance))

    def _come_back(self, record: Machine, instance: InstanceHandle) -> list[Finding]:
        if record.state is MachineState.NEVER_CREATED:
            return [_finding(FindingKind.CAME_BACK, self._parts.take(record, instance))]
        # A listing may show for a while what is gone: only a read of the machine counts.
        if self._looker.state_of(record) is InstanceState.DESTROYED:
            return []
        found = self._parts.ledger.move(record, MachineState.ENDING)
        return [_finding(FindingKind.CAME_BACK, found)]

    def _unless_moved(self, machine: Machine, look: Callable[[], list[Finding]]) -> list[Finding]:
        """Return what a look finds; nothing where somebody else moves the record meanwhile."""
        try:
            return look()
        except IllegalMoveError:
            return []
        except BackendError as exc:
            return [_finding(FindingKind.NOT_PROVEN, machine, str(exc))]


def _finding(kind: FindingKind, machine: Machine, note: str = "") -> Finding:
    return Finding(
        kind=kind,
        label=machine.label,
        backend=machine.backend,
        instance=machine.instance,
        note=note,
    )


def _is_in(machine: Machine, listed: frozenset[str]) -> bool:
    """Return whether a machine whose id is known is listed, and need not be asked about.

    A listing may show for a while what is gone; a later look finds that.
    """
    return machine.instance is not None and machine.instance.instance_id in listed
