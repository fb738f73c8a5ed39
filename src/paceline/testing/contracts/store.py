"""What every store must do; subclass StoreContract and say how yours is made."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from paceline.core.clock import Clock
from paceline.store.protocol import ABSENT, ConflictError, Store, StoreError, SupportsGroups
from paceline.testing.clock import FakeClock

_KEYS = st.sampled_from(["a", "a/", "a/1", "a/10", "a/2", "a0", "b/\u00e9", "b/\U0010ffff", "\x00"])
_PREFIXES = st.sampled_from(["", "a", "a/", "a/1", "b/", "b/\U0010ffff", "\x00", "nothing"])
_VALUES = st.binary(max_size=12)


class StoreContract(ABC):
    """The claims of the store port, tested against one implementation."""

    @abstractmethod
    def make(self, clock: Clock) -> Store:
        """Return a new, empty store."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Yield an empty store and close it afterwards."""
        made = self.make(FakeClock())
        yield made
        made.close()

    def test_agrees_with_a_dict_in_any_order_of_calls(self) -> None:
        """Every sequence of commits, reads and lists gives what a plain dict would give."""
        contract = self

        class Machine(_StoreMachine):
            def make(self, clock: Clock) -> Store:
                return contract.make(clock)

        run_state_machine_as_test(
            Machine,
            settings=settings(max_examples=20, stateful_step_count=15, deadline=None),
        )

    def test_a_group_takes_effect_together(self, store: Store) -> None:
        """Inside, each commit is seen by the next; a body that raises leaves nothing of it."""
        if not isinstance(store, SupportsGroups):
            pytest.skip("this store has no groups")
        with store.group():
            store.commit(expect={"a": ABSENT}, writes={"a": b"1", "b": b"1"})
            first = store.get("a")
            assert first is not None
            with pytest.raises(ConflictError):
                store.commit(expect={"a": ABSENT}, writes={"a": b"0", "c": b"0"})
            store.commit(expect={"a": first.revision}, writes={"a": b"2", "b": None})
            assert [(r.key, r.value) for r in store.list("")] == [("a", b"2")]
        before = store.list("")
        assert [(r.key, r.value) for r in before] == [("a", b"2")]
        with pytest.raises(KeyError), store.group():
            store.commit(expect={"a": before[0].revision}, writes={"a": None, "d": b"1"})
            assert [r.key for r in store.list("")] == ["d"]
            raise KeyError
        assert store.list("") == before
        with store.group():
            assert store.get("a") == before[0]
        store.commit(expect={"a": before[0].revision}, writes={"a": b"3"})

    def test_a_failed_expectation_changes_nothing(self, store: Store) -> None:
        """One wrong revision among several keys leaves all of them as they were."""
        store.commit(expect={}, writes={"a": b"1", "b": b"1"})
        before = store.list("")
        with pytest.raises(ConflictError, match="b: expected revision"):
            store.commit(
                expect={"a": before[0].revision, "b": before[1].revision + 1},
                writes={"a": b"2", "b": None, "c": b"3"},
            )
        assert store.list("") == before

    def test_absent_means_must_not_exist(self, store: Store) -> None:
        """ABSENT lets exactly one of two creations through."""
        store.commit(expect={"a": ABSENT}, writes={"a": b"first"})
        with pytest.raises(ConflictError):
            store.commit(expect={"a": ABSENT}, writes={"a": b"second"})
        found = store.get("a")
        assert found is not None
        assert found.value == b"first"

    def test_keys_that_are_only_read_are_checked_too(self, store: Store) -> None:
        """A decision that rests on a key which moved is refused though it writes another key."""
        store.commit(expect={}, writes={"rule": b"1"})
        seen = store.list("rule")[0].revision
        store.commit(expect={}, writes={"rule": b"2"})
        with pytest.raises(ConflictError):
            store.commit(expect={"rule": seen}, writes={"other": b""})
        assert store.get("other") is None

    def test_a_revision_never_comes_back_after_a_delete(self, store: Store) -> None:
        """Delete and create again: the old revision stays dead."""
        seen = set()
        for _ in range(4):
            store.commit(expect={"a": ABSENT}, writes={"a": b"same"})
            seen.add(store.list("a")[0].revision)
            store.commit(expect={}, writes={"a": None})
        assert len(seen) == 4
        assert ABSENT not in seen

    def test_a_list_is_a_snapshot(self, store: Store) -> None:
        """What was listed does not change with later commits."""
        store.commit(expect={}, writes={"a/1": b"x", "a/2": b"y", "b": b"z"})
        listed = list(store.list("a/"))
        store.commit(expect={}, writes={"a/1": None, "a/2": b"new"})
        assert [(record.key, record.value) for record in listed] == [("a/1", b"x"), ("a/2", b"y")]

    def test_racing_threads_lose_no_update(self, store: Store) -> None:
        """Read, decide, commit, again on conflict: the sum over all threads is exact."""
        store.commit(expect={}, writes={"n": b"0"})
        threads = [threading.Thread(target=_count_up, args=(store, "n", 20)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = store.get("n")
        assert found is not None
        assert found.value == b"80"

    def test_time_is_the_clock_that_was_handed_in(self) -> None:
        """now_ms follows the clock and nothing else."""
        clock = FakeClock(time_s=12.5)
        store = self.make(clock)
        assert store.now_ms() == 12_500
        clock.advance(1.0)
        assert store.now_ms() == 13_500
        store.close()

    def test_close_is_idempotent_and_final(self, store: Store) -> None:
        """Closing twice is fine; using it afterwards is an error that says so."""
        store.close()
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.get("a")
        with pytest.raises(StoreError, match="closed"):
            store.commit(expect={}, writes={"a": b""})


def _count_up(store: Store, key: str, times: int) -> None:
    done = 0
    while done < times:
        record = store.get(key)
        assert record is not None
        try:
            store.commit(
                expect={key: record.revision}, writes={key: b"%d" % (int(record.value) + 1)}
            )
        except ConflictError:
            continue
        done += 1


class _StoreMachine(RuleBasedStateMachine):
    """Drives a store beside a dict of values and a set of all revisions ever seen."""

    def __init__(self) -> None:
        super().__init__()
        self.store = self.make(FakeClock())
        self.values: dict[str, bytes] = {}
        self.revisions: dict[str, int] = {}
        self.spent: set[tuple[str, int]] = set()

    def make(self, clock: Clock) -> Store:
        raise NotImplementedError

    def teardown(self) -> None:
        self.store.close()

    @rule(writes=st.dictionaries(_KEYS, st.none() | _VALUES, max_size=4))
    def write(self, writes: dict[str, bytes | None]) -> None:
        self.store.commit(expect={}, writes=writes)
        self._took(writes)

    @rule(
        keys=st.lists(_KEYS, max_size=3, unique=True),
        skew=st.integers(0, 1),
        writes=st.dictionaries(_KEYS, st.none() | _VALUES, max_size=3),
    )
    def write_if(self, keys: list[str], skew: int, writes: dict[str, bytes | None]) -> None:
        expect = {key: self.revisions.get(key, ABSENT) + skew for key in keys}
        if keys and skew:
            with pytest.raises(ConflictError):
                self.store.commit(expect=expect, writes=writes)
        else:
            self.store.commit(expect=expect, writes=writes)
            self._took(writes)

    @rule(prefix=_PREFIXES)
    def list_under(self, prefix: str) -> None:
        listed = [(record.key, record.value) for record in self.store.list(prefix)]
        assert listed == sorted(
            (key, value) for key, value in self.values.items() if key.startswith(prefix)
        )

    @invariant()
    def reads_agree(self) -> None:
        for record in self.store.list(""):
            assert self.values[record.key] == record.value
            assert self.revisions[record.key] == record.revision
            assert self.store.get(record.key) == record
        assert len(self.store.list("")) == len(self.values)

    def _took(self, writes: dict[str, bytes | None]) -> None:
        for key, value in writes.items():
            if value is None:
                self.values.pop(key, None)
                self.revisions.pop(key, None)
                continue
            record = self.store.get(key)
            assert record is not None
            assert record.revision > ABSENT
            assert (key, record.revision) not in self.spent
            self.spent.add((key, record.revision))
            self.values[key] = value
            self.revisions[key] = record.revision
