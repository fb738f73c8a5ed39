"""Trainers, generators, expiry, repeats and reaping in any order, against an independent model.

The model is what the protocol's text says, written without the ledger's code: plain sets and
dicts, and one number for the time. Two ledgers over one store take turns, as two replicas of
the service would; clocks jump both ways, replicas crash before their group is durable, replies
are lost and asked for again elsewhere, and a reader follows the stream of changes.
"""

import contextlib
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.refit.control.ledger import ControlLedger
from paceline.refit.control.rules import Limits
from paceline.refit.errors import AlreadyExistsError, ControlError, NotFoundError, PreconditionError
from paceline.refit.model import (
    Lease,
    RetentionPolicy,
    Shard,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
    WorkerRegistration,
    WorkerRole,
)
from paceline.store.memory import MemoryStore
from paceline.system import environ
from paceline.testing.clock import FakeClock

MODEL = "m"
SLOTS = ("a", "b")
TRAINERS = ("t0", "t1")
GENERATORS = ("g0", "g1")
TTL_S = 10
LEASE_TTL_S = 25
STAGING_TTL_S = 40
KEPT_S = 15

FIXED_RECORDS = 3
"""Counts over all versions and of the model, and the model's policy."""
STEPS_PER_EXAMPLE = 40
STEPS = 50_000 if environ().get("HYPOTHESIS_PROFILE") == "nightly" else 4_000

trainers = st.sampled_from(TRAINERS)
generators = st.sampled_from(GENERATORS)
slots = st.sampled_from(SLOTS)
keys = st.sampled_from(["k0", "k1", "k2"])
replicas = st.sampled_from([0, 1])


@dataclass
class Believed:
    """What the model knows of one version."""

    key: str
    made_at: float
    state: VersionState = VersionState.STAGING
    covered: set[str] = field(default_factory=set)
    shards: set[tuple[str, str]] = field(default_factory=set)
    leases: dict[str, float] = field(default_factory=dict)


