"""The control plane itself, over any store: every call is one atomic step.

Each call reads, decides by rules.py and lifecycle.py, and commits everything it changes at
once, guarded by the revisions it read. Two replicas of the service may therefore share a store.
Expiry goes by the store's clock alone.

What keeps the rules true between concurrent calls: whatever adds to a version (a shard, a first
lease) insists on the version's record as it was read, and whatever moves the version on writes
that record. So nobody can slip into a version that has just become RELEASING, and the shard
that completes a version is always noticed as such.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

from paceline.refit.control import (
    chains,
    creation,
    describing,
    history,
    reaper,
    records,
    replicas,
    rules,
)
from paceline.refit.control.catalog import Catalog, is_of_run
from paceline.refit.control.lookup import (
    is_draining,
    purge_leases,
    put_state,
    read_live_lease,
    read_model_head,
    read_worker,
    require_version,
)
from paceline.refit.control.reaper import Reaped
from paceline.refit.control.records import RetentionRecord, VersionRecord
from paceline.refit.control.rules import Limits
from paceline.refit.control.transaction import Transaction, transact
from paceline.refit.errors import (
    AlreadyExistsError,
    PreconditionError,
)
from paceline.refit.model import (
    Delta,
    Event,
    InstalledReport,
    Lease,
    ObjectStorageSource,
    Pin,
    Replica,
    RetentionPolicy,
    Shard,
    Tombstone,
    VersionChanges,
    VersionDescription,
    VersionRequest,
    VersionState,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)
from paceline.store.protocol import Store, SupportsGroups, SupportsPrefetch

T = TypeVar("T")

REMOTE_THREADS = 3


class ControlLedger:
    """Signs ControlPlane over a store; safe to use from several threads."""

    def __init__(
        self, store: Store, *, nonce: Callable[[], str], limits: Limits | None = None
    ) -> None:
        """Take the store over.

        Args:
            store: closed by ``close``.
            nonce: returns fresh text for the uids that the ledger names versions with.
            limits: how much is kept.
        """
        self._store = store
        self._nonce = nonce
        self._limits = limits or Limits()
        self._catalog = Catalog(store)
        self._group = store.group if isinstance(store, SupportsGroups) else nullcontext
        self.threads = 1 if isinstance(store, SupportsGroups) else REMOTE_THREADS
        """How many threads should call: more where every call waits for a store elsewhere."""

    def register_worker(
        self, registration: WorkerRegistration, *, ttl_seconds: int
    ) -> WorkerRegistration:
        """Register or refresh a process until the store's clock plus ``ttl_seconds``."""
        rules.require_text(
            self._limits, worker_id=registration.worker_id, model_name=registration.model_name
        )
        rules.require_ttl(ttl_seconds)

        def decide(tx: Transaction) -> WorkerRegistration:
            rules.check_registration(
                read_worker(tx, registration.worker_id), registration, now_ms=tx.now_ms
            )
            expires_at = tx.now_ms + ttl_seconds * 1000
            registered = replace(registration, expires_at_unix_ms=expires_at)
            tx.put(records.worker_key(registration.worker_id), records.encode(registered))
            return registered

        return self._write(decide)

    def create_version(self, request: VersionRequest) -> WeightVersion:
        """Create a version, or return what an equal request created, whatever became of it."""
        request = rules.check_version_request(request, self._limits)
        return self._write(
            lambda tx: creation.create_version(tx, request, limits=self._limits, nonce=self._nonce)
        )

    def get_version(self, uid: str) -> WeightVersion:
        """Return one version."""
        rules.require_text(self._limits, uid=uid)
        return require_version(self._read(), uid).version

    def update_version_state(self, uid: str, state: VersionState) -> WeightVersion:
        """Move a version; READY only if every expected slot is covered."""
        rules.require_text(self._limits, uid=uid)

        def decide(tx: Transaction) -> WeightVersion:
            record = require_version(tx, uid)
            missing = _missing_slots(record)
            if state is VersionState.READY and missing:
                raise PreconditionError(
                    f"version {uid!r} still waits for {len(missing)} slots, {missing[0]!r} among "
                    f"them; it becomes READY by itself with the last one"
                )
            return put_state(tx, record, state)

        return self._write(decide)

    def delete_version(self, uid: str) -> WeightVersion:
        """Move a version to RELEASING."""
        return self.update_version_state(uid, VersionState.RELEASING)

    def create_shard(self, shard: Shard) -> WeightVersion:
        """Advertise a shard; with the last missing slot the version is READY in the same step."""
        rules.check_shard(shard, self._limits)
        return self._write(lambda tx: creation.create_shard(tx, shard, limits=self._limits))

    def list_shards(self, version_id: str) -> Sequence[Shard]:
        """Return the shards by (slot, worker), less those of the dead that others replace."""
        rules.require_text(self._limits, version_id=version_id)
        tx = self._read()
        require_version(tx, version_id)
        shards = sorted(
            (records.decode_shard(r.value) for r in tx.list(records.shards_prefix(version_id))),
            key=lambda shard: (shard.source_slot_id, shard.worker_id),
        )
        workers = {shard.worker_id for shard in shards}
        is_live = {w: rules.is_alive(read_worker(tx, w), tx.now_ms) for w in workers}
        return rules.visible_shards(shards, is_live=is_live)

    def delete_shard(self, *, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Evict a shard of a RELEASING version that nobody leases."""
        rules.require_text(
            self._limits,
            version_id=version_id,
            source_slot_id=source_slot_id,
            worker_id=worker_id,
        )
        key = records.shard_key(version_id, source_slot_id, worker_id)

        def decide(tx: Transaction) -> bool:
            version = require_version(tx, version_id).version
            if tx.get(key) is None:
                raise rules.not_found("shard", f"{version_id}/{source_slot_id}/{worker_id}")
            live, _ = purge_leases(tx, version_id)
            rules.check_evictable(version, num_leases=len(live))
            rules.check_worker(
                read_worker(tx, worker_id),
                worker_id=worker_id,
                now_ms=tx.now_ms,
                model_name=version.model_name,
            )
            tx.delete(key)
            return True

        return self._write(decide)

    def acquire_lease(self, *, version_id: str, worker_id: str, ttl_seconds: int) -> Lease:
        """Take or prolong a generator's hold."""
        rules.require_text(self._limits, version_id=version_id, worker_id=worker_id)
        rules.require_ttl(ttl_seconds)
        lease_id = records.lease_id_of(version_id, worker_id)
        key = records.lease_key(version_id, lease_id)

        def decide(tx: Transaction) -> Lease:
            version = require_version(tx, version_id).version
            rules.check_worker(
                read_worker(tx, worker_id),
                worker_id=worker_id,
                now_ms=tx.now_ms,
                model_name=version.model_name,
                role=WorkerRole.GENERATOR,
            )
            held = read_live_lease(tx, key)
            if held is not None and held.worker_id != worker_id:
                raise AlreadyExistsError(
                    f"lease id {lease_id} of version {version_id!r} is held by worker "
                    f"{held.worker_id!r}; register this process under another worker id"
                )
            rules.check_leasable(version, is_renewal=held is not None)
            if held is None:
                rules.check_not_draining(
                    is_draining=is_draining(tx, worker_id), worker_id=worker_id
                )
            lease = Lease(
                lease_id=lease_id,
                version_id=version_id,
                worker_id=worker_id,
                expires_at_unix_ms=tx.now_ms + ttl_seconds * 1000,
            )
            tx.put(key, records.encode(lease))
            return lease

        return self._write(decide)

    def release_lease(self, lease: Lease) -> bool:
        """Give a hold back; False if it was gone already."""
        rules.require_text(
            self._limits,
            version_id=lease.version_id,
            lease_id=lease.lease_id,
            worker_id=lease.worker_id,
        )
        key = records.lease_key(lease.version_id, lease.lease_id)

        def decide(tx: Transaction) -> bool:
            held = read_live_lease(tx, key)
            if held is None:
                return False
            if held.worker_id != lease.worker_id:
                raise PreconditionError(
                    f"lease {lease.lease_id} belongs to worker {held.worker_id!r}, "
                    f"not {lease.worker_id!r}"
                )
            tx.delete(key)
            return True

        return self._write(decide)

    def list_versions(
        self, model_name: str, *, run_id: str | None = None
    ) -> Sequence[WeightVersion]:
        """Return the versions of a model in the order of their creation."""
        rules.require_text(self._limits, model_name=model_name)
        found = self._catalog.records_of(model_name)
        return [r.version for r in found if is_of_run(r.version, run_id)]

    def revision_of(self, model_name: str) -> int:
        """Return the count of changes to a model's versions."""
        rules.require_text(self._limits, model_name=model_name)
        return read_model_head(self._read(), model_name).changes

    def version_changes(
        self, model_name: str, *, run_id: str | None = None, after: int = 0
    ) -> VersionChanges:
        """Return what changed since a revision, at once; nothing gives that revision again."""
        rules.require_text(self._limits, model_name=model_name)
        return self._catalog.changes(model_name, run_id=run_id, after=after)

    def describe_version(
        self, uid: str, description: VersionDescription, *, source_slot_id: str | None = None
    ) -> WeightVersion:
        """Attach the description, once, or a slot's part of it."""
        rules.require_text(self._limits, uid=uid)
        rules.check_description(description, self._limits)
        if source_slot_id is None:
            return self._write(lambda tx: describing.describe(tx, uid, description))
        slot = source_slot_id
        rules.require_text(self._limits, source_slot_id=slot)
        return self._write(lambda tx: describing.describe_slot(tx, uid, slot, description))

    def list_leases(self, version_id: str) -> Sequence[Lease]:
        """Return the live leases of a version."""
        rules.require_text(self._limits, version_id=version_id)
        tx = self._read()
        require_version(tx, version_id)
        found = (records.decode_lease(r.value) for r in tx.list(records.leases_prefix(version_id)))
        return [lease for lease in found if lease.expires_at_unix_ms > tx.now_ms]

    def list_workers(self, model_name: str) -> Sequence[WorkerRegistration]:
        """Return the living workers of a model."""
        rules.require_text(self._limits, model_name=model_name)
        now_ms = self._store.now_ms()
        found = (records.decode_worker(r.value) for r in self._store.list(records.WORKERS))
        return [w for w in found if w.model_name == model_name and rules.is_alive(w, now_ms)]

    def report_installed(self, report: InstalledReport) -> None:
        """Keep what a generator says it serves, in place of its report before."""
        rules.check_report(report, self._limits)

        def decide(tx: Transaction) -> None:
            rules.check_worker(
                read_worker(tx, report.worker_id),
                worker_id=report.worker_id,
                now_ms=tx.now_ms,
                model_name=report.model_name,
                role=WorkerRole.GENERATOR,
            )
            history.put_report(tx, report)

        self._write(decide)

    def list_installed(
        self, model_name: str, *, live_only: bool = True
    ) -> Sequence[InstalledReport]:
        """Return each generator's latest report."""
        rules.require_text(self._limits, model_name=model_name)
        return history.list_reports(self._read(), model_name, live_only=live_only)

    def record_event(self, event: Event) -> None:
        """Append an event; one that equals a kept one is that one, sent again."""
        rules.check_event(event, self._limits)
        event = history.canonical(event)
        self._write(lambda tx: history.append_event(tx, event, limits=self._limits))

    def list_events(self, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Return events in order, at most ``limit``, fewer where the reply would get large."""
        rules.require_count("after", after)
        rules.require_count("limit", limit, least=1, most=rules.UINT32_MAX)
        return history.list_events(self._read(), after=after, limit=limit, limits=self._limits)

    def get_chain(self, uid: str) -> Sequence[WeightVersion]:
        """Return the versions that lead to this one, a full version first."""
        rules.require_text(self._limits, uid=uid)
        return chains.read_chain(self._read(), uid)

    def record_delta(self, delta: Delta) -> Delta:
        """Say that one artefact leads from a base to a target."""
        rules.check_delta(delta, self._limits)
        return self._write(lambda tx: chains.put_delta(tx, delta))

    def list_deltas(self, target_version_id: str) -> Sequence[Delta]:
        """Return the artefacts that lead to a version, by base."""
        rules.require_text(self._limits, target_version_id=target_version_id)
        tx = self._read()
        require_version(tx, target_version_id)
        found = tx.list(records.deltas_prefix(target_version_id))
        return [records.decode_delta(r.value) for r in found]

    def announce_replica(self, replica: Replica) -> Sequence[Replica]:
        """Say which chunks a generator has and serves; return what is said of that version."""
        rules.check_replica(replica, self._limits)
        return self._write(lambda tx: replicas.announce(tx, replica, limits=self._limits))

    def list_replicas(self, version_id: str) -> Sequence[Replica]:
        """Return the replicas of living generators."""
        rules.require_text(self._limits, version_id=version_id)
        tx = self._read()
        require_version(tx, version_id)
        return replicas.list_living(tx, version_id)

    def withdraw_replica(self, *, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Forget a replica; False if there was none."""
        names = {
            "version_id": version_id,
            "source_slot_id": source_slot_id,
            "worker_id": worker_id,
        }
        rules.require_text(self._limits, **names)
        return self._write(lambda tx: replicas.withdraw(tx, **names))

    def set_retention(self, model_name: str, policy: RetentionPolicy) -> None:
        """Say which READY versions of a model stay."""
        rules.require_text(self._limits, model_name=model_name)
        rules.check_retention(policy)
        record = RetentionRecord(model_name=model_name, policy=policy)
        key = records.retention_key(model_name)
        self._write(lambda tx: tx.put(key, records.encode(record)))

    def get_retention(self, model_name: str) -> RetentionPolicy:
        """Return the model's policy; by default everything stays."""
        rules.require_text(self._limits, model_name=model_name)
        value = self._read().get(records.retention_key(model_name))
        return RetentionPolicy() if value is None else records.decode_retention(value).policy

    def drain_worker(self, worker_id: str, *, resume: bool = False) -> None:
        """Let a living worker begin nothing new, or again."""
        rules.require_text(self._limits, worker_id=worker_id)
        key = records.drain_key(worker_id)

        def decide(tx: Transaction) -> None:
            if not rules.is_alive(read_worker(tx, worker_id), tx.now_ms):
                raise rules.not_found("living worker", worker_id)
            if resume:
                tx.delete(key)
            else:
                tx.put(key, records.encode_text(worker_id))

        self._write(decide)

    def set_pin(self, pin: Pin) -> None:
        """Have some generators serve a READY version, or the newest again."""
        rules.require_text(self._limits, model_name=pin.model_name, workers=pin.workers)
        key = records.pin_key(pin.model_name, pin.workers)

        def decide(tx: Transaction) -> None:
            if pin.version_id:
                rules.check_pinnable(require_version(tx, pin.version_id).version, pin)
                tx.put(key, records.encode(pin))
            elif tx.get(key) is None:
                raise rules.not_found("pin", pin.workers)
            else:
                tx.delete(key)

        self._write(decide)

    def list_pins(self, model_name: str) -> Sequence[Pin]:
        """Return a model's pins, by pattern."""
        rules.require_text(self._limits, model_name=model_name)
        found = self._store.list(records.pins_prefix(model_name))
        return sorted((records.decode_pin(r.value) for r in found), key=lambda pin: pin.workers)

    def list_draining(self) -> Sequence[str]:
        """Return the ids of workers that begin nothing new."""
        return [records.decode_text(r.value) for r in self._store.list(records.DRAINS)]

    def list_tombstones(self, model_name: str) -> Sequence[Tombstone]:
        """Return a model's versions that are gone, by uid."""
        rules.require_text(self._limits, model_name=model_name)
        found = (records.decode_tombstone(r.value) for r in self._store.list(records.TOMBSTONES))
        return [tombstone for tombstone in found if tombstone.model_name == model_name]

    def reap(self) -> Reaped:
        """Remove what nobody will come back for; call it every few seconds."""
        return sum(self.sweep(), start=Reaped())

    def sweep(self) -> Iterator[Reaped]:
        """Do what ``reap`` does in small steps, so that others get in between."""
        return reaper.sweep(self._store, self._write, self._limits, self._catalog)

    def collect_objects(self, collect: Callable[[ObjectStorageSource], None]) -> int:
        """Have the objects of versions that are gone removed; return how many were.

        ``collect`` may be called again for an object that it removed. What it raises passes
        through; the object's turn comes again.
        """
        return reaper.collect_objects(self._store, self._write, collect)

    @contextmanager
    def group(self, keys: Sequence[str] = ()) -> Iterator[None]:
        """Make everything that is called inside durable together, at the end.

        Args:
            keys: records that will be needed, if that is known; see hints.

        Raises StoreError or ConflictError at the end if that failed: then nothing inside took
        effect, whatever it returned.
        """
        try:
            with self._group():
                if keys and isinstance(self._store, SupportsPrefetch):
                    self._store.prefetch(keys)
                yield
        except BaseException:
            self._catalog.forget()
            raise

    def close(self) -> None:
        """Close the store; idempotent."""
        self._store.close()

    def _read(self) -> Transaction:
        """Return a transaction that is only read from and never committed."""
        return Transaction(self._store)

    def _write(self, decide: Callable[[Transaction], T]) -> T:
        return transact(self._store, decide)


def _missing_slots(record: VersionRecord) -> Sequence[str]:
    covered = set(record.covered_slots)
    return [slot for slot in record.version.expected_source_slots if slot not in covered]
