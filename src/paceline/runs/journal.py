"""What happened to a run on the operator's side, one JSON line per event, as it happens."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock

from paceline.core.clock import Clock

RUN_ENDING = "run.ending"
"""Event of a run that was decided to end: whoever takes it up starts nothing again."""


class Journal:
    """Appends to ``events.jsonl``; safe from several threads, also from inside teardown.

    A full disk must not stop a teardown, so nothing is raised: the first problem is kept for
    whoever asks with ``take_problem``.
    """

    def __init__(self, path: Path, *, clock: Clock) -> None:
        self._path = path
        self._listener: Callable[[str, Mapping[str, object]], None] | None = None
        self._clock = clock
        self._lock = Lock()
        self._problem: str | None = None
        self._is_told = False

    def listen(self, listener: Callable[[str, Mapping[str, object]], None]) -> None:
        """Tell ``listener`` of every event from now on; it must neither block nor raise."""
        self._listener = listener

    def record(self, name: str, fields: Mapping[str, object]) -> None:
        """Append one event."""
        line = json.dumps({"at": round(self._clock.time(), 3), "event": name, **fields})
        with self._lock:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            except OSError as exc:
                self._problem = f"events are not recorded in {self._path}: {exc.strerror}"
        if self._listener is not None:
            self._listener(name, fields)

    def take_problem(self) -> str | None:
        """Return why events are lost, the first time that it is asked after one was."""
        with self._lock:
            if self._problem is None or self._is_told:
                return None
            self._is_told = True
            return self._problem


def delay_text(name: str, fields: Mapping[str, object]) -> str | None:
    """Return why renting takes longer, for whoever waits for it; None for all other events."""
    slot = f"{fields.get('role')}-{fields.get('index')}"
    if name == "attempt.failed":
        tried = f"{fields.get('backend')} {fields.get('offer')}"
        return f"{slot}: {tried} came to nothing: {fields.get('reason')}"
    if name != "renting.waiting":
        return None
    wait = f"trying again in {float(str(fields.get('wait_s'))):.0f} s"
    if "reason" in fields:
        return f"{slot}: {wait}: {fields['reason']}"
    return f"{slot}: nothing to be had yet; {wait}"
