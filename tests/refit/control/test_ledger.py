"""The ledger over each embedded store keeps the contract, and what only it can be asked."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from paceline.refit.control import records
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.control.records import DamagedRecordError
from paceline.refit.control.rules import Limits
from paceline.refit.control.transaction import TRIES_MAX
from paceline.refit.errors import (
    AlreadyExistsError,
    ControlUnavailableError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from paceline.refit.model import Lease, VersionState
from paceline.store.memory import MemoryStore
from paceline.store.protocol import Store
from paceline.store.sqlite import SqliteStore
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.board import ReplicaBoardContract
from paceline.testing.contracts.control import (
    EVENT,
    FULL,
    GENERATOR,
    MODEL,
    REPORT,
    SEED,
    TRAINER,
    TTL_S,
    ControlPlaneContract,
    shard_of,
)


def counting() -> Callable[[], str]:
    """Return a nonce function that counts in eight hex digits."""
    numbers = count(1)
    return lambda: f"{next(numbers):08x}"


def ledger_over(store: Store, limits: Limits | None = None) -> ControlLedger:
    """Return a ledger with countable uids and one worker of each role."""
    ledger = ControlLedger(store, nonce=counting(), limits=limits)
    ledger.register_worker(TRAINER, ttl_seconds=TTL_S)
    ledger.register_worker(GENERATOR, ttl_seconds=TTL_S)
    return ledger


class TestLedgerInMemory(ControlPlaneContract, ReplicaBoardContract):
    def make(self, clock: FakeClock) -> ControlLedger:
        return ControlLedger(MemoryStore(clock=clock), nonce=counting())


class TestLedgerInSqlite(ControlPlaneContract, ReplicaBoardContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self._path = tmp_path / "control.db"

    def make(self, clock: FakeClock) -> ControlLedger:
        return ControlLedger(SqliteStore(self._path, clock=clock), nonce=counting())


class CrowdedStore(MemoryStore):
    """A store where another writer is always quicker, for a while."""

    def __init__(self, *, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.before_commit: list[Callable[[], None]] = []

    def commit(self, **kwargs: object) -> None:
        """Let the next one in the queue go first."""
        if self.before_commit:
            self.before_commit.pop(0)()
        super().commit(**kwargs)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def crowded(clock: FakeClock) -> CrowdedStore:
    return CrowdedStore(clock=clock)


def test_two_replicas_publishing_the_last_two_slots_make_it_ready(crowded: CrowdedStore) -> None:
    """Whichever commits second sees that the version is complete, though it read before."""
    first, second = ledger_over(crowded), ControlLedger(crowded, nonce=counting())
    uid = first.create_version(FULL).uid
    crowded.before_commit.append(lambda: second.create_shard(shard_of(uid, "rank-1")))  # type: ignore[arg-type]
    assert first.create_shard(shard_of(uid, "rank-0")).state is VersionState.READY
    assert len(first.list_shards(uid)) == 2


def test_a_lease_cannot_slip_in_while_the_version_is_retired(crowded: CrowdedStore) -> None:
    """A first lease that races with the delete is refused, not granted on a RELEASING version."""
    ledger, other = ledger_over(crowded), ControlLedger(crowded, nonce=counting())
    ledger.create_version(SEED)
    uid = SEED.uid or ""
    crowded.before_commit.append(lambda: other.delete_version(uid))  # type: ignore[arg-type]
    with pytest.raises(PreconditionError):
        ledger.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=10)
    assert ledger.list_leases(uid) == []


def test_a_renewal_that_races_with_eviction_wins_or_fails_whole(
    crowded: CrowdedStore, clock: FakeClock
) -> None:
    """If the lease was renewed after eviction looked at it, the shard stays."""
    ledger, other = ledger_over(crowded), ControlLedger(crowded, nonce=counting())
    uid = ledger.create_version(FULL).uid
    for slot in FULL.expected_source_slots:
        ledger.create_shard(shard_of(uid, slot))
    ledger.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=10)
    ledger.delete_version(uid)
    clock.advance(10)

    def renew_just_in_time() -> None:
        clock.set_time(clock.time() - 1)
        other.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=10)

    crowded.before_commit.append(renew_just_in_time)
    with pytest.raises(PreconditionError):
        ledger.delete_shard(version_id=uid, source_slot_id="rank-0", worker_id="t-0")
    assert len(ledger.list_shards(uid)) == 2


def test_concurrent_creates_under_one_key_give_one_version(crowded: CrowdedStore) -> None:
    """The loser of the race returns the winner's version."""
    ledger, other = ledger_over(crowded), ControlLedger(crowded, nonce=lambda: "ffffffff")
    crowded.before_commit.append(lambda: other.create_version(FULL))  # type: ignore[arg-type]
    assert ledger.create_version(FULL).uid == "ffffffff"
    assert len(ledger.list_versions(MODEL)) == 1


