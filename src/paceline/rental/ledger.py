"""The machines on record: read them, add one, move one; every write is checked and durable."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.errors import UsageError
from paceline.rental.errors import IllegalMoveError
from paceline.rental.lifecycle import MachineState, move
from paceline.rental.model import InstanceHandle
from paceline.rental.records import KEY_PREFIX, Machine, parse_machine, render_machine
from paceline.store.protocol import ABSENT, ConflictError, Store

_NUM_WRITES_MAX = 20


class Ledger:
    """Machine records in a store; several threads and processes may use one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def machines(self, run_id: str | None = None) -> Sequence[Machine]:
        """Return every record, also those that are over. Raises BackendError for a foreign one."""
        prefix = KEY_PREFIX if run_id is None else f"{KEY_PREFIX}{run_id}/"
        return [parse_machine(record.value) for record in self._store.list(prefix)]

    def find(self, label: str) -> Machine:
        """Return the record of ``label``. Raises UsageError if there is none."""
        for machine in self.machines():
            if machine.label == label:
                return machine
        raise UsageError(f"no machine {label!r} on record; `paceline ls` shows those there are")

    def again(self, machine: Machine) -> Machine:
        """Return the record of a machine as it is now. Raises UsageError if there is none."""
        record = self._store.get(machine.key)
        if record is None:
            raise UsageError(f"machine {machine.label!r} is on no record any more")
        return parse_machine(record.value)

    def add(self, machine: Machine) -> None:
        """Write a new record. Raises ConflictError if its label was used before."""
        self._store.commit(
            expect={machine.key: ABSENT}, writes={machine.key: render_machine(machine)}
        )

    def move(
        self,
        machine: Machine,
        state: MachineState,
        *,
        instance: InstanceHandle | None = None,
        ended_at: float | None = None,
        net: str = "",
    ) -> Machine:
        """Move the record as it is now, whatever it was when ``machine`` was read.

        ``instance`` is the backend's name for it, where that has become known; ``ended_at`` is
        when it was over, and None for a state in which it is not; ``net`` is what was seen of its
        network.

        Raises:
            IllegalMoveError: somebody else moved it where this cannot follow.
        """
        for _ in range(_NUM_WRITES_MAX):
            record = self._store.get(machine.key)
            if record is None:
                raise IllegalMoveError(f"machine {machine.label} is on no record any more")
            old = parse_machine(record.value)
            new = replace(
                old,
                state=move(old.state, state, label=old.label),
                instance=instance or old.instance,
                ended_at=ended_at,
                net=net or old.net,
            )
            try:
                self._store.commit(
                    expect={machine.key: record.revision},
                    writes={machine.key: render_machine(new)},
                )
            except ConflictError:
                continue
            return new
        raise IllegalMoveError(
            f"machine {machine.label} changes too fast to become {state}; something else drives it"
        )
