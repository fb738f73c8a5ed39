"""Remove what nobody will come back for: expired, given up, released.

Every removal is an ordinary transaction that looks again before it acts, so it may run beside
anything else, in several replicas at once, and may be cut off anywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.refit.control import records, rules
from paceline.refit.control.lookup import (
    purge_leases,
    put_state,
    read_version,
    read_versions_head,
    read_worker,
)
from paceline.refit.control.records import VersionRecord
from paceline.refit.control.rules import Limits
from paceline.refit.control.transaction import Transaction
from paceline.refit.model import VersionState
from paceline.store.protocol import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """How many of each were removed in one pass."""

    workers: int = 0
    leases: int = 0
    shards: int = 0
    reports: int = 0
    given_up: int = 0
    """STAGING versions that became RELEASING because they took too long."""
    versions: int = 0

    def plus(self, other: "Reaped") -> "Reaped":
        """Return the sums."""
        return Reaped(
            workers=self.workers + other.workers,
            leases=self.leases + other.leases,
            shards=self.shards + other.shards,
            reports=self.reports + other.reports,
            given_up=self.given_up + other.given_up,
            versions=self.versions + other.versions,
        )


Write = Callable[[Callable[[Transaction], Reaped]], Reaped]
"""Runs one decision as a transaction."""


def reap(store: Store, write: Write, limits: Limits) -> Reaped:
    """Do one pass over everything. Raises StoreError, ControlUnavailableError."""
    reaped = write(lambda tx: _reap_workers(tx, [r.key for r in store.list(records.WORKERS)]))
    reaped = reaped.plus(write(lambda tx: _reap_reports(tx, _surplus_reports(store, limits))))
    for record in store.list(records.VERSIONS):
        uid = records.decode_version(record.value).version.uid
        reaped = reaped.plus(write(partial(_reap_version, uid=uid, limits=limits)))
    return reaped


def _reap_workers(tx: Transaction, keys: Sequence[str]) -> Reaped:
    """Remove expired registrations; the id is free again anyway, so it costs nobody anything."""
    gone = 0
    for key in keys:
        value = tx.get(key)
        if value is not None and not rules.is_alive(records.decode_worker(value), tx.now_ms):
            tx.delete(key)
            gone += 1
    return Reaped(workers=gone)


def _surplus_reports(store: Store, limits: Limits) -> Sequence[str]:
    """Return the keys of the oldest reports beyond the number that is kept."""
    found = [(records.decode_report(r.value), r.key) for r in store.list(records.REPORTS)]
    found.sort(key=lambda pair: pair[0].installed_at_unix_ms, reverse=True)
    return [key for _, key in found[limits.reports_kept :]]


def _reap_reports(tx: Transaction, keys: Sequence[str]) -> Reaped:
    for key in keys:
        tx.delete(key)
    return Reaped(reports=len(keys))


def _reap_version(tx: Transaction, *, uid: str, limits: Limits) -> Reaped:
    """Move one version on, or what is left of it away."""
    record = read_version(tx, uid)
    if record is None:
        return Reaped()
    live, purged = purge_leases(tx, uid)
    reaped = Reaped(leases=purged)
    age_ms = tx.now_ms - record.version.created_at_unix_ms
    if record.version.state is VersionState.STAGING and age_ms > limits.staging_ttl_s * 1000:
        put_state(tx, record, VersionState.RELEASING)
        return replace(reaped, given_up=1)
    if record.version.state is not VersionState.RELEASING or live:
        return reaped
    evicted, left = _evict_orphans(tx, uid)
    reaped = replace(reaped, shards=evicted)
    released_ms = tx.now_ms - (record.releasing_at_unix_ms or 0)
    if left or released_ms < limits.released_kept_s * 1000:
        return reaped
    _remove_version(tx, record)
    return replace(reaped, versions=1)


def _evict_orphans(tx: Transaction, uid: str) -> tuple[int, int]:
    """Remove the shards of dead workers, who cannot do it; return how many went and stayed."""
    evicted = left = 0
    for record in tx.list(records.shards_prefix(uid)):
        worker_id = records.decode_shard(record.value).worker_id
        if rules.is_alive(read_worker(tx, worker_id), tx.now_ms):
            left += 1
        else:
            tx.delete(record.key)
            evicted += 1
    return evicted, left


def _remove_version(tx: Transaction, record: VersionRecord) -> None:
    version = record.version
    tx.delete(records.idempotency_key(version.model_name, version.idempotency_key))
    tx.delete(records.version_key(version.uid))
    head = read_versions_head(tx)
    tx.put(records.VERSIONS_HEAD, records.encode(replace(head, kept=head.kept - 1)))