def test_a_store_that_never_lets_us_through_is_unavailable(crowded: CrowdedStore) -> None:
    """After a bounded number of conflicts the call gives up and says so."""
    ledger, other = ledger_over(crowded), ControlLedger(crowded, nonce=counting())
    ttl_s = count(1)

    def quicker() -> None:
        crowded_queue, crowded.before_commit = crowded.before_commit, []
        other.register_worker(TRAINER, ttl_seconds=next(ttl_s))
        crowded.before_commit = crowded_queue

    crowded.before_commit = [quicker] * (TRIES_MAX + 5)
    with pytest.raises(ControlUnavailableError, match="busy"):
        ledger.register_worker(TRAINER, ttl_seconds=1000)


def test_a_uid_that_is_taken_is_drawn_again_five_times(clock: FakeClock) -> None:
    """A generated uid never replaces a version; after five collisions the call gives up."""
    store = MemoryStore(clock=clock)
    ControlLedger(store, nonce=lambda: "aaaaaaaa").create_version(FULL)
    draws = iter(["aaaaaaaa", "aaaaaaaa", "aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    other = replace(FULL, idempotency_key="other")
    assert ControlLedger(store, nonce=lambda: next(draws)).create_version(other).uid == "bbbbbbbb"
    with pytest.raises(ExhaustedError):
        ControlLedger(store, nonce=lambda: "aaaaaaaa").create_version(
            replace(FULL, idempotency_key="third")
        )


def test_a_lease_id_held_by_somebody_else_is_refused(clock: FakeClock) -> None:
    """Two workers whose ids hash alike do not share a lease."""
    store = MemoryStore(clock=clock)
    ledger = ledger_over(store)
    ledger.create_version(SEED)
    uid = SEED.uid or ""
    lease_id = records.lease_id_of(uid, "g-0")
    held = Lease(
        lease_id=lease_id,
        version_id=uid,
        worker_id="g-twin",
        expires_at_unix_ms=int(clock.time() * 1000) + 1000,
    )
    store.commit(expect={}, writes={records.lease_key(uid, lease_id): records.encode(held)})
    with pytest.raises(AlreadyExistsError):
        ledger.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=1)
    clock.advance(1)
    assert ledger.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=1).worker_id == "g-0"


def test_limits_refuse_and_say_what_to_do(clock: FakeClock) -> None:
    """Versions, slots and shards beyond the limit are refused, what is there stays."""
    limits = Limits(versions_max=2, slots_max=2, shards_max=1)
    ledger = ledger_over(MemoryStore(clock=clock), limits)
    with pytest.raises(InvalidRequestError, match="at most 2"):
        ledger.create_version(replace(FULL, expected_source_slots=("a", "b", "c")))
    uid = ledger.create_version(FULL).uid
    ledger.create_shard(shard_of(uid))
    with pytest.raises(ExhaustedError, match="1 shards"):
        ledger.create_shard(shard_of(uid, "rank-1"))
    ledger.create_version(SEED)
    with pytest.raises(ExhaustedError, match="delete versions"):
        ledger.create_version(replace(FULL, idempotency_key="third"))
    assert ledger.create_version(FULL).uid == uid


def test_damaged_records_are_named_and_not_skipped(clock: FakeClock) -> None:
    """A record that something else wrote is an error, in reads and in lists."""
    store = MemoryStore(clock=clock)
    ledger = ledger_over(store)
    for damage in (b"\xff", b"{}", b"[]", b'{"version":{}}'):
        store.commit(expect={}, writes={records.version_key("v"): damage})
        with pytest.raises(DamagedRecordError):
            ledger.get_version("v")
        with pytest.raises(DamagedRecordError):
            ledger.list_versions(MODEL)


def test_a_ledger_over_the_same_file_goes_on(tmp_path: Path, clock: FakeClock) -> None:
    """A restart of the service loses nothing."""
    path = tmp_path / "control.db"
    ledger = ledger_over(SqliteStore(path, clock=clock))
    uid = ledger.create_version(FULL).uid
    ledger.create_shard(shard_of(uid))
    ledger.record_event(EVENT)
    ledger.close()
    again = ControlLedger(SqliteStore(path, clock=clock), nonce=counting())
    assert again.create_version(FULL).uid == uid
    assert again.create_shard(shard_of(uid, "rank-1")).state is VersionState.READY
    again.record_event(replace(EVENT, at_unix_ms=8))
    assert [event.index for event in again.list_events()] == [1, 2]
    again.close()


