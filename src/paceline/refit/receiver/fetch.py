"""Getting a version's bytes: sizes are checked before memory is taken, hashes as bytes arrive.

``plan.sources`` decides who is asked for what; here it is done, measured and told.
"""

import hashlib
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from paceline.core.clock import Clock
from paceline.refit.errors import (
    FetchError,
    LyingSourceError,
    TransferCancelledError,
    VerifyError,
)
from paceline.refit.manifest.parse import MANIFEST_BYTES_MAX
from paceline.refit.manifest.signature import Statement, parse_signed, verify_signed
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import ObjectRange, Replica, Shard, WeightVersionShardManifest
from paceline.refit.plan.sources import (
    FetchState,
    Flight,
    Read,
    ReadPolicy,
    Source,
    all_chunks,
    choose_read,
    overdue_members,
)
from paceline.refit.receiver.payload import PayloadBuffer
from paceline.refit.receiver.sourcebook import SourceBook
from paceline.refit.receiver.swarm import Membership, Swarm
from paceline.refit.transports.address import split_addresses
from paceline.refit.transports.protocol import ObjectReader, Part, Terms, read_parts

WAIT_S = 0.02
"""For a read to end, before everything is looked at again."""
PROBLEMS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How a fetch behaves."""

    read_timeout_s: float = 20.0
    """For one manifest or one chunk of at most 64 MiB."""
    stall_timeout_s: float = 60.0
    """Without any chunk; then the fetch fails, and what is here is kept for the next try."""
    verify_key: Ed25519PublicKey | None = None
    """Whose signature a manifest must have; None takes what the control service names."""
    policy: ReadPolicy = field(default_factory=lambda: ReadPolicy(reads_max=1))
    """With ``reads_max`` 1 everything happens in the caller's thread, one read after another."""


