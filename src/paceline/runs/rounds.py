"""Compares a run's record with what the providers say while the run is driven.

Providers are asked in a thread of its own: a call that hangs must not keep the driver from its
budget. What comes of it is told by the driver, at its next poll; it ends nothing, and no failure
of it ends the run.
"""

from collections.abc import Callable, Mapping
from queue import Empty, Queue
from threading import Thread
from typing import Protocol

from paceline.core.clock import Clock
from paceline.rental.budget import Budget
from paceline.rental.orchestrator import Tick
from paceline.rental.records import Finding, FindingKind

LOOK_EVERY_S = 60.0
"""How often the orchestrator is given the occasion; it knows itself when providers are due."""


class Ticking(Protocol):
    """Whoever compares the record with the providers when it is time to."""

    def tick(self, run_id: str, caps: Budget | None) -> Tick:
        """Return what was found. Blocks for as long as providers take to answer."""
        ...


class Rounds:
    """The looks of one run; used by the driver's thread alone."""

    def __init__(
        self,
        rental: Ticking,
        *,
        run_id: str,
        clock: Clock,
        note: Callable[[str], None],
        record: Callable[[str, Mapping[str, object]], None],
    ) -> None:
        self._rental = rental
        self._run_id = run_id
        self._clock = clock
        self._note = note
        self._record = record
        self._due_s = clock.monotonic()
        self._looks: Queue[Tick | Exception] = Queue()
        self._thread: Thread | None = None
        self._told: set[str] = set()

    def poll(self) -> None:
        """Tell what the last look found, and begin the next if it is due; never blocks."""
        while True:
            try:
                found = self._looks.get_nowait()
            except Empty:
                break
            self._tell(found)
        now_s = self._clock.monotonic()
        if now_s < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._due_s = now_s + LOOK_EVERY_S
        self._thread = Thread(target=self._look, name="rounds", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        try:
            self._looks.put(self._rental.tick(self._run_id, None))
        except Exception as exc:  # noqa: BLE001 - told by the driver; the run does not hang on it
            self._looks.put(exc)

    def _tell(self, found: Tick | Exception) -> None:
        if isinstance(found, Exception):
            text = f"the record could not be compared with the providers: {found!s}"
            self._say_once(text, "reconcile.failed", {"reason": str(found)})
            return
        for finding in found.findings:
            name = "machine.stray" if finding.kind is FindingKind.STRAY else "machine.found"
            self._say_once(_told(finding), name, _fields(finding))

    def _say_once(self, text: str, name: str, fields: Mapping[str, object]) -> None:
        """Tell it once: what cannot be proven now is found again at every look."""
        if text not in self._told:
            self._told.add(text)
            self._record(name, fields)
            self._note(text)


def _told(finding: Finding) -> str:
    note = f": {finding.note}" if finding.note else ""
    if finding.kind is FindingKind.STRAY:
        return (
            f"{finding.label} on {finding.backend} bears this run's name, bills and is on no "
            "record; `paceline gc --strays` shows it"
        )
    return f"{finding.label} on {finding.backend} is {finding.kind.value.replace('_', ' ')}{note}"


def _fields(finding: Finding) -> dict[str, object]:
    instance_id = None if finding.instance is None else finding.instance.instance_id
    return {
        "kind": finding.kind.value,
        "label": finding.label,
        "backend": finding.backend,
        "instance_id": instance_id,
        "note": finding.note,
    }
