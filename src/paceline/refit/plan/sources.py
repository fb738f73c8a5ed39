"""From whom to read which chunk next: decided from what others say and what was measured.

How a payload spreads. Whoever fetches a version says so, and serves every chunk on from the
moment that it has proven it. Those of one region that serve are a group, and each chunk has one
of them as its owner, in turn by their names. Only the owner fetches it from far away (the
trainer, or another region); everybody else waits for it to appear nearby. So each byte comes
into a region about once, every member is a root for its own chunks and a leaf for the others,
and all uplinks work at the same time. With nobody nearby, everything is one's own.

What holds when somebody fails. Nothing here is a promise of anybody: owners are computed anew
for every read from whoever is there now. If nothing arrives for longer than a chunk should take,
the owners of what is missing are given up and their chunks shared out among the rest, so that an
owner that hangs, dies or lies costs a pause and not the version. Reads that take far too long
are doubled elsewhere.

Chunks are bits of an integer, the payload's first chunk the lowest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Somebody who says that it has chunks, and is neither blamed nor resting."""

    worker_id: str
    chunks: int
    region: str = ""
    is_origin: bool = False
    """The trainer or an object store: has everything, and everybody's eyes on it."""
    load: int = 0
    """Reads of others that it answers, as it says."""
    rate: float | None = None
    """Bytes per second of one read, as measured here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A read under way."""

    chunk: int
    worker_id: str
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What to read next, and from whom."""

    chunk: int
    worker_id: str
    is_hedge: bool = False
    """The same chunk is under way from a slower source; whoever is first wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPolicy:
    """How many reads at a time, and when to stop waiting for others."""

    reads_max: int = 8
    far_reads_max: int = 8
    """Of these, from far away; shared among the group, so that chunks arrive one by one. The
    first read is alone and each that ends well makes room for one more, so that those who begin
    together hear of each other before they have asked for much."""
    per_source_max: int = 2
    """From one neighbour."""
    near_slowness_max: float = 8.0
    """A neighbour that gives so many times less than the trainer is none."""
    near_gain_min: float = 4.0
    """Somebody of another region who gives so many times more than the trainer is a neighbour."""
    patience_s: float = 1.0
    """Without progress before owners are given up, at least."""
    patience_factor: float = 3.0
    """And at least so many times what a chunk takes from far away."""
    patience_unknown_s: float = 10.0
    """Where nobody has measured that yet."""
    patience_max_s: float = 30.0
    hedge_after_s: float = 3.0
    """A read younger than this is never doubled."""
    hedge_factor: float = 4.0
    """Nor one that has not taken so many times what its source should need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState:
    """One reader's view at one moment."""

    worker_id: str
    num_chunks: int
    have: int
    sources: tuple[Source, ...]
    members: tuple[str, ...] = ()
    """Who of one's own region fetches this and serves on, sorted; with oneself if one does."""
    region: str = ""
    coming: int = 0
    """What other members are reading from far away now."""
    landed: int = 0
    """Reads from far away that went well."""
    flights: tuple[Flight, ...] = ()
    stalled_s: float = 0.0
    """Since a chunk was proven last."""
    chunk_bytes: int = 4 * 2**20
    policy: ReadPolicy = field(default_factory=ReadPolicy)

    @property
    def missing(self) -> int:
        """Chunks that are neither here nor on their way."""
        flying = mask_of(flight.chunk for flight in self.flights)
        return all_chunks(self.num_chunks) & ~self.have & ~flying


def choose_read(state: FetchState) -> Read | None:
    """Return the next read to start, or None while the ones under way and others must get on."""
    if len(state.flights) >= state.policy.reads_max:
        return None
    return _near_read(state) or _far_read(state) or _hedge(state)


def all_chunks(count: int) -> int:
    """Return the set of the first ``count`` chunks."""
    return (1 << count) - 1


def mask_of(chunks: Iterable[int]) -> int:
    """Return a set of chunks."""
    found = 0
    for chunk in chunks:
        found |= 1 << chunk
    return found


def owned_chunks(members: Sequence[str], worker_id: str, *, num_chunks: int) -> int:
    """Return the chunks that it is a worker's to bring into its region.

    Every chunk is owned by exactly one of ``members``, which are sorted.
    """
    if worker_id not in members:
        return 0
    return _every(len(members), members.index(worker_id), num_chunks)


def overdue_members(state: FetchState) -> frozenset[str]:
    """Return the owners that have had their time: do not wait for them any more."""
    if not _is_overdue(state):
        return frozenset()
    wanted = state.missing & ~_nearby(state)
    if wanted & state.coming:
        return frozenset(state.members) - {state.worker_id}
    return frozenset(
        name
        for name in state.members
        if name != state.worker_id
        and wanted & owned_chunks(state.members, name, num_chunks=state.num_chunks)
    )


def _is_overdue(state: FetchState) -> bool:
    far = [each for each in state.sources if not _is_near(each, state)]
    names = {each.worker_id for each in far}
    if any(flight.worker_id in names for flight in state.flights):
        return False  # far away is slow, and for the others too
    rates = [each.rate for each in far if each.rate]
    policy = state.policy
    due_s = policy.patience_unknown_s
    if rates:
        due_s = max(policy.patience_s, policy.patience_factor * state.chunk_bytes / max(rates))
    return state.stalled_s > min(due_s, policy.patience_max_s)