class TestReaping:
    """What nobody will come back for goes, and only that."""

    limits = Limits(staging_ttl_s=100, released_kept_s=50, events_kept=5, reports_kept=2)

    @pytest.fixture
    def store(self, clock: FakeClock) -> MemoryStore:
        return MemoryStore(clock=clock)

    @pytest.fixture
    def ledger(self, store: MemoryStore) -> ControlLedger:
        return ledger_over(store, self.limits)

    def test_the_expired_go_and_the_living_stay(
        self, ledger: ControlLedger, clock: FakeClock
    ) -> None:
        """Registrations and leases are removed once they mean nothing."""
        ledger.create_version(SEED)
        uid = SEED.uid or ""
        ledger.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=10)
        clock.advance(10)
        assert (ledger.reap().leases, ledger.reap().leases) == (1, 0)
        clock.advance(TTL_S)
        ledger.register_worker(replace(TRAINER, worker_id="t-1"), ttl_seconds=TTL_S)
        assert ledger.reap().workers == 2
        assert [w.worker_id for w in ledger.list_workers(MODEL)] == ["t-1"]

    def test_a_version_that_takes_too_long_is_given_up(
        self, ledger: ControlLedger, clock: FakeClock
    ) -> None:
        """STAGING expires; READY does not."""
        uid = ledger.create_version(FULL).uid
        ledger.create_version(SEED)
        clock.advance(101)
        assert ledger.reap().given_up == 1
        assert ledger.get_version(uid).state is VersionState.RELEASING
        assert ledger.get_version(SEED.uid or "").state is VersionState.READY

    def test_a_released_version_goes_when_nothing_needs_it(
        self, ledger: ControlLedger, store: MemoryStore, clock: FakeClock
    ) -> None:
        """Leases and shards of the living keep it; afterwards no record of it is left."""
        uid = ledger.create_version(FULL).uid
        for slot in FULL.expected_source_slots:
            ledger.create_shard(shard_of(uid, slot))
        ledger.acquire_lease(version_id=uid, worker_id="g-0", ttl_seconds=60)
        ledger.delete_version(uid)
        clock.advance(59)
        assert ledger.reap().versions == 0
        clock.advance(1)
        assert ledger.reap().leases == 1
        assert len(ledger.list_shards(uid)) == 2
        clock.advance(TTL_S)
        reaped = ledger.reap()
        assert (reaped.shards, reaped.versions) == (2, 1)
        with pytest.raises(NotFoundError):
            ledger.get_version(uid)
        left = [record.key for record in store.list("")]
        kept = [records.tombstone_key(uid), records.model_head_key(MODEL), records.VERSIONS_HEAD]
        assert left == kept
        with pytest.raises(AlreadyExistsError):
            ledger.create_version(replace(FULL, uid=uid))
        assert ledger.create_version(FULL).uid != uid

    def test_only_the_newest_events_are_kept(
        self, ledger: ControlLedger, store: MemoryStore
    ) -> None:
        """Old events go with everything that was kept for them; indices go on."""
        for n in range(12):
            ledger.record_event(replace(EVENT, at_unix_ms=n))
        assert [event.index for event in ledger.list_events()] == [8, 9, 10, 11, 12]
        assert len(store.list("event")) == 10
        ledger.record_event(replace(EVENT, at_unix_ms=0))
        assert ledger.list_events(after=12)[0].index == 13

    def test_a_reply_of_events_stays_small(self, store: MemoryStore) -> None:
        """A reader gets at least one event and never more than a reply's worth."""
        ledger = ControlLedger(store, nonce=counting(), limits=Limits(events_reply_chars_max=1000))
        for n in range(4):
            ledger.record_event(replace(EVENT, at_unix_ms=n, fields={"x": "y" * 400}))
        assert [event.index for event in ledger.list_events()] == [1, 2]
        assert [event.index for event in ledger.list_events(after=2)] == [3, 4]

    def test_only_the_newest_reports_are_kept(
        self, ledger: ControlLedger, clock: FakeClock
    ) -> None:
        """Generators that came and went do not pile up."""
        for n in range(4):
            ledger.register_worker(replace(GENERATOR, worker_id=f"g-{n}"), ttl_seconds=TTL_S)
            ledger.report_installed(replace(REPORT, worker_id=f"g-{n}", installed_at_unix_ms=n))
        assert ledger.reap().reports == 2
        left = ledger.list_installed(MODEL, live_only=False)
        assert [report.worker_id for report in left] == ["g-2", "g-3"]
