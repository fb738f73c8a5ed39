"""Compares the record with what backends say, and mends the record. Destroys nothing."""

from collections.abc import Iterable

from paceline.rental.backends.protocol import SupportsDeathCause, SupportsListing
from paceline.rental.death import Death, Seen, bills, cause_of
from paceline.rental.drivers.looking import Looker
from paceline.rental.drivers.parts import RentalParts, lag_of
from paceline.rental.errors import BackendError, InstanceNotFoundError, NotProvenGoneError
from paceline.rental.failover import FailureKind
from paceline.rental.lifecycle import MachineState, is_over
from paceline.rental.model import DeathCause, InstanceHandle, InstanceState, InstanceStatus
from paceline.rental.records import LABEL_PREFIX, Finding, FindingKind, Machine


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
        findings = [
            finding
            for machine in records
            if not is_over(machine.state) and machine.label not in without
            for finding in self._check(machine)
        ]
        for name in sorted({machine.backend for machine in records} | set(backends)):
            findings += self._find_unrecorded(name, run_id, without)
        return tuple(findings)

    def autopsy(self, machine: Machine, *, answers: bool) -> Death | None:
        """Return why a machine is missed; None where it is not, or where we ended it."""
        status, told, reason = self._ask(machine)
        state = None if status is None else InstanceState.parse(status.state)
        record = self._parts.ledger.find(machine.label)
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

    def _find_unrecorded(
        self, name: str, run_id: str | None, without: frozenset[str]
    ) -> list[Finding]:
        """Look for machines with labels of ours that are on no live record."""
        backend = self._parts.backend(name)
        if not isinstance(backend, SupportsListing):
            return []
        prefix = LABEL_PREFIX if run_id is None else f"{LABEL_PREFIX}{run_id}-"
        try:
            listed = backend.list_instances(label_prefix=prefix)
        except BackendError as exc:
            return [
                Finding(
                    kind=FindingKind.NOT_PROVEN,
                    label=f"{prefix}*",
                    backend=name,
                    instance=None,
                    note=f"cannot be listed: {exc}",
                )
            ]
        records = {machine.label: machine for machine in self._parts.ledger.machines()}
        return [
            finding
            for instance in listed
            if instance.label not in without
            for finding in self._check_listed(instance, name, records.get(instance.label))
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
        if record.state is MachineState.NEVER_CREATED:
            return [_finding(FindingKind.CAME_BACK, self._parts.take(record, instance))]
        # A listing may show for a while what is gone: only a read of the machine counts.
        if self._looker.state_of(record) is InstanceState.DESTROYED:
            return []
        found = self._parts.ledger.move(record, MachineState.ENDING)
        return [_finding(FindingKind.CAME_BACK, found)]


def _finding(kind: FindingKind, machine: Machine, note: str = "") -> Finding:
    return Finding(
        kind=kind,
        label=machine.label,
        backend=machine.backend,
        instance=machine.instance,
        note=note,
    )