def _near_read(state: FetchState) -> Read | None:
    near = [source for source in state.sources if _is_near(source, state)]
    return _first(state, near, state.missing, per_source=state.policy.per_source_max)


def _far_read(state: FetchState) -> Read | None:
    far = [source for source in state.sources if not _is_near(source, state)]
    active = _active(state)
    under_way = sum(active.get(source.worker_id, 0) for source in far)
    group = max(1, len(state.members))
    limit = min(max(1, state.policy.far_reads_max // group), 1 + state.landed)
    if under_way >= limit:
        return None
    return _first(state, far, state.missing & _may_go_far(state), per_source=limit)


def _may_go_far(state: FetchState) -> int:
    """Return the chunks that this reader may fetch from far away now.

    Where there is nobody else, nothing is coming, whatever was said before they went.
    """
    owned = all_chunks(state.num_chunks)
    if state.members:
        owned = owned_chunks(state.members, state.worker_id, num_chunks=state.num_chunks)
    others = set(state.members) - {state.worker_id}
    return owned & ~_nearby(state) & ~(state.coming if others else 0)


def _nearby(state: FetchState) -> int:
    """Return the chunks that somebody of this region has."""
    found = 0
    for source in state.sources:
        if _is_near(source, state):
            found |= source.chunks
    return found


def _first(
    state: FetchState, sources: Sequence[Source], wanted: int, *, per_source: int
) -> Read | None:
    """Return a read of a wanted chunk from the best source that has one and is not too busy."""
    active = _active(state)
    for source in sorted(sources, key=lambda each: _rank(each, sources, state, active)):
        offered = source.chunks & wanted
        if offered and active.get(source.worker_id, 0) < per_source:
            return Read(chunk=_pick(offered, state), worker_id=source.worker_id)
    return None


def _rank(
    source: Source, among: Sequence[Source], state: FetchState, active: dict[str, int]
) -> tuple[float, int]:
    """Smaller is better: what it should give per second, then neighbours in turn.

    Whoever was never measured counts as the fastest, so that it is tried.
    """
    known = [each.rate for each in among if each.rate is not None]
    rate = source.rate if source.rate is not None else max(known, default=1.0)
    busy = active.get(source.worker_id, 0) + source.load + 1
    order = sorted({state.worker_id, *(each.worker_id for each in among)})
    turn = (order.index(source.worker_id) - order.index(state.worker_id)) % len(order)
    return -rate / busy, turn


def _pick(offered: int, state: FetchState) -> int:
    """Return one of the chunks, each reader beginning at another place."""
    start = crc32(state.worker_id.encode()) % state.num_chunks
    if len(state.members) > 1 and state.worker_id in state.members:
        at = state.members.index(state.worker_id)
        start = at * state.num_chunks // len(state.members)
    later = offered >> start << start
    found = later or offered
    return (found & -found).bit_length() - 1


def _hedge(state: FetchState) -> Read | None:
    """Return a second read of a chunk that takes far too long, if somebody else has it."""
    rates = {source.worker_id: source.rate for source in state.sources}
    twice = {flight.chunk for flight in state.flights if _count(state, flight.chunk) > 1}
    for flight in sorted(state.flights, key=lambda each: -each.elapsed_s):
        rate = rates.get(flight.worker_id)
        due_s = state.policy.hedge_factor * state.chunk_bytes / rate if rate else 0.0
        if flight.chunk in twice or flight.elapsed_s <= max(state.policy.hedge_after_s, due_s):
            continue
        others = [each for each in state.sources if each.worker_id != flight.worker_id]
        for is_near in (True, False):
            group = [each for each in others if _is_near(each, state) is is_near]
            read = _first(state, group, 1 << flight.chunk, per_source=state.policy.reads_max)
            if read is not None:
                return Read(chunk=read.chunk, worker_id=read.worker_id, is_hedge=True)
    return None


def _is_near(source: Source, state: FetchState) -> bool:
    """Say whether to read from a source before going far: as its region says, or as measured."""
    if source.is_origin:
        return False
    is_neighbour = source.region == state.region
    far = max((each.rate or 0.0 for each in state.sources if each.is_origin), default=0.0)
    if not far or not source.rate:
        return is_neighbour
    policy = state.policy
    if is_neighbour:
        return source.rate * policy.near_slowness_max >= far
    return source.rate >= far * policy.near_gain_min


def _active(state: FetchState) -> dict[str, int]:
    found: dict[str, int] = {}
    for flight in state.flights:
        found[flight.worker_id] = found.get(flight.worker_id, 0) + 1
    return found


def _count(state: FetchState, chunk: int) -> int:
    return sum(flight.chunk == chunk for flight in state.flights)


@lru_cache(maxsize=256)
def _every(step: int, first: int, count: int) -> int:
    """Return the chunks ``first``, ``first + step`` and so on below ``count``."""
    return mask_of(range(first, count, step))
