"""The shared store: one Redis for several replicas of a service, which then behave as one.

Every commit is one Lua script, so it is atomic, and Redis runs them one after the other. Three
keys hold everything, with a hash tag so that a cluster keeps them together:

- ``records``, a hash: our key -> revision, a line feed, the value;
- ``keys``, a sorted set of our keys with equal scores: ordered by bytes, so by code points;
- ``counter``: hands out revisions for all keys, so that none returns after a delete.

Redis's clock alone decides what time it is. Every reply brings it along; between replies it is
carried forward by this process's steady clock, and a commit whose idea of the time is off by
more than half a second is refused as a conflict, to be decided again.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.core.clock import Clock
from paceline.store.protocol import ABSENT, ConflictError, Record, StoreError

TIMEOUT_S: Final = 5.0
DRIFT_MS_MAX: Final = 500
RESYNC_S: Final = 1.0
"""How long the time may be carried forward without asking."""

_SCHEMA: Final = b"paceline-store-1"

_NOW: Final = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

_COMMIT: Final = (
    _NOW
    + """
if tonumber(ARGV[1]) > 0 and math.abs(now - tonumber(ARGV[1])) > tonumber(ARGV[2]) then
  return {now, 'time', '', ''}
end
local at = 4
for _ = 1, tonumber(ARGV[3]) do
  local found = redis.call('HGET', KEYS[1], ARGV[at])
  local revision = '0'
  if found then revision = string.match(found, '^%d+') end
  if revision ~= ARGV[at + 1] then
    return {now, 'moved', ARGV[at], revision}
  end
  at = at + 2
end
if at > #ARGV then return {now, 'ok', '', ''} end
local revision = redis.call('INCR', KEYS[3])
while at <= #ARGV do
  if ARGV[at + 1] == '1' then
    redis.call('HSET', KEYS[1], ARGV[at], string.format('%d\\n', revision) .. ARGV[at + 2])
    redis.call('ZADD', KEYS[2], 0, ARGV[at])
  else
    redis.call('HDEL', KEYS[1], ARGV[at])
    redis.call('ZREM', KEYS[2], ARGV[at])
  end
  at = at + 3
end
return {now, 'ok', '', ''}
"""
)

_LIST: Final = (
    _NOW
    + """
