"""Fetching a payload from everybody who has it, chunk by chunk, and serving it on meanwhile.

``plan.sources`` decides who is asked for what; here it is done, measured and told. What was
proven stays when a fetch fails, for the next one of the same manifest.
"""

import hashlib
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from paceline.refit.errors import (
    FetchError,
    LyingSourceError,
    NoRoomError,
    TransferCancelledError,
    VerifyError,
)
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
    mask_of,
    overdue_members,
)
from paceline.refit.receiver.payload import PayloadBuffer
from paceline.refit.receiver.sourcebook import SourceBook
from paceline.refit.receiver.spool import Spool
from paceline.refit.receiver.swarm import Membership, Swarm
from paceline.refit.receiver.transfers import joined
from paceline.refit.transports.protocol import (
    ObjectReader,
    Part,
    Terms,
    TransferRecord,
    read_parts,
)

WAIT_S = 0.02
"""For a read to end, before everything is looked at again."""
PROBLEMS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadOptions:
    """How a receiver reads from many."""

    stall_timeout_s: float = 60.0
    """Without any chunk; then the fetch fails."""
    policy: ReadPolicy = field(default_factory=ReadPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One payload that is wanted, and what its fetch works with."""

    manifest: Manifest
    manifest_data: bytes
    """As it is served on."""
    sources: tuple[Shard, ...]
    """Of one slot; at least one."""
    reader: ObjectReader
    spool: Spool
    read_timeout_s: float
    between_reads: Callable[[], None]
    on_record: Callable[[TransferRecord], None]


class Spread:
    """Fetches one payload after another; remembers how sources behaved."""

    def __init__(self, swarm: Swarm, options: SpreadOptions | None = None) -> None:
        """Take the swarm; it stays the caller's."""
        self.swarm = swarm
        self._clock = swarm.clock
        self._options = options or SpreadOptions()
        self._book = SourceBook()
        self._unfinished: tuple[str, PayloadBuffer] | None = None
        self._had_company = True
        """Others fetched the last payload too, or nothing was fetched yet."""

    def fetch(self, order: Order) -> dict[str, memoryview]:
        """Return every object of a manifest, whole and proven chunk by chunk.

        Raises:
            FetchError: no source gave a chunk, or there is no room for them.
            VerifyError: every source sent other bytes.
        """
        digest = hashlib.sha256(order.manifest_data).hexdigest()
        if self._unfinished is None or self._unfinished[0] != digest:
            self._unfinished = None  # its memory first
            self._unfinished = (digest, PayloadBuffer(order.manifest, order.spool))
        payload = self._unfinished[1]
        membership = self.swarm.join(
            version_id=order.sources[0].version_id,
            source_slot_id=order.sources[0].source_slot_id,
            manifest=WeightVersionShardManifest(
                data=order.manifest_data,
                tensor_count=len(order.manifest.tensors),
                total_bytes=max(1, payload.num_bytes),
                transport=order.reader.transport,
            ),
            payload=payload,
        )
        run = _Run(
            order,
            payload,
            membership,
            swarm=self.swarm,
            book=self._book,
            options=self._options,
        )
        if not self._had_company:
            run.landed = self._options.policy.far_reads_max
        run.fetch()
        self._had_company = bool(membership.others(rates=self._book.rates()))
        self._unfinished = None
        return dict(payload.objects())

    def in_turn(self, sources: Sequence[Shard]) -> Iterator[Shard | Replica]:
        """Yield who may have the manifest: who is well, other receivers, then the rest."""
        now_s = self._clock.monotonic()
        well = [each for each in sources if self._book.is_usable(each.worker_id, now_s=now_s)]
        yield from well
        first = sources[0]
        yield from self.swarm.find_replicas(first.version_id, source_slot_id=first.source_slot_id)
        yield from (each for each in sources if each not in well)

    def note_problem(self, worker_id: str, problem: FetchError | VerifyError) -> None:
        """Remember who failed or lied."""
        self._book.note_problem(worker_id, problem, now_s=self._clock.monotonic())

    def keep_only(self, uids: frozenset[str]) -> None:
        """Stop serving versions that are not among these."""
        self.swarm.keep_only(uids)

    def rates(self) -> Mapping[str, float]:
        """Return bytes per second by source, as measured."""
        return self._book.rates()


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A read under way, and what became of it."""

    read: Read
    started_s: float
    ended_s: float = 0.0
    is_cancelled: bool = False
    error: FetchError | VerifyError | None = None
    crash: BaseException | None = None
    done: TransferRecord | None = None
    is_first: bool = False
    """Its bytes are the ones that count."""

    def seen_at(self, now_s: float) -> Flight:
        """Return it as the plan sees it."""
        elapsed_s = now_s - self.started_s
        return Flight(chunk=self.read.chunk, worker_id=self.read.worker_id, elapsed_s=elapsed_s)


class _Run:
    """One fetch of one payload: reads are started, ended and noted in the caller's thread."""

    def __init__(
        self,
        order: Order,
        payload: PayloadBuffer,
        membership: Membership,
        *,
        swarm: Swarm,
        book: SourceBook,
        options: SpreadOptions,
    ) -> None:
        self._order = order
        self._payload = payload
        self._membership = membership
        self._swarm = swarm
        self._book = book
        self._options = options
        self._clock = swarm.clock
        self._addresses = {each.worker_id: each.manifest_endpoint for each in order.sources}
        self._origins = tuple(self._addresses)
        self._regions: dict[str, str] = {}
        self._flights: list[_Flight] = []
        self._ended: queue.SimpleQueue[_Flight] = queue.SimpleQueue()
        self._problems: list[FetchError | VerifyError] = []
        self._records: dict[str, TransferRecord] = {}
        self._progressed_s = self._clock.monotonic()
        self._given_up: frozenset[str] = frozenset()
        self._taken_in = payload.have
        """A read tells of its chunk some time after the chunk is here."""
        self.landed = 0
        """Reads from far away that went well: there is room for one more for each."""
        self._pool = ThreadPoolExecutor(options.policy.reads_max, thread_name_prefix="fetch")

    def fetch(self) -> None:
        """Return when every chunk is here. Raises as Spread.fetch does."""
        try:
            self._forgive_if_alone()
            while not (self._payload.is_complete and self._is_taken_in()):
                state = self._look()
                self._give_up(overdue_members(state))
                read = choose_read(state)
                if read is None and not state.flights and not self._may_wait(state):
                    raise _summed_up(self._problems)
                self._order.between_reads()
                if read is None:
                    self._settle()
                else:
                    self._start(read)
        finally:
            self._end()

    def _is_taken_in(self) -> bool:
        """Say whether every chunk that is here was offered to the others, or could not be."""
        return self._taken_in == self._payload.have

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
        self._membership.coming = mask_of(
            flight.read.chunk for flight in self._flights if self._is_far(flight.read.worker_id)
        )
        others = self._membership.others(rates=self._book.rates())
        self._addresses |= {each.worker_id: each.manifest_endpoint for each in others}
        self._regions |= {each.worker_id: each.region for each in others}
        found = [*self._origin_sources(others), *map(self._source_of, others)]
        chunks = self._payload.chunks
        members = self._members(now_s)
        coming = 0
        for each in members:
            coming |= int.from_bytes(each.coming, "little")
        return FetchState(
            worker_id=self._swarm.worker_id,
            num_chunks=len(chunks),
            have=self._payload.have,
            sources=tuple(
                each
                for each in found
                if each.chunks and self._book.is_usable(each.worker_id, now_s=now_s)
            ),
            members=tuple(sorted([self._swarm.worker_id, *(each.worker_id for each in members)])),
            coming=coming,
            landed=self.landed,
            region=self._swarm.region,
            flights=tuple(each.seen_at(now_s) for each in self._flights),
            stalled_s=now_s - self._progressed_s,
            chunk_bytes=chunks[0].size if chunks else 1,
            policy=self._options.policy,
        )

    def _members(self, now_s: float) -> Sequence[Replica]:
        """Return who shares the far chunks out with this receiver: who may be waited for."""
        return [
            each
            for each in self._membership.members()
            if each.worker_id not in self._given_up
            and self._book.is_usable(each.worker_id, now_s=now_s)
        ]

    def _is_far(self, name: str) -> bool:
        return name in self._origins or self._regions.get(name) != self._swarm.region

    def _origin_sources(self, others: Sequence[Replica]) -> Sequence[Source]:
        """Return the advertised sources; what others measured stands in for one's own figures."""
        told = {worker_id: rate for each in others for worker_id, rate in each.rates}
        return [
            Source(
                worker_id=name,
                chunks=all_chunks(len(self._payload.chunks)),
                is_origin=True,
                rate=self._book.rate_of(name) or told.get(name),
            )
            for name in self._origins
        ]

    def _source_of(self, replica: Replica) -> Source:
        has = all_chunks(len(self._payload.chunks))
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
        """Say whether others may still bring what is missing, though there is nothing to read."""
        if not state.sources and len(state.members) < 2:  # noqa: PLR2004 - this receiver alone
            return False
        if state.stalled_s <= self._options.stall_timeout_s:
            return True
        self._problems.append(
            FetchError(f"no chunk has come for {state.stalled_s:.0f} s; it is tried again later")
        )
        return False

    def _start(self, read: Read) -> None:
        flight = _Flight(read=read, started_s=self._clock.monotonic())
        self._flights.append(flight)
        self._pool.submit(self._fly, flight)

    def _fly(self, flight: _Flight) -> None:
        """Read one chunk, in a thread of the pool."""
        try:
            self._read_chunk(flight)
        except NoRoomError as exc:  # nobody's fault
            flight.crash = exc
        except (FetchError, VerifyError) as exc:
            flight.error = exc
        except TransferCancelledError:
            flight.is_cancelled = True
        except BaseException as exc:  # noqa: BLE001 - raised again in the caller's thread
            flight.crash = exc
        flight.ended_s = self._clock.monotonic()
        self._ended.put(flight)

    def _read_chunk(self, flight: _Flight) -> None:
        read, reader = flight.read, self._order.reader
        chunk = self._payload.chunks[read.chunk]
        # Memory of its own: another read of the same chunk may be faster, and this one may lie.
        target = memoryview(bytearray(chunk.size))
        # Receivers serve each chunk as an object, long before they have the object it is of.
        is_origin = read.worker_id in self._origins
        wanted = ObjectRange(
            object_id=chunk.item.object_id if is_origin else chunk.sha256,
            offset=chunk.offset if is_origin else 0,
            size=chunk.size,
        )
        endpoint = reader.source_endpoint(self._addresses[read.worker_id])
        terms = Terms(
            timeout_s=self._order.read_timeout_s, is_cancelled=lambda: flight.is_cancelled
        )
        done = read_parts(reader, endpoint, [Part(wanted=wanted, target=target)], terms)
        try:
            flight.is_first = self._payload.accept(read.chunk, target)
        except VerifyError as exc:
            raise LyingSourceError(
                f"{read.worker_id} at {endpoint} is to be avoided: {exc}",
                source=endpoint,
                wanted=wanted,
            ) from exc
        flight.done = done

    def _settle(self) -> None:
        """Take in what has ended; wait a little if nothing has."""
        try:
            flight = self._ended.get(timeout=WAIT_S)
            while True:
                self._take_in(flight)
                flight = self._ended.get_nowait()
        except queue.Empty:
            return

    def _take_in(self, flight: _Flight) -> None:
        self._flights.remove(flight)
        if flight.crash is not None:
            raise flight.crash
        name, now_s = flight.read.worker_id, self._clock.monotonic()
        if flight.error is not None:
            self._problems.append(flight.error)
            self._book.note_problem(name, flight.error, now_s=now_s)
            self._note(name, flight, problem=str(flight.error))
        elif flight.done is not None:
            seconds = flight.ended_s - flight.started_s
            self._book.note_read(name, num_bytes=flight.done.num_bytes, seconds=seconds)
            self._note(name, flight)
            self.landed += self._is_far(name)
        if flight.is_first:
            self._progressed_s = now_s
            self._membership.offer(flight.read.chunk)
            self._taken_in |= 1 << flight.read.chunk
            for other in self._flights:
                other.is_cancelled |= other.read.chunk == flight.read.chunk

    def _note(self, name: str, flight: _Flight, *, problem: str = "") -> None:
        """Add a read to what its source's record says: one line for each source."""
        seconds = flight.ended_s - flight.started_s
        record = flight.done or TransferRecord(
            transport=self._order.reader.transport, source=name, num_bytes=0, seconds=0.0, retries=1
        )
        record = replace(record, source=name, seconds=seconds, problem=problem)
        known = self._records.get(name)
        self._records[name] = record if known is None else joined(known, record)

    def _end(self) -> None:
        for flight in self._flights:
            flight.is_cancelled = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for record in self._records.values():
            self._order.on_record(record)


def _summed_up(problems: Sequence[FetchError | VerifyError]) -> FetchError | VerifyError:
    """Return one error for all that went wrong."""
    if len(problems) == 1:
        return problems[0]
    shown = "; ".join(map(str, problems[-PROBLEMS_SHOWN:]))
    if not problems:
        return FetchError("every source is left alone for now after it failed; try again later")
    return FetchError(f"no source answered rightly: {shown}")
