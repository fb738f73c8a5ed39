"""Remove what nobody will come back for: expired, given up, released.

Every removal is an ordinary transaction that looks again before it acts, so it may run beside
anything else, in several replicas at once, and may be cut off anywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.refit.control import records, replicas, rules
from paceline.refit.control.catalog import Catalog
from paceline.refit.control.lookup import (
    drop_version,
    purge_leases,
    put_state,
    read_version,
    read_versions_head,
    read_worker,
)
from paceline.refit.control.records import VersionRecord
from paceline.refit.control.rules import Limits
from paceline.refit.control.transaction import Transaction
from paceline.refit.model import ObjectStorageSource, Tombstone, VersionState
from paceline.refit.retention import plan_releases
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
    retired: int = 0
    """READY versions that became RELEASING because the model's policy does not keep them."""
    tombstones: int = 0

    def __add__(self, other: "Reaped") -> "Reaped":
        """Return the sums."""
        return Reaped(
            workers=self.workers + other.workers,
            leases=self.leases + other.leases,
            shards=self.shards + other.shards,
            reports=self.reports + other.reports,
            given_up=self.given_up + other.given_up,
            versions=self.versions + other.versions,
            retired=self.retired + other.retired,
            tombstones=self.tombstones + other.tombstones,
        )


Write = Callable[[Callable[[Transaction], Reaped]], Reaped]
"""Runs one decision as a transaction."""


PAGE = 25
"""Keys that one step looks at: each may be a question to the store while calls wait."""

DAY_MS = 24 * 3600 * 1000
RUN_KEPT_MS = 90 * DAY_MS
"""How long the service knows how far a run got that publishes nothing any more."""


def sweep(store: Store, write: Write, limits: Limits, catalog: Catalog) -> Iterator[Reaped]:
    """Do one pass over everything, a little at each step.

    Raises StoreError, ControlUnavailableError: then the next pass goes on.
    """
    for page in _paged(_expired_workers(store)):
        yield write(partial(_reap_workers, keys=page))
    for page in _pages(store, records.DRAINS):
        yield write(partial(_reap_drains, keys=page))
    yield write(lambda tx: _reap_reports(tx, _surplus_reports(store, limits)))
    for record in store.list(records.RETENTION):
        yield from _retire_surplus(store, write, catalog, record.value)
    for page in _pages(store, records.VERSIONS):
        for key in page:
            yield write(partial(_reap_version, key=key, limits=limits))
    for page in _pages(store, records.RUNS):
        yield write(partial(_reap_runs, keys=page))
    yield write(lambda tx: _reap_tombstones(tx, _old_tombstones(store, limits)))


def collect_objects(
    store: Store, write: Write, collect: Callable[[ObjectStorageSource], None]
) -> int:
    """Have the objects of removed versions deleted; those that another version names stay."""
    collected = 0
    named = {
        records.decode_version(r.value).version.object_storage for r in store.list(records.VERSIONS)
    }
    for record in store.list(records.TOMBSTONES):
        tombstone = records.decode_tombstone(record.value)
        source = tombstone.object_storage
        if tombstone.is_collected or source is None or source in named:
            continue
        collect(source)
        write(partial(_note_collected, key=record.key))
        collected += 1
    return collected


def _note_collected(tx: Transaction, *, key: str) -> Reaped:
    value = tx.get(key)
    if value is not None:
        tombstone = replace(records.decode_tombstone(value), is_collected=True)
        tx.put(key, records.encode(tombstone))
    return Reaped()


def _pages(store: Store, prefix: str) -> Iterator[Sequence[str]]:
    return _paged([record.key for record in store.list(prefix)])


def _paged(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(keys), PAGE):
        yield keys[first : first + PAGE]