class ControlWorld(RuleBasedStateMachine):
    """Everybody does anything; what the ledger answers must be what the model expects."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        store = MemoryStore(clock=self.clock)
        numbers = count()
        limits = Limits(staging_ttl_s=STAGING_TTL_S, released_kept_s=KEPT_S)
        self.ledgers = [
            ControlLedger(store, nonce=lambda: f"{next(numbers):08x}", limits=limits)
            for _ in range(2)
        ]
        self.store = store
        self.alive_until: dict[str, float] = {}
        self.gone: set[str] = set()
        self.draining: set[str] = set()
        self.keep_last = 0
        self.seen: dict[str, VersionState] = {}
        self.seen_revision = 0
        self.versions: dict[str, Believed] = {}

    # time is in whole seconds, so that floats of the two sides cannot differ

    @property
    def now(self) -> float:
        """Return the time."""
        return self.clock.time()

    def is_alive(self, worker: str) -> bool:
        """Return whether the model thinks that a worker lives."""
        return self.alive_until.get(worker, -1) > self.now

    def live_leases(self, version: Believed) -> set[str]:
        """Return who holds a version, as the model has it."""
        return {worker for worker, until in version.leases.items() if until > self.now}

    def any_version(self, data: st.DataObject) -> str | None:
        """Draw one of the versions that were ever made."""
        return data.draw(st.sampled_from(sorted(self.versions))) if self.versions else None

    @initialize()
    def everybody_arrives(self) -> None:
        """Start with living workers, so that most steps can do something."""
        for worker in (*TRAINERS, *GENERATORS):
            self.heartbeat(0, worker)

    @rule(replica=replicas, worker=st.sampled_from((*TRAINERS, *GENERATORS)))
    def heartbeat(self, replica: int, worker: str) -> None:
        """Register or refresh."""
        role = WorkerRole.TRAINER if worker in TRAINERS else WorkerRole.GENERATOR
        self.ledgers[replica].register_worker(
            WorkerRegistration(worker_id=worker, role=role, model_name=MODEL), ttl_seconds=TTL_S
        )
        self.alive_until[worker] = self.now + TTL_S

    @rule(seconds=st.sampled_from([1, 5, 10, 20]))
    def time_passes(self, seconds: int) -> None:
        """Let registrations and leases expire."""
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([-20, -3, 40]))
    def clock_jumps(self, seconds: int) -> None:
        """Somebody sets the store's clock."""
        self.clock.set_time(self.now + seconds)

    @rule(replica=replicas, key=keys)
    def crash(self, replica: int, key: str) -> None:
        """Die after deciding and before it is durable: nothing of it happened."""
        ledger = self.ledgers[replica]
        with contextlib.suppress(ZeroDivisionError), ledger.group():
            ledger.create_version(self.request(f"crashed-{key}"))
            for uid in self.versions:
                ledger.delete_version(uid)
            _ = 1 / 0

    @rule(replica=replicas, data=st.data())
    def use_a_name_again(self, replica: int, data: st.DataObject) -> None:
        """Ask for the name of a version that is gone."""
        if self.gone:
            uid = data.draw(st.sampled_from(sorted(self.gone)))
            with pytest.raises(AlreadyExistsError):
                self.ledgers[replica].create_version(replace(self.request("again"), uid=uid))

    @rule(replica=replicas, keep_last=st.integers(0, 2))
    def set_policy(self, replica: int, keep_last: int) -> None:
        """Say how many READY versions stay."""
        self.ledgers[replica].set_retention(MODEL, RetentionPolicy(keep_last=keep_last))
        self.keep_last = keep_last

    @rule(replica=replicas, generator=generators, resume=st.booleans())
    def drain(self, replica: int, generator: str, resume: bool) -> None:
        """Let a generator begin nothing new, or again."""
        try:
            self.ledgers[replica].drain_worker(generator, resume=resume)
        except NotFoundError:
            assert not self.is_alive(generator)
            return
        assert self.is_alive(generator)
        if resume:
            self.draining.discard(generator)
        else:
            self.draining.add(generator)

    @rule(replica=replicas)
    def follow(self, replica: int) -> None:
        """Read what changed, from any replica, and know everything that a list would show."""
        changes = self.ledgers[replica].version_changes(MODEL, after=self.seen_revision)
        assert changes.revision >= self.seen_revision
        if changes.reset:
            self.seen.clear()
        for uid in changes.removed:
            self.seen.pop(uid, None)
        self.seen |= {version.uid: version.state for version in changes.versions}
        self.seen_revision = changes.revision
        assert self.seen == {uid: believed.state for uid, believed in self.versions.items()}

    def request(self, key: str) -> VersionRequest:
        """Return what a version of two slots is asked for with."""
        return VersionRequest(
            model_name=MODEL,
            idempotency_key=key,
            payload_format=WeightPayloadFormat.FULL_TENSOR,
            expected_source_slots=SLOTS,
        )

    @rule(replica=replicas, key=keys, repeat=st.booleans())
    def create(self, replica: int, key: str, repeat: bool) -> None:
        """Create under a key; a client that lost the reply asks again, maybe elsewhere."""
        request = self.request(key)
        version = self.ledgers[replica].create_version(request)
        known = [uid for uid, believed in self.versions.items() if believed.key == key]
        if known:
            assert [version.uid] == known
        else:
            self.versions[version.uid] = Believed(key=key, made_at=self.now)
        if repeat:
            assert self.ledgers[1 - replica].create_version(request) == version

    @rule(replica=replicas, data=st.data(), slot=slots, trainer=trainers)
    def publish(self, replica: int, data: st.DataObject, slot: str, trainer: str) -> None:
        """Advertise a shard."""
        uid = self.any_version(data)
        if uid is not None:
            self.advertise(replica, uid, slot=slot, trainer=trainer)

    def advertise(self, replica: int, uid: str, *, slot: str, trainer: str) -> None:
        """Advertise a shard and see that the answer is the one that the model expects."""
        believed = self.versions[uid]
        allowed = self.is_alive(trainer) and believed.state is not VersionState.RELEASING
        shard = Shard(
            version_id=uid,
            source_slot_id=slot,
            worker_id=trainer,
            tensor_count=1,
            total_bytes=1,
            manifest_digest="d",
            manifest_endpoint="e",
        )
        try:
            state = self.ledgers[replica].create_shard(shard).state
        except ControlError:
            assert not allowed
            return
        assert allowed
        believed.covered.add(slot)
        believed.shards.add((slot, trainer))
        if believed.covered == set(SLOTS):
            believed.state = VersionState.READY
        assert state is believed.state

    @rule(key=keys, trainer=trainers)
    def publish_all(self, key: str, trainer: str) -> None:
        """Do what a trainer's step does: heartbeat, create, every slot, in one go."""
        self.heartbeat(0, trainer)
        self.create(0, key, repeat=False)
        uid = next(uid for uid, believed in self.versions.items() if believed.key == key)
        for replica, slot in enumerate(SLOTS):
            self.advertise(replica, uid, slot=slot, trainer=trainer)

    @rule(data=st.data(), generator=generators, retired=st.booleans())
    def read_ready(self, data: st.DataObject, generator: str, retired: bool) -> None:
        """Do what a generator's refit begins with; the version may be retired meanwhile."""
        ready = sorted(u for u, b in self.versions.items() if b.state is VersionState.READY)
        if ready:
            uid = data.draw(st.sampled_from(ready))
            self.heartbeat(1, generator)
            self.hold(1, uid, generator=generator)
            if retired:
                self.ledgers[0].delete_version(uid)
                self.versions[uid].state = VersionState.RELEASING

    @rule(replica=replicas, data=st.data(), generator=generators)
    def lease(self, replica: int, data: st.DataObject, generator: str) -> None:
        """Take or renew a hold."""
        uid = self.any_version(data)
        if uid is not None:
            self.hold(replica, uid, generator=generator)

    def hold(self, replica: int, uid: str, *, generator: str) -> None:
        """Take or renew a hold and see that the answer is the one that the model expects."""
        believed = self.versions[uid]
        holds = generator in self.live_leases(believed)
        leasable = believed.state is VersionState.READY or (
            holds and believed.state is VersionState.RELEASING
        )
        begins = holds or generator not in self.draining
        allowed = self.is_alive(generator) and leasable and begins
        try:
            self.ledgers[replica].acquire_lease(
                version_id=uid, worker_id=generator, ttl_seconds=LEASE_TTL_S
            )
        except ControlError:
            assert not allowed
            return
        assert allowed
        believed.leases[generator] = self.now + LEASE_TTL_S

    @rule(replica=replicas, data=st.data(), generator=generators, repeat=st.booleans())
    def give_back(self, replica: int, data: st.DataObject, generator: str, repeat: bool) -> None:
        """Give a hold back, twice if the reply was lost."""
        uid = self.any_version(data)
        if uid is None:
            return
        believed = self.versions[uid]
        held = {lease.worker_id: lease for lease in self.ledgers[replica].list_leases(uid)}
        lease = held.get(generator) or Lease(
            lease_id="none", version_id=uid, worker_id=generator, expires_at_unix_ms=0
        )
        released = self.ledgers[replica].release_lease(lease)
        assert released is (generator in self.live_leases(believed))
        if released:
            believed.leases.pop(generator)
        if repeat:
            assert not self.ledgers[1 - replica].release_lease(lease)

    @rule(replica=replicas, data=st.data(), repeat=st.booleans())
    def retire(self, replica: int, data: st.DataObject, repeat: bool) -> None:
        """Delete a version, twice if the reply was lost."""
        uid = self.any_version(data)
        if uid is None:
            return
        self.ledgers[replica].delete_version(uid)
        self.versions[uid].state = VersionState.RELEASING
        if repeat:
            self.ledgers[1 - replica].delete_version(uid)

    @rule(replica=replicas, data=st.data(), slot=slots, trainer=trainers)
    def evict(self, replica: int, data: st.DataObject, slot: str, trainer: str) -> None:
        """Take a shard away."""
        uid = self.any_version(data)
        if uid is None:
            return
        believed = self.versions[uid]
        there = (slot, trainer) in believed.shards
        allowed = (
            there
            and believed.state is VersionState.RELEASING
            and not self.live_leases(believed)
            and self.is_alive(trainer)
        )
        refused_as: type[ControlError] | None = None
        try:
            self.ledgers[replica].delete_shard(
                version_id=uid, source_slot_id=slot, worker_id=trainer
            )
        except ControlError as exc:
            refused_as = type(exc)
        if not allowed:
            assert refused_as is (PreconditionError if there else NotFoundError)
            return
        assert refused_as is None
        believed.shards.remove((slot, trainer))
        self.purge(believed)

    def purge(self, believed: Believed) -> None:
        """Forget expired leases for good: a clock that is set back does not revive them."""
        live = self.live_leases(believed)
        believed.leases = {w: until for w, until in believed.leases.items() if w in live}

    def retire_surplus(self) -> None:
        """Do what the policy says: the newest and the leased stay READY."""
        ready = [b for b in self.versions.values() if b.state is VersionState.READY]
        for believed in ready[: -self.keep_last] if self.keep_last else []:
            if not self.live_leases(believed):
                believed.state = VersionState.RELEASING

    @rule(replica=replicas)
    def reap(self, replica: int) -> None:
        """Tidy up; afterwards the model follows what is gone, if it may be gone."""
        self.ledgers[replica].reap()
        self.alive_until = {w: t for w, t in self.alive_until.items() if t > self.now}
        self.draining &= self.alive_until.keys()
        self.retire_surplus()
        for uid, believed in list(self.versions.items()):
            self.purge(believed)
            if (
                believed.state is VersionState.STAGING
                and self.now - believed.made_at > STAGING_TTL_S
            ):
                believed.state = VersionState.RELEASING
                continue
            if believed.state is not VersionState.RELEASING or self.live_leases(believed):
                continue
            believed.shards = {(s, t) for s, t in believed.shards if self.is_alive(t)}
            try:
                self.ledgers[replica].get_version(uid)
            except NotFoundError:
                assert not believed.shards
                del self.versions[uid]
                self.gone.add(uid)

    @invariant()
    def the_ledger_agrees(self) -> None:
        """States, shards and leases are what the model has; READY never lacks a slot."""
        for uid, believed in self.versions.items():
            version = self.ledgers[0].get_version(uid)
            assert version.state is believed.state
            shards = {(s.source_slot_id, s.worker_id) for s in self.ledgers[1].list_shards(uid)}
            assert shards <= believed.shards
            assert {slot for slot, _ in shards} == {slot for slot, _ in believed.shards}
            leases = self.ledgers[0].list_leases(uid)
            assert {lease.worker_id for lease in leases} == self.live_leases(believed)
            if version.state is VersionState.READY or leases:
                assert {slot for slot, _ in shards} == set(SLOTS)

    @invariant()
    def one_version_per_key(self) -> None:
        """However often it was asked for."""
        listed = [version.idempotency_key for version in self.ledgers[0].list_versions(MODEL)]
        assert sorted(listed) == sorted({believed.key for believed in self.versions.values()})

    @invariant()
    def no_state_leaks(self) -> None:
        """What is kept is what the model knows of, and tombstones."""
        kept = [record.key for record in self.store.list("") if not record.key.startswith("gone/")]
        known = sum(2 + len(b.shards) + len(GENERATORS) for b in self.versions.values())
        assert len(kept) <= known + 2 * len(TRAINERS + GENERATORS) + FIXED_RECORDS


TestControlWorld = ControlWorld.TestCase
TestControlWorld.settings = settings(
    max_examples=STEPS // STEPS_PER_EXAMPLE, stateful_step_count=STEPS_PER_EXAMPLE, deadline=None
)
