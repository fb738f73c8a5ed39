"""Batches of one-sided reads into the caller's memory, prepared once and posted at will."""

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.refit.errors import FetchError, PublishError, TransferCancelledError
from paceline.refit.model import ObjectRange
from paceline.refit.transports.address import manifest_path
from paceline.refit.transports.nixl.agent import NixlAgent, Region, region_of
from paceline.refit.transports.nixl.server import PREFIX, TABLES
from paceline.refit.transports.nixl.table import TABLE_BYTES_MAX, Table, parse_table
from paceline.refit.transports.protocol import (
    ObjectReader,
    Part,
    ReadPlan,
    ReadSession,
    Terms,
    TransferRecord,
)

BATCH_BYTES = 2 * 2**20
"""Read at a time: what is told of and cancelled as one, and is in the cache when it is proven."""
DEPTH = 8
"""Batches under way at once, so that a link does not wait for us."""
_FIRST_NAP_S, _NAP_S_MAX = 2e-5, 1e-3
_LET_GO_S = 2.0
"""How long a read that nobody wants any more may take to end by itself."""


class NixlObjectReader:
    """Reads from NixlObjectServer."""

    def __init__(self, agent: NixlAgent, door: ObjectReader, *, clock: Clock) -> None:
        """Set up without I/O.

        Args:
            agent: stays the caller's.
            door: asks sources for tables and manifests; closed with the reader.
            clock: for deadlines.
        """
        self._agent = agent
        self._door = door
        self._clock = clock
        self._idle: list[tuple[memoryview, Region]] = []
        """Windows that no session has; they stay registered."""
        self._known: dict[tuple[str, str], Table] | None = None
        """In a session: what sources said about their objects."""
        self._lock = threading.Lock()

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        return "nixl"

    def plan_read(self, endpoint: str, parts: Sequence[Part], *, timeout_s: float) -> ReadPlan:
        """Ask where the objects lie, register the targets, and prepare every batch.

        Raises:
            FetchError: the source does not answer, does not have an object, or cannot be met.
        """
        deadline = self._clock.monotonic() + timeout_s
        tables: dict[str, Table] = {}
        for part in parts:
            try:
                self._look_up(part.wanted, endpoint, tables, deadline)
            except FetchError as exc:
                raise FetchError(
                    f"{part.wanted} at {endpoint}: {exc}", source=endpoint, wanted=part.wanted
                ) from exc
        try:
            plan = _NixlRead(self._agent, endpoint, parts, tables, self._clock)
        except (FetchError, PublishError) as exc:
            self._forget()
            wanted = parts[0].wanted
            raise FetchError(f"{endpoint}: {exc}", source=endpoint, wanted=wanted) from exc
        plan.on_failure = self._forget
        return plan

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return the manifest at an address. Raises FetchError."""
        return self._door.read_manifest(
            self._inner(address), size_max=size_max, timeout_s=timeout_s
        )

    def source_endpoint(self, address: str) -> str:
        """Return the endpoint behind a manifest address; no I/O. Raises FetchError."""
        return PREFIX + self._door.source_endpoint(self._inner(address))

    @contextmanager
    def session(self, *, window_bytes: int) -> Iterator[ReadSession]:
        """Yield a session that asks for each table once; its window has been registered before.

        Raises:
            FetchError: the window cannot be registered.
        """
        window, region = self._take_window(window_bytes)
        reader = NixlObjectReader(self._agent, self._door, clock=self._clock)
        reader._known = {}
        try:
            yield ReadSession(reader=reader, window=window[:window_bytes])
        finally:
            with self._lock:
                self._idle.append((window, region))

    def close(self) -> None:
        """Give the door's connections and the windows back; idempotent."""
        self._door.close()
        with self._lock:
            idle, self._idle = self._idle, []
        self._agent.deregister([region for _, region in idle])

    def _take_window(self, window_bytes: int) -> tuple[memoryview, Region]:
        with self._lock:
            for index, (window, _) in enumerate(self._idle):
                if len(window) >= window_bytes:
                    return self._idle.pop(index)
            small, self._idle = self._idle, []
        self._agent.deregister([region for _, region in small])
        made = memoryview(mmap.mmap(-1, max(1, window_bytes)))
        region = region_of(made)
        try:
            self._agent.register([region])
        except PublishError as exc:
            raise FetchError(str(exc)) from exc
        return made, region

    def _look_up(
        self, wanted: ObjectRange, endpoint: str, tables: dict[str, Table], deadline: float
    ) -> None:
        """Find out where a range lies."""
        if wanted.object_id not in tables:
            left_s = deadline - self._clock.monotonic()
            tables[wanted.object_id] = self._table(endpoint, wanted.object_id, left_s)
        num_bytes = tables[wanted.object_id].num_bytes
        if wanted.offset + wanted.size > num_bytes:
            raise FetchError(f"it has {num_bytes} bytes only")

    def _table(self, endpoint: str, object_id: str, timeout_s: float) -> Table:
        if self._known is not None and (endpoint, object_id) in self._known:
            return self._known[endpoint, object_id]
        address = self._inner(endpoint) + manifest_path(TABLES, object_id)
        data = self._door.read_manifest(address, size_max=TABLE_BYTES_MAX, timeout_s=timeout_s)
        table = parse_table(data)
        self._agent.meet(table.agent_metadata, table.agent_name)
        if self._known is not None:
            self._known[endpoint, object_id] = table
        return table

    def _forget(self) -> None:
        """Ask anew next time: something is not what sources said."""
        if self._known is not None:
            self._known.clear()

    def _inner(self, address: str) -> str:
        if not address.startswith(PREFIX):
            raise FetchError(f"{address[:200]!r} is not the address of a NIXL source")
        return address.removeprefix(PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A stretch of one part."""

    part: int
    local: Region
    remote: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    handle: object
    moves: Sequence[_Move]


class _NixlRead:
    """Signs ReadPlan. The targets stay registered until it is closed."""

    def __init__(
        self,
        agent: NixlAgent,
        endpoint: str,
        parts: Sequence[Part],
        tables: dict[str, Table],
        clock: Clock,
    ) -> None:
        self._agent = agent
        self._endpoint = endpoint
        self._parts = tuple(parts)
        self._clock = clock
        started = clock.monotonic()
        self._regions = _merged(region_of(part.target) for part in parts if part.wanted.size)
        self._batches: list[_Batch] = []
        self._is_closed = False
        self.on_failure: Callable[[], None] = lambda: None
        """Called when a run fails."""
        agent.register(self._regions)
        try:
            for name, moves in _batches_of(parts, tables):
                handle = agent.prepare(
                    name, [move.local for move in moves], [move.remote for move in moves]
                )
                self._batches.append(_Batch(handle=handle, moves=moves))
        except BaseException:
            self.close()
            raise
        self._peers = {table.agent_name for table in tables.values()}
        self._plan_s = clock.monotonic() - started

    @property
    def source(self) -> str:
        return self._endpoint

    @property
    def num_bytes(self) -> int:
        return sum(part.wanted.size for part in self._parts)

    def run(self, terms: Terms) -> TransferRecord:
        """Post batch after batch, a few at a time, and tell of parts as they are complete."""
        started = self._clock.monotonic()
        left = [part.wanted.size for part in self._parts]
        for index, size in enumerate(left):
            if not size:
                terms.on_part(index)
        under_way: deque[_Batch] = deque()
        try:
            self._move(under_way, left, terms, started)
        except BaseException as exc:
            self._abandon(under_way)
            if not isinstance(exc, FetchError):
                raise
            self.on_failure()
            missing = next(
                part.wanted for part, size in zip(self._parts, left, strict=True) if size
            )
            raise FetchError(
                f"{self._endpoint}: {exc}", source=self._endpoint, wanted=missing
            ) from exc
        seconds = self._clock.monotonic() - started
        return TransferRecord(
            transport="nixl",
            source=self._endpoint,
            num_bytes=self.num_bytes,
            seconds=seconds,
            stages={"plan": self._plan_s, "move": seconds},
        )

    def close(self) -> None:
        """Give handles and registrations back; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for batch in self._batches:
            self._agent.forget(batch.handle)
        self._agent.deregister(self._regions)

    def _move(
        self, under_way: deque[_Batch], left: list[int], terms: Terms, started: float
    ) -> None:
        for batch in self._batches:
            self._check(terms, started)
            if self._agent.post(batch.handle):
                _note(batch, left, terms.on_part)
                continue
            under_way.append(batch)
            if len(under_way) >= DEPTH:
                self._finish(under_way, left, terms, started)
        while under_way:
            self._finish(under_way, left, terms, started)

    def _finish(
        self, under_way: deque[_Batch], left: list[int], terms: Terms, started: float
    ) -> None:
        """Wait for the oldest batch."""
        nap_s = _FIRST_NAP_S
        while not self._agent.poll(under_way[0].handle):
            self._check(terms, started)
            self._clock.sleep(nap_s)
            nap_s = min(2 * nap_s, _NAP_S_MAX)
        _note(under_way.popleft(), left, terms.on_part)

    def _check(self, terms: Terms, started: float) -> None:
        if terms.is_cancelled():
            raise TransferCancelledError(f"reading from {self._endpoint} was cancelled")
        if self._clock.monotonic() - started > terms.timeout_s:
            raise FetchError(f"not done after {terms.timeout_s:g} s")

    def _abandon(self, under_way: deque[_Batch]) -> None:
        """Let what is under way end; cut the peer off if it does not, so that nothing writes on."""
        deadline = self._clock.monotonic() + _LET_GO_S
        while under_way and self._clock.monotonic() < deadline:
            try:
                if self._agent.poll(under_way[0].handle):
                    under_way.popleft()
                else:
                    self._clock.sleep(_NAP_S_MAX)
            except FetchError:
                under_way.popleft()
        if under_way:
            for peer in self._peers:
                self._agent.part_with(peer)


def _note(batch: _Batch, left: list[int], on_part: Callable[[int], None]) -> None:
    for move in batch.moves:
        left[move.part] -= move.local.size
        if not left[move.part]:
            on_part(move.part)


def _batches_of(
    parts: Sequence[Part], tables: dict[str, Table]
) -> Iterator[tuple[str, Sequence[_Move]]]:
    """Yield agent and moves of each batch; one batch is of one agent and one kind of memory."""
    batch: list[_Move] = []
    key = ("", "")
    size = 0
    for index, part in enumerate(parts):
        table = tables[part.wanted.object_id]
        rest = deque(_moves_of(index, part, table))
        while rest:
            found = (table.agent_name, rest[0].remote.memory)
            if batch and (size == BATCH_BYTES or found != key):
                yield key[0], batch
                batch, size = [], 0
            key = found
            head, *tail = _split(rest.popleft(), BATCH_BYTES - size)
            rest.extendleft(tail)
            batch.append(head)
            size += head.local.size
        if size >= BATCH_BYTES // 4:  # what is whole is told of at once
            yield key[0], batch
            batch, size = [], 0
    if batch:
        yield key[0], batch


def _split(move: _Move, size: int) -> Sequence[_Move]:
    """Cut a move after so many bytes, if it is longer."""
    if move.local.size <= size:
        return (move,)
    return [
        _Move(part=move.part, local=local, remote=remote)
        for local, remote in zip(move.local.split(size), move.remote.split(size), strict=True)
    ]


def _descriptors(moves: Sequence[_Move]) -> tuple[Sequence[Region], Sequence[Region]]:
    """Return where a batch comes from and goes to, in as few stretches as it lies in."""
    local, remote = [moves[0].local], [moves[0].remote]
    for move in moves[1:]:
        if local[-1].adjoins(move.local) and remote[-1].adjoins(move.remote):
            local[-1], remote[-1] = local[-1].joined(move.local), remote[-1].joined(move.remote)
        else:
            local.append(move.local)
            remote.append(move.remote)
    return local, remote


def _moves_of(index: int, part: Part, table: Table) -> Iterator[_Move]:
    start = region_of(part.target).address if part.wanted.size else 0
    for found in table.cut(part.wanted.offset, part.wanted.size):
        remote = Region(found.address, found.size, found.memory, found.device)
        yield _Move(part=index, local=Region(start, found.size), remote=remote)
        start += found.size


def _merged(regions: Iterator[Region]) -> Sequence[Region]:
    """Join regions that touch: one registration of an arena costs less than one per tensor."""
    found: list[Region] = []
    for region in sorted(set(regions)):
        last = found[-1] if found else None
        if last is not None and region.address <= last.stop:
            found[-1] = Region(last.address, max(last.stop, region.stop) - last.address)
        else:
            found.append(region)
    return found