local keys = redis.call('ZRANGEBYLEX', KEYS[2], ARGV[1], ARGV[2])
local values = {}
for first = 1, #keys, 1000 do
  local part = redis.call('HMGET', KEYS[1], unpack(keys, first, math.min(first + 999, #keys)))
  for _, value in ipairs(part) do values[#values + 1] = value end
end
return {now, keys, values}
"""
)


class RedisStore:
    """Records in one Redis; what a commit wrote is as durable as that Redis is configured."""

    def __init__(
        self,
        url: str,
        *,
        steady: Clock,
        clock: Clock | None = None,
        prefix: str = "paceline",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Connect.

        Args:
            url: ``redis://[USER:PASSWORD@]HOST:PORT/DB``, ``rediss://`` for TLS, or ``unix://``.
            steady: carries Redis's time forward between replies.
            clock: decides the time instead of Redis; for tests.
            prefix: of the three keys, so that several stores fit into one database.
            timeout_s: of connecting and of one command.

        Raises:
            StoreError: unreachable, refused, or configured to throw records away.
        """
        self._steady, self._clock = steady, clock
        # Held through a group, in which this thread goes on reading and committing.
        self._lock = threading.RLock()
        self._group: _Group | None = None
        self._synced: tuple[float, int] | None = None
        self._closed = False
        self._keys = [f"{{{prefix}}}:{name}" for name in ("records", "keys", "counter")]
        with _our_errors():
            self._redis = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                # A commit that was sent twice would meet itself: who calls decides again.
                retry=Retry(NoBackoff(), 0),
            )
            self._commit = self._redis.register_script(_COMMIT)
            self._list = self._redis.register_script(_LIST)
            try:
                self._check(prefix)
            except BaseException:
                self._redis.close()
                raise

    def now_ms(self) -> int:
        """Return Redis's Unix milliseconds, asked for at most a second ago."""
        if self._clock is not None:
            return int(self._clock.time() * 1000)
        synced = self._synced
        now_s = self._steady.monotonic()
        if synced is None or now_s - synced[0] > RESYNC_S:
            with self._use() as client:
                seconds, micros = client.time()
            synced = self._sync(seconds * 1000 + micros // 1000)
        return synced[1] + int((now_s - synced[0]) * 1000) if now_s > synced[0] else synced[1]

    def get(self, key: str) -> Record | None:
        """Return the record, or None."""
        with self._lock:
            if self._group is None:
                return self._get(key)
            if key not in self._group.seen:
                self._group.seen[key] = self._get(key)
            return self._group.seen[key]

    def _get(self, key: str) -> Record | None:
        with self._use() as client:
            found = client.hget(self._keys[0], _key_bytes(key))
        return None if found is None else _record(key, found)

    def list(self, prefix: str) -> Sequence[Record]:
        """Return all records under ``prefix``, sorted by key, as one snapshot."""
        start = prefix.encode()
        # UTF-8 never holds a byte 0xff.
        low, high = (b"[" + start, b"(" + start + b"\xff") if start else (b"-", b"+")
        with self._use():
            now_ms, keys, values = self._list(keys=self._keys, args=[low, high])
        self._sync(now_ms)
        pairs = zip(keys, values, strict=True)
        found = {key.decode(): _record(key.decode(), value) for key, value in pairs}
        with self._lock:
            return list(found.values()) if self._group is None else self._group.over(found, prefix)

    def commit(self, *, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        """Write everything or nothing.

        Raises StoreError also if the connection broke while Redis was at it; then the commit
        may have taken effect, as after every lost reply.
        """
        with self._lock:
            if self._group is not None:
                self._group.commit(expect, writes)
                return
        self._send(expect, writes)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Send the commits inside to Redis as one, when it is left.

        Raises ConflictError at the end if another replica moved one of the records that they
        rest on: nothing took effect, and all of it is to be decided again.
        """
        with self._lock:
            group = self._group = _Group()
            try:
                yield
            finally:
                self._group = None
            if group.writes:
                self._send(group.expect, group.writes)

    def prefetch(self, keys: Sequence[str]) -> None:
        """Read these for the group that is open, in one round trip."""
        with self._lock:
            if self._group is None or not keys:
                return
            wanted = list(dict.fromkeys(keys))
            with self._use() as client:
                found = client.hmget(self._keys[0], [_key_bytes(key) for key in wanted])
            for key, value in zip(wanted, found, strict=True):
                self._group.seen[key] = None if value is None else _record(key, value)

    def _send(self, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        time_ms = 0 if self._clock is not None else self.now_ms()
        args: list[Any] = [time_ms, DRIFT_MS_MAX, len(expect)]
        for key, revision in expect.items():
            args += [_key_bytes(key), revision]
        for key, value in writes.items():
            args += [_key_bytes(key), *((b"0", b"") if value is None else (b"1", value))]
        with self._use():
            now_ms, outcome, moved, found = self._commit(keys=self._keys, args=args)
        self._sync(now_ms)
        if outcome == b"time":
            raise ConflictError(f"the store's clock moved by {now_ms - time_ms} ms; read again")
        if outcome != b"ok":
            key, at = moved.decode(), int(found)
            raise ConflictError(
                f"{key}: expected revision {expect.get(key, ABSENT)}, found {at}; read it again"
            )

    def close(self) -> None:
        """Give the connections back; idempotent."""
        self._closed = True
        self._redis.close()

    def _check(self, prefix: str) -> None:
        """Raise StoreError unless this Redis keeps what it is given, in the form that we know."""
        memory = self._redis.info("memory")
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory", 0) and policy != "noeviction":
            raise StoreError(
                f"this Redis throws records away when it is full (maxmemory-policy {policy}); "
                "set maxmemory-policy noeviction"
            )
        name = f"{{{prefix}}}:schema"
        self._redis.set(name, _SCHEMA, nx=True)
        found = self._redis.get(name)
        if found != _SCHEMA:
            raise StoreError(
                f"{name} in this Redis is {found!r}, not {_SCHEMA!r}; use the Paceline that wrote "
                "it, or another database number"
            )

    def _sync(self, now_ms: int) -> tuple[float, int]:
        synced = (self._steady.monotonic(), now_ms)
        self._synced = synced
        return synced

    @contextlib.contextmanager
    def _use(self) -> Iterator["redis.Redis"]:
        if self._closed:
            raise StoreError("the store is closed; open it again before using it")
        with _our_errors():
            yield self._redis


_PENDING = itertools.count(-1, -1)
"""Revisions of what a group has not sent yet; none is ever used twice in a process."""


class _Group:
    """What a group has read, and what it will write."""

    def __init__(self) -> None:
        self.seen: dict[str, Record | None] = {}
        self.expect: dict[str, int] = {}
        self.writes: dict[str, bytes | None] = {}

    def over(self, found: Mapping[str, Record], prefix: str) -> Sequence[Record]:
        """Return listed records as this group has left them."""
        merged: dict[str, Record | None] = {**found, **_under(self.seen, prefix)}
        return [record for _, record in sorted(merged.items()) if record is not None]

    def commit(self, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        """Take a commit in; what it rests on is checked by Redis at the end. Raises ConflictError.

        A record that this group read or wrote is checked here, against that.
        """
        for key, revision in expect.items():
            if key in self.seen:
                found = self.seen[key]
                at = ABSENT if found is None else found.revision
                if at != revision:
                    raise ConflictError(f"{key}: expected revision {revision}, found {at}")
        for key, revision in expect.items():
            if key not in self.writes:
                self.expect.setdefault(key, revision)
        for key, value in writes.items():
            self.writes[key] = value
            self.seen[key] = (
                None if value is None else Record(key=key, value=value, revision=next(_PENDING))
            )


def _under(seen: Mapping[str, Record | None], prefix: str) -> dict[str, Record | None]:
    return {key: record for key, record in seen.items() if key.startswith(prefix)}


def _key_bytes(key: str) -> bytes:
    return key.encode()


def _record(key: str, found: Any) -> Record:
    revision, _, value = bytes(found).partition(b"\n")
    return Record(key=key, value=value, revision=int(revision))


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    """Turn what the client raises into StoreError, in this one place; never shows the URL."""
    try:
        yield
    except redis.exceptions.AuthenticationError as exc:
        raise StoreError("Redis refused the user or password of the store's URL") from exc
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as exc:
        raise StoreError(
            f"Redis does not answer ({type(exc).__name__}); check that it runs and is reachable"
        ) from exc
    except redis.exceptions.RedisError as exc:
        raise StoreError(f"Redis refused a command: {exc}") from exc
    except ValueError as exc:
        # Without the client's own words: they may quote the password.
        raise StoreError("the store's URL is no Redis URL; write redis://HOST:PORT/DB") from exc