@dataclass(slots=True, kw_only=True)
class FetchRecord:
    """What one fetch did: told with the installed version."""

    started_s: float
    seconds: float = 0.0
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    hedges: int = 0
    blamed: list[str] = field(default_factory=list)

    def to_fields(self) -> dict[str, object]:
        """Return the fields of an event."""
        return {
            "fetch_ms": self.seconds * 1000,
            "bytes_by_source": dict(self.bytes_by_source),
            "retries": self.retries,
            "hedges": self.hedges,
            "blamed": list(self.blamed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedManifest:
    """A manifest that is what the control service and the signature say, and its bytes."""

    manifest: Manifest
    data: bytes


class Fetcher:
    """Reads manifests and objects from whoever has them; remembers how sources behaved."""

    def __init__(
        self,
        reader: ObjectReader,
        *,
        clock: Clock,
        options: FetchOptions | None = None,
        swarm: Swarm | None = None,
    ) -> None:
        """Take what is needed for every version.

        Args:
            reader: moves bytes; proves nothing.
            clock: for deadlines and rates.
            options: patience, trust, how many reads at a time.
            swarm: to fetch from other receivers too, and to serve on; None reads from the
                advertised sources alone.
        """
        self._reader = reader
        self._clock = clock
        self._options = options or FetchOptions()
        self._swarm = swarm
        self._book = SourceBook()
        self._unfinished: tuple[str, PayloadBuffer] | None = None

    def fetch_manifest(
        self,
        sources: Sequence[Shard],
        *,
        expected: Statement | None = None,
        between_reads: Callable[[], None],
    ) -> FetchedManifest:
        """Return the manifest that the shards advertise, from one of them or from a replica.

        Args:
            sources: of one slot; at least one.
            expected: what the version's record says, for the signature.
            between_reads: called before each read; what it raises ends the fetch.

        Raises:
            FetchError: no source gave it.
            VerifyError: what came has another digest than advertised, breaks the format, or is
                not signed as it must be.
        """
        problems: list[FetchError | VerifyError] = []
        for source in self._in_turn(sources):
            between_reads()
            now_s = self._clock.monotonic()
            try:
                return self._read_manifest(source, sources[0].manifest_digest, expected)
            except FetchError as exc:
                self._book.note_failure(source.worker_id, now_s=now_s)
                problems.append(exc)
            except VerifyError as exc:
                self._book.blame(source.worker_id, now_s=now_s)
                problems.append(exc)
        raise _summed_up(problems)

    def fetch_objects(
        self,
        fetched: FetchedManifest,
        sources: Sequence[Shard],
        *,
        bytes_max: int,
        between_reads: Callable[[], None],
    ) -> tuple[Mapping[str, memoryview], FetchRecord]:
        """Return every object of a manifest, whole and proven chunk by chunk.

        A fetch that fails leaves what it has for the next one of the same manifest.

        Raises:
            FetchError: no source gave a chunk.
            VerifyError: the objects are larger than ``bytes_max``, or a chunk has another hash.
        """
        manifest = fetched.manifest
        total = sum(item.num_bytes for item in manifest.objects)
        if total > bytes_max:
            raise VerifyError(f"the payload is {total} bytes; at most {bytes_max} can be right")
        digest = hashlib.sha256(fetched.data).hexdigest()
        if self._unfinished is None or self._unfinished[0] != digest:
            self._unfinished = (digest, PayloadBuffer(manifest))
        payload = self._unfinished[1]
        run = _Run(
            self._reader,
            sources,
            payload,
            book=self._book,
            membership=self._join(fetched, sources[0], payload),
            parts=_RunParts(
                clock=self._clock,
                options=self._options,
                worker_id="" if self._swarm is None else self._swarm.worker_id,
                region="" if self._swarm is None else self._swarm.region,
                between_reads=between_reads,
            ),
        )
        run.fetch()
        self._unfinished = None
        return payload.objects(), run.record

    def keep_only(self, uids: frozenset[str]) -> None:
        """Stop serving versions that are not among these."""
        if self._swarm is not None:
            self._swarm.keep_only(uids)

    def rates(self) -> Mapping[str, float]:
        """Return bytes per second by source, as measured."""
        return self._book.rates()

    def _join(
        self, fetched: FetchedManifest, shard: Shard, payload: PayloadBuffer
    ) -> Membership | None:
        if self._swarm is None:
            return None
        return self._swarm.join(
            version_id=shard.version_id,
            source_slot_id=shard.source_slot_id,
            manifest=WeightVersionShardManifest(
                data=fetched.data,
                tensor_count=len(fetched.manifest.tensors),
                total_bytes=max(1, payload.num_bytes),
                transport=self._reader.transport,
            ),
            payload=payload,
        )

    def _in_turn(self, sources: Sequence[Shard]) -> Iterator[Shard | Replica]:
        """Yield who may have the manifest: who is well, other receivers, then the rest."""
        now_s = self._clock.monotonic()
        well = [each for each in sources if self._book.is_usable(each.worker_id, now_s=now_s)]
        yield from well
        if self._swarm is not None:
            first = sources[0]
            yield from self._swarm.find_replicas(
                first.version_id, source_slot_id=first.source_slot_id
            )
        yield from (each for each in sources if each not in well)

    def _read_manifest(
        self, source: Shard | Replica, digest: str, expected: Statement | None
    ) -> FetchedManifest:
        address = _address_for(self._reader, source.manifest_endpoint)
        data = self._reader.read_manifest(
            address, size_max=MANIFEST_BYTES_MAX, timeout_s=self._options.read_timeout_s
        )
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise VerifyError(
                f"the manifest at {address} has SHA-256 {found}, advertised was {digest}"
            )
        signed = parse_signed(data)
        if self._options.verify_key is not None and expected is not None:
            verify_signed(signed, expected=expected, key=self._options.verify_key)
        return FetchedManifest(manifest=signed.manifest, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunParts:
    clock: Clock
    options: FetchOptions
    worker_id: str
    region: str
    between_reads: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A read under way, and what became of it."""

    read: Read
    started_s: float
    ended_s: float = 0.0
    is_cancelled: bool = False
    error: FetchError | VerifyError | None = None
    crash: BaseException | None = None
    num_bytes: int = 0
    retries: int = 0
    is_first: bool = False
    """Its bytes are the ones that count."""


class _Run:
    """One fetch of one payload: reads are started, ended and noted in the caller's thread."""

    def __init__(
        self,
        reader: ObjectReader,
        sources: Sequence[Shard],
        payload: PayloadBuffer,
        *,
        book: SourceBook,
        membership: Membership | None,
        parts: _RunParts,
    ) -> None:
        self._reader = reader
        self._payload = payload
        self._book = book
        self._membership = membership
        self._parts = parts
        self._clock = parts.clock
        self._policy = parts.options.policy
        self._addresses = {shard.worker_id: shard.manifest_endpoint for shard in sources}
        self._origins = tuple(self._addresses)
        self._flights: list[_Flight] = []
        self._ended: queue.SimpleQueue[_Flight] = queue.SimpleQueue()
        self._problems: list[FetchError | VerifyError] = []
        self._progressed_s = self._clock.monotonic()
        self._given_up: frozenset[str] = frozenset()
        self._is_inline = self._policy.reads_max == 1
        self._pool = (
            None
            if self._is_inline
            else ThreadPoolExecutor(self._policy.reads_max, thread_name_prefix="fetch")
        )
        self.record = FetchRecord(started_s=self._progressed_s)

    def fetch(self) -> None:
        """Return when every chunk is here. Raises as fetch_objects does."""
        try:
            self._forgive_if_alone()
            while not self._payload.is_complete:
                state = self._look()
                self._give_up(overdue_members(state))
                read = choose_read(state)
                if read is None and not state.flights and not self._may_wait(state):
                    raise _summed_up(self._problems)
                self._parts.between_reads()
                if read is not None:
                    self._start(read)
                if read is None or self._is_inline:
                    self._settle()
        finally:
            self._end()
        if self._membership is not None:
            self._membership.others(rates=self._book.rates())

    def _forgive_if_alone(self) -> None:
        """Try whoever failed or lied before, if there is nobody else: every byte is proven."""
        if not self._look().sources:
            self._book.forgive(self._addresses)

    def _give_up(self, names: frozenset[str]) -> None:
        """Wait no more for these to bring what is missing; the rest share it out anew."""
        if names:
            self._given_up |= names
            self._progressed_s = self._clock.monotonic()

    def _look(self) -> FetchState:
        """Return what is known now."""
        now_s = self._clock.monotonic()
        others: Sequence[Replica] = ()
        members: Sequence[str] = ()
        if self._membership is not None:
            others = self._membership.others(rates=self._book.rates())
            waited_for = [
                name
                for name in self._membership.members()
                if name not in self._given_up and self._book.is_usable(name, now_s=now_s)
            ]
            members = sorted([*waited_for, self._parts.worker_id])
        self._addresses |= {each.worker_id: each.manifest_endpoint for each in others}
        count = len(self._payload.chunks)
        origins = [
            Source(
                worker_id=name,
                chunks=all_chunks(count),
                is_origin=True,
                rate=self._book.rate_of(name),
            )
            for name in self._origins
        ]
        found = [*origins, *(self._source_of(each, count) for each in others)]
        return FetchState(
            worker_id=self._parts.worker_id,
            num_chunks=count,
            have=self._payload.have,
            sources=tuple(
                each
                for each in found
                if each.chunks and self._book.is_usable(each.worker_id, now_s=now_s)
            ),
            members=tuple(members),
            region=self._parts.region,
            flights=tuple(
                Flight(
                    chunk=each.read.chunk,
                    worker_id=each.read.worker_id,
                    elapsed_s=now_s - each.started_s,
                )
                for each in self._flights
            ),
            stalled_s=now_s - self._progressed_s,
            chunk_bytes=self._payload.chunks[0].size if count else 1,
            policy=self._policy,
        )

    def _source_of(self, replica: Replica, count: int) -> Source:
        has = all_chunks(count)
        if not replica.is_complete:
            has &= int.from_bytes(replica.chunks, "little")
        return Source(
            worker_id=replica.worker_id,
            chunks=has if replica.manifest_endpoint else 0,
            region=replica.region,
            load=replica.load,
            rate=self._book.rate_of(replica.worker_id),
        )

    def _may_wait(self, state: FetchState) -> bool:
        """Say whether others may still bring what is missing, though there is nothing to read.

        Raises:
            FetchError: that has lasted too long.
        """
        if self._is_inline or not (state.sources or len(state.members) > 1):
            return False
        if state.stalled_s <= self._parts.options.stall_timeout_s:
            return True
        self._problems.append(
            FetchError(f"no chunk has come for {state.stalled_s:.0f} s; it is tried again later")
        )
        return False

    def _start(self, read: Read) -> None:
        flight = _Flight(read=read, started_s=self._clock.monotonic())
        self._flights.append(flight)
        self.record.hedges += read.is_hedge
        if self._pool is None:
            self._fly(flight)
        else:
            self._pool.submit(self._fly, flight)

    def _fly(self, flight: _Flight) -> None:
        """Read one chunk, in any thread."""
        try:
            flight.num_bytes = self._read_chunk(flight)
        except (FetchError, VerifyError) as exc:
            flight.error = exc
        except TransferCancelledError:
            flight.is_cancelled = True
        except BaseException as exc:  # noqa: BLE001 - raised again in the caller's thread
            flight.crash = exc
        flight.ended_s = self._clock.monotonic()
        self._ended.put(flight)

    def _read_chunk(self, flight: _Flight) -> int:
        read = flight.read
        chunk = self._payload.chunks[read.chunk]
        # Memory of its own: another read of the same chunk may be faster, and this one may lie.
        target = memoryview(bytearray(chunk.size))
        if read.worker_id in self._origins:
            object_id, offset = chunk.item.object_id, chunk.offset
        else:
            object_id, offset = chunk.sha256, 0
        wanted = ObjectRange(object_id=object_id, offset=offset, size=chunk.size)
        address = _address_for(self._reader, self._addresses[read.worker_id])
        endpoint = self._reader.source_endpoint(address)
        done = read_parts(
            self._reader,
            endpoint,
            [Part(wanted=wanted, target=target)],
            Terms(
                timeout_s=self._parts.options.read_timeout_s,
                is_cancelled=lambda: flight.is_cancelled,
            ),
        )
        try:
            flight.is_first = self._payload.accept(read.chunk, target)
        except VerifyError as exc:
            raise LyingSourceError(
                f"{read.worker_id} at {endpoint}: {exc}", source=endpoint, wanted=wanted
            ) from exc
        flight.retries = done.retries
        return chunk.size

    def _settle(self) -> None:
        """Take in what has ended; wait a little if nothing has."""
        try:
            flight = self._ended.get(timeout=None if self._is_inline else WAIT_S)
        except queue.Empty:
            return
        while True:
            self._take_in(flight)
            try:
                flight = self._ended.get_nowait()
            except queue.Empty:
                return

    def _take_in(self, flight: _Flight) -> None:
        self._flights.remove(flight)
        if flight.crash is not None:
            raise flight.crash
        name, now_s = flight.read.worker_id, self._clock.monotonic()
        self.record.retries += flight.retries
        if flight.error is not None:
            self._problems.append(flight.error)
            self.record.retries += 1
            if isinstance(flight.error, VerifyError):
                self._book.blame(name, now_s=now_s)
                self.record.blamed.append(name)
            else:
                self._book.note_failure(name, now_s=now_s)
            return
        if not flight.num_bytes:
            return
        seconds = flight.ended_s - flight.started_s
        self._book.note_read(name, num_bytes=flight.num_bytes, seconds=seconds)
        sums = self.record.bytes_by_source
        sums[name] = sums.get(name, 0) + flight.num_bytes
        if flight.is_first:
            self._progressed_s = now_s
            if self._membership is not None:
                self._membership.offer(flight.read.chunk)
            for other in self._flights:
                other.is_cancelled |= other.read.chunk == flight.read.chunk

    def _end(self) -> None:
        for flight in self._flights:
            flight.is_cancelled = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self.record.seconds = self._clock.monotonic() - self.record.started_s


def _address_for(reader: ObjectReader, text: str) -> str:
    """Return the best of several addresses that this reader can use. Raises FetchError."""
    problem = FetchError("it advertises no address")
    for address in split_addresses(text):
        try:
            reader.source_endpoint(address)
        except FetchError as exc:
            problem = exc
        else:
            return address
    raise problem


def _summed_up(problems: Sequence[FetchError | VerifyError]) -> FetchError | VerifyError:
    """Return one error for all that went wrong."""
    if len(problems) == 1:
        return problems[0]
    if not problems:
        return FetchError("every source is left alone for now after it failed; try again later")
    shown = "; ".join(map(str, problems[-PROBLEMS_SHOWN:]))
    if all(isinstance(problem, VerifyError) for problem in problems):
        return VerifyError(f"no source answered rightly: {shown}")
    return FetchError(f"no source answered rightly: {shown}")
