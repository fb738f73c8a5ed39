"""Ranges out of a bucket, several requests at a time."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from paceline.core.clock import Clock
from paceline.refit.errors import FetchError, TransferCancelledError
from paceline.refit.transports.address import MANIFESTS
from paceline.refit.transports.objectstore.bucket import Bucket
from paceline.refit.transports.objectstore.server import key_of_object
from paceline.refit.transports.protocol import Part, ReadPlan, Terms, TransferRecord

_STREAMS = 8
"""Requests at a time; together with the size of a part this bounds the memory of a read."""
_LOOK_UP_S = 0.1


class BucketObjectReader:
    """Reads what BucketObjectServer wrote, from one bucket."""

    def __init__(self, bucket: Bucket, *, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock
        self._pool = ThreadPoolExecutor(2 * _STREAMS, thread_name_prefix="paceline-bucket")

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        return "objectstore"

    def plan_read(self, endpoint: str, parts: Sequence[Part], *, timeout_s: float) -> ReadPlan:
        """Plan without I/O. Raises FetchError for another bucket than ours."""
        if endpoint != self._bucket.url:
            raise FetchError(
                f"{endpoint!r} is another bucket than {self._bucket.url}, which this process was "
                "given",
                source=endpoint,
            )
        return _BucketRead(self._bucket, parts, self._pool, self._clock)

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return the manifest at an address. Raises FetchError."""
        url = self.source_endpoint(address)
        key = address.removeprefix(url + "/")
        reading = self._pool.submit(self._bucket.read, key, size_max=size_max)
        try:
            data = reading.result(timeout=timeout_s)
        except TimeoutError as exc:
            raise FetchError(f"{address}: no answer in {timeout_s:g} s", source=url) from exc
        if data is None:
            raise FetchError(f"{address} is not there (any more)", source=url)
        return data

    def source_endpoint(self, address: str) -> str:
        """Return the bucket's URL; no I/O. Raises FetchError for an address of another one."""
        if not address.startswith(self._bucket.url + MANIFESTS):
            raise FetchError(f"{address[:200]!r} is no manifest in {self._bucket.url}")
        return self._bucket.url

    def close(self) -> None:
        """Start nothing more; idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _BucketRead:
    """Signs ReadPlan."""

    def __init__(
        self, bucket: Bucket, parts: Sequence[Part], pool: ThreadPoolExecutor, clock: Clock
    ) -> None:
        self._bucket = bucket
        self._parts = tuple(parts)
        self._pool = pool
        self._clock = clock

    @property
    def source(self) -> str:
        return self._bucket.url

    @property
    def num_bytes(self) -> int:
        return sum(part.wanted.size for part in self._parts)

    def run(self, terms: Terms) -> TransferRecord:
        """Ask for several parts at a time; only this thread writes into targets."""
        started = self._clock.monotonic()
        waiting = deque(enumerate(self._parts))
        asked: dict[Future[memoryview], int] = {}
        try:
            while waiting or asked:
                self._ask(waiting, asked, terms)
                done, _ = wait(asked, timeout=_LOOK_UP_S, return_when=FIRST_COMPLETED)
                self._check(terms, started, asked)
                for future in done:
                    self._take(future, asked.pop(future), terms)
        finally:
            for future in asked:
                future.cancel()
        seconds = self._clock.monotonic() - started
        return TransferRecord(
            transport="objectstore",
            source=self.source,
            num_bytes=self.num_bytes,
            seconds=seconds,
            stages={"move": seconds},
        )

    def close(self) -> None:
        """Nothing is held between runs."""

    def _ask(
        self, waiting: deque[tuple[int, Part]], asked: dict[Future[memoryview], int], terms: Terms
    ) -> None:
        while waiting and len(asked) < _STREAMS and not terms.is_cancelled():
            index, part = waiting.popleft()
            wanted = part.wanted
            if not wanted.size:
                terms.on_part(index)
                continue
            stop = wanted.offset + wanted.size
            key = key_of_object(wanted.object_id)
            asked[self._pool.submit(self._bucket.read_range, key, wanted.offset, stop)] = index

    def _check(self, terms: Terms, started: float, asked: dict[Future[memoryview], int]) -> None:
        if terms.is_cancelled():
            raise TransferCancelledError(f"reading from {self.source} was cancelled")
        if asked and self._clock.monotonic() - started > terms.timeout_s:
            raise self._failure(next(iter(asked.values())), f"not done after {terms.timeout_s:g} s")

    def _take(self, future: Future[memoryview], index: int, terms: Terms) -> None:
        try:
            data = future.result()
        except FetchError as exc:
            raise self._failure(index, str(exc)) from exc
        self._parts[index].target[:] = data
        terms.on_part(index)

    def _failure(self, index: int, why: str) -> FetchError:
        wanted = self._parts[index].wanted
        return FetchError(f"{wanted} in {self.source}: {why}", source=self.source, wanted=wanted)
