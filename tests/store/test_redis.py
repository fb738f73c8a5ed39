"""The shared store keeps the contract over a real Redis, by Redis's clock, through its restarts."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.clock import Clock
from paceline.store.protocol import ABSENT, ConflictError, StoreError
from paceline.store.redis import RedisStore
from paceline.system import system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.store import StoreContract
from paceline.testing.redis_server import NEEDS, RedisServer, redis_program

pytestmark = pytest.mark.skipif(redis_program() is None, reason=NEEDS)

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    yield made
    made.stop()


def open_store(server: RedisServer, clock: Clock | None = None, prefix: str = "") -> RedisStore:
    return RedisStore(
        server.url,
        steady=system_clock(),
        clock=clock,
        prefix=prefix or f"t{next(_NUMBERS)}",
        timeout_s=2.0,
    )


class TestRedisStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self._redis = server

    def make(self, clock: Clock) -> RedisStore:
        return open_store(self._redis, clock)


def test_redis_decides_the_time(server: RedisServer) -> None:
    """Whatever this computer's clock says, two stores on one Redis agree within moments."""
    first, second = open_store(server), open_store(server)
    times = [first.now_ms(), second.now_ms(), first.now_ms()]
    assert max(times) - min(times) < 5000
    assert times[2] >= times[0]
    first.close()
    second.close()


def test_a_decision_made_at_another_time_is_made_again(server: RedisServer) -> None:
    """A store that carried the time forward wrongly is told so by its next commit, once."""
    steady = FakeClock()
    store = RedisStore(server.url, steady=steady, prefix="skewed")
    before = store.now_ms()
    steady.advance(0.9)
    with pytest.raises(ConflictError, match="clock moved"):
        store.commit(expect={}, writes={"a": b"1"})
    assert store.get("a") is None
    assert abs(store.now_ms() - before) < 5000
    store.commit(expect={"a": ABSENT}, writes={"a": b"1"})
    store.close()


def test_a_group_that_rests_on_what_moved_is_refused_whole(server: RedisServer) -> None:
    """Another replica's commit between reading and leaving undoes every commit of the group."""
    prefix = f"t{next(_NUMBERS)}"
    one, other = open_store(server, prefix=prefix), open_store(server, prefix=prefix)
    one.commit(expect={}, writes={"a": b"1"})

    def overtaken() -> None:
        with one.group():
            one.prefetch(["a", "b"])
            found = one.get("a")
            assert found is not None
            other.commit(expect={}, writes={"a": b"2"})
            one.commit(expect={"b": ABSENT}, writes={"b": b"1"})
            one.commit(expect={"a": found.revision}, writes={"a": b"3"})

    with pytest.raises(ConflictError, match="a: expected"):
        overtaken()
    assert [(r.key, r.value) for r in other.list("")] == [("a", b"2")]
    one.close()
    other.close()


def test_replicas_race_and_nothing_is_lost(server: RedisServer) -> None:
    """Counters raised from several stores at once add up."""
    prefix = f"t{next(_NUMBERS)}"

    def raise_often() -> None:
        store = open_store(server, prefix=prefix)
        for _ in range(25):
            while True:
                found = store.get("n")
                value = b"%d" % (int(found.value) + 1 if found else 1)
                try:
                    store.commit(
                        expect={"n": found.revision if found else ABSENT}, writes={"n": value}
                    )
                except ConflictError:
                    continue
                break
        store.close()

    threads = [threading.Thread(target=raise_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = open_store(server, prefix=prefix)
    found = store.get("n")
    assert found is not None
    assert found.value == b"100"
    store.close()


def test_a_redis_that_is_gone_is_a_store_error_and_one_that_is_back_is_used(
    tmp_path: Path,
) -> None:
    """While it is down every call says so without the URL's password; afterwards all is there."""
    server = RedisServer(tmp_path, durable=True)
    store = open_store(server)
    store.commit(expect={}, writes={"a": b"1"})
    server.kill()
    with pytest.raises(StoreError, match="does not answer"):
        store.get("a")
    with pytest.raises(StoreError, match="does not answer"):
        store.commit(expect={}, writes={"b": b"2"})
    server.start()
    found = store.get("a")
    assert found is not None
    assert found.value == b"1"
    store.close()
    server.stop()
    with pytest.raises(StoreError) as caught:
        RedisStore("redis://user:secret@127.0.0.1:1/0", steady=system_clock())
    assert "secret" not in str(caught.value)


def test_a_redis_that_throws_records_away_is_refused(server: RedisServer) -> None:
    """An eviction policy would lose acknowledged writes; the message names the remedy."""
    import redis

    make: Any = redis.Redis
    client = make(port=server.port)
    client.config_set("maxmemory", "100mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StoreError, match="maxmemory-policy noeviction"):
            open_store(server)
    finally:
        client.config_set("maxmemory", "0")
        client.config_set("maxmemory-policy", "noeviction")
        client.close()