def _retire_surplus(store: Store, write: Write, catalog: Catalog, value: bytes) -> Iterator[Reaped]:
    """Retire the READY versions of a model that its policy does not keep."""
    kept = records.decode_retention(value)
    now_ms = store.now_ms()
    leases = (records.decode_lease(r.value) for r in store.list(records.LEASES))
    leased = {lease.version_id for lease in leases if lease.expires_at_unix_ms > now_ms}
    pinned = store.list(records.pins_prefix(kept.model_name))
    leased |= {records.decode_pin(record.value).version_id for record in pinned}
    versions = [record.version for record in catalog.records_of(kept.model_name)]
    for uid in plan_releases(versions, policy=kept.policy, leased=leased):
        yield write(partial(_retire, uid=uid))


def _retire(tx: Transaction, *, uid: str) -> Reaped:
    """Retire one version unless somebody took it meanwhile."""
    record = read_version(tx, uid)
    if record is None or record.version.state is not VersionState.READY:
        return Reaped()
    live, purged = purge_leases(tx, uid)
    if live:
        return Reaped(leases=purged)
    put_state(tx, record, VersionState.RELEASING)
    return Reaped(leases=purged, retired=1)


def _reap_drains(tx: Transaction, *, keys: Sequence[str]) -> Reaped:
    """Forget that workers drain which are gone."""
    for key in keys:
        value = tx.get(key)
        if value is not None and read_worker(tx, records.decode_text(value)) is None:
            tx.delete(key)
    return Reaped()


def _reap_runs(tx: Transaction, *, keys: Sequence[str]) -> Reaped:
    for key in keys:
        value = tx.get(key)
        if value is not None:
            head = records.decode_run_head(value)
            if tx.now_ms - head.at_unix_ms > RUN_KEPT_MS:
                tx.delete(key)
    return Reaped()


def _old_tombstones(store: Store, limits: Limits) -> Sequence[str]:
    """Return the keys of tombstones that are too old, and of the oldest of too many."""
    found = [
        (records.decode_tombstone(r.value).removed_at_unix_ms, r.key)
        for r in store.list(records.TOMBSTONES)
    ]
    found.sort(reverse=True)
    oldest_ms = store.now_ms() - limits.tombstones_kept_s * 1000
    old = [key for at, key in found[: limits.tombstones_kept] if at < oldest_ms]
    return [*old, *(key for _, key in found[limits.tombstones_kept :])][:PAGE]


def _reap_tombstones(tx: Transaction, keys: Sequence[str]) -> Reaped:
    for key in keys:
        tx.delete(key)
    return Reaped(tombstones=len(keys))


def _expired_workers(store: Store) -> Sequence[str]:
    """Return the keys worth a second look: of thousands of workers nearly all are alive."""
    now_ms = store.now_ms()
    return [
        record.key
        for record in store.list(records.WORKERS)
        if not rules.is_alive(records.decode_worker(record.value), now_ms)
    ]


def _reap_workers(tx: Transaction, *, keys: Sequence[str]) -> Reaped:
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


def _reap_version(tx: Transaction, *, key: str, limits: Limits) -> Reaped:
    """Move one version on, or what is left of it away."""
    value = tx.get(key)
    if value is None:
        return Reaped()
    record = records.decode_version(value)
    uid = record.version.uid
    live, purged = purge_leases(tx, uid)
    replicas.forget_dead(tx, uid)
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
    if len(version.expected_source_slots) > 1:
        for slot in version.expected_source_slots:
            tx.delete(records.part_key(version.uid, slot))
    for delta in tx.list(records.deltas_prefix(version.uid)):
        tx.delete(delta.key)
    replicas.forget_all(tx, version.uid)
    drop_version(tx, version)
    tombstone = Tombstone(
        uid=version.uid,
        model_name=version.model_name,
        removed_at_unix_ms=tx.now_ms,
        object_storage=version.object_storage,
        is_collected=version.object_storage is None,
    )
    tx.put(records.tombstone_key(version.uid), records.encode(tombstone))
    head = read_versions_head(tx)
    tx.put(records.VERSIONS_HEAD, records.encode(replace(head, kept=head.kept - 1)))
