"""What is on record about every run: one JSON value per run, under ``run/<id>``."""

import json
from dataclasses import asdict, dataclass, replace

from paceline.core.errors import PreflightError, UsageError
from paceline.runs.model import Outcome
from paceline.store.protocol import ABSENT, ConflictError, Record, Store

PREFIX = "run/"
SCHEMA = 1
TRIES_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, from before its first machine to its end."""

    run_id: str
    name: str
    created_at_ms: int
    pid: int
    """Who started it, for people; whether it still drives the run is for ``owner_pid`` to say."""
    out: str
    outcome: Outcome | None = None
    """None while it lasts."""
    reason: str = ""
    wall_s: float = 0.0
    cost_usd: float = 0.0
    report: str | None = None
    """Path of ``report.json``."""


class RunLedger:
    """Runs in a store; safe from several processes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(self, record: RunRecord) -> None:
        """Put a new run on record. Raises UsageError when the id is taken."""
        key = PREFIX + record.run_id
        try:
            self._store.commit(expect={key: ABSENT}, writes={key: _encode(record)})
        except ConflictError as exc:
            raise _taken(record.run_id) from exc

    def refuse_taken(self, run_id: str) -> None:
        """Raise UsageError when there is such a run."""
        if self._store.get(PREFIX + run_id) is not None:
            raise _taken(run_id)

    def get(self, run_id: str) -> RunRecord:
        """Return one run. Raises UsageError, naming those there are, when it is not on record."""
        found = self._store.get(PREFIX + run_id)
        if found is None:
            known = ", ".join(record.run_id for record in self.list()[:5]) or "none"
            raise UsageError(f"no run {run_id!r} on record; the latest: {known}")
        return _decode(found)

    def list(self) -> list[RunRecord]:
        """Return all runs, newest first."""
        found = [_decode(record) for record in self._store.list(PREFIX)]
        return sorted(found, key=lambda run: run.created_at_ms, reverse=True)

    def finish(self, ended: RunRecord) -> RunRecord:
        """Record how a run ended; the first end stands. Return what is on record then."""
        key = PREFIX + ended.run_id
        for _ in range(TRIES_MAX):
            found = self._store.get(key)
            if found is not None and _decode(found).outcome is not None:
                return _decode(found)
            revision = ABSENT if found is None else found.revision
            try:
                self._store.commit(expect={key: revision}, writes={key: _encode(ended)})
            except ConflictError:
                continue
            return ended
        raise PreflightError(f"the record of run {ended.run_id} keeps changing; try again")

    def abandon(self, record: RunRecord, *, reason: str) -> RunRecord:
        """Record that a run ended without its driver."""
        return self.finish(replace(record, outcome=Outcome.ABANDONED, reason=reason))

    def now_ms(self) -> int:
        """Return the store's clock."""
        return self._store.now_ms()


def _taken(run_id: str) -> UsageError:
    return UsageError(
        f"run {run_id} exists already; choose another --run-id, or take it up with --resume"
    )


def _encode(record: RunRecord) -> bytes:
    return json.dumps({"schema": SCHEMA, **asdict(record)}, sort_keys=True).encode()


def _decode(found: Record) -> RunRecord:
    fields = json.loads(found.value)
    schema = fields.pop("schema", None)
    if schema != SCHEMA:
        raise PreflightError(
            f"record {found.key} has schema {schema!r}, this paceline reads {SCHEMA}; "
            "use the paceline that wrote it, or another PACELINE_STATE_DIR"
        )
    outcome = fields.pop("outcome")
    return RunRecord(**fields, outcome=None if outcome is None else Outcome(outcome))
