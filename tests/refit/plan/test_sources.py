"""Whom to read from: properties of single choices, and a simulated fleet that loses members."""

import heapq
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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
    owned_chunks,
)

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
REGIONS = st.sampled_from(["", "x", "y"])


@st.composite
def states(draw: st.DrawFn) -> FetchState:
    """Any view that a reader may have, contradictory ones included."""
    count = draw(st.integers(1, 12))
    chunks = st.integers(0, all_chunks(count))
    sources = draw(
        st.lists(
            st.builds(
                Source,
                worker_id=NAMES,
                chunks=chunks,
                region=REGIONS,
                is_origin=st.booleans(),
                load=st.integers(0, 3),
                rate=st.none() | st.floats(1.0, 1e9),
            ),
            unique_by=lambda each: each.worker_id,
        )
    )
    flights = draw(
        st.lists(
            st.builds(
                Flight,
                chunk=st.integers(0, count - 1),
                worker_id=NAMES,
                elapsed_s=st.floats(0.0, 100.0),
            ),
            max_size=4,
        )
    )
    return FetchState(
        worker_id="me",
        num_chunks=count,
        have=draw(chunks),
        sources=tuple(sources),
        coming=draw(chunks),
        landed=draw(st.integers(0, 9)),
        members=tuple(sorted({*draw(st.lists(NAMES)), *draw(st.just(["me"]) | st.just([]))})),
        region=draw(REGIONS),
        flights=tuple(flights),
        stalled_s=draw(st.floats(0.0, 20.0)),
        policy=ReadPolicy(reads_max=draw(st.integers(1, 6))),
    )


class TestChoice:
    @given(states())
    def test_a_choice_can_be_carried_out(self, state: FetchState) -> None:
        """Whatever is chosen, its source says that it has the chunk, and it is needed."""
        read = choose_read(state)
        if read is None:
            return
        source = next(each for each in state.sources if each.worker_id == read.worker_id)
        assert source.chunks >> read.chunk & 1
        assert len(state.flights) < state.policy.reads_max
        flying = [flight for flight in state.flights if flight.chunk == read.chunk]
        if read.is_hedge:
            assert len(flying) == 1
            assert flying[0].worker_id != read.worker_id
        else:
            assert not flying
            assert not state.have >> read.chunk & 1

    @given(states())
    @example(
        FetchState(
            worker_id="me",
            num_chunks=1,
            have=0,
            sources=(Source(worker_id="a", chunks=1, region="", is_origin=True),),
            coming=1,
        )
    )
    def test_nobody_waits_for_ever(self, state: FetchState) -> None:
        """Once those are given up who had their time, whatever anybody has is read."""
        late = replace(state, flights=(), stalled_s=1000.0)
        for _ in state.members:
            gone = overdue_members(late)
            left = tuple(m for m in late.members if m not in gone)
            late = replace(late, members=left)
        offered = 0
        for source in state.sources:
            offered |= source.chunks
        assert (choose_read(late) is not None) == bool(offered & late.missing)

    @given(st.lists(NAMES, min_size=1, unique=True), st.integers(0, 40))
    def test_every_chunk_has_one_owner(self, names: list[str], count: int) -> None:
        """The members share the chunks out, without a rest and without doubles."""
        members = sorted(names)
        shares = [owned_chunks(members, name, num_chunks=count) for name in members]
        assert sum(share.bit_count() for share in shares) == count
        assert mask_of(range(count)) == sum(shares)

    def test_a_neighbour_comes_before_the_trainer(self) -> None:
        """What is nearby is not fetched from far away, also where that is somewhat faster."""
        assert self.first_choice("x", near_rate=2.0, far_rate=10.0) == "n"
        assert self.first_choice("x", near_rate=None, far_rate=10.0) == "n"

    def test_what_is_near_is_measured(self) -> None:
        """A neighbour that crawls is none, and somebody fast elsewhere is one."""
        assert self.first_choice("x", near_rate=1.0, far_rate=10.0) == "t"
        assert self.first_choice("y", near_rate=30.0, far_rate=10.0, members=("a", "me")) is None
        assert self.first_choice("y", near_rate=50.0, far_rate=10.0, members=("a", "me")) == "n"

    def first_choice(
        self,
        region: str,
        *,
        near_rate: float | None,
        far_rate: float,
        members: tuple[str, ...] = ("me",),
    ) -> str | None:
        """Return whom a reader in ``x`` asks for the one chunk that is another's to bring."""
        other = Source(worker_id="n", chunks=1, region=region, rate=near_rate)
        far = Source(worker_id="t", chunks=1, is_origin=True, rate=far_rate)
        read = choose_read(
            FetchState(
                worker_id="me",
                num_chunks=1,
                have=0,
                sources=(far, other),
                members=members,
                region="x",
            )
        )
        return None if read is None else read.worker_id

    def test_the_faster_neighbour_is_asked(self) -> None:
        """Among equals it is the measured rate, shared by what is under way already."""
        slow = Source(worker_id="a", chunks=3, rate=10.0)
        fast = Source(worker_id="b", chunks=3, rate=15.0)
        state = FetchState(worker_id="me", num_chunks=2, have=0, sources=(slow, fast))
        assert choose_read(state) == Read(chunk=0, worker_id="b")
        busy = FetchState(
            worker_id="me",
            num_chunks=2,
            have=0,
            sources=(slow, fast),
            flights=(Flight(chunk=0, worker_id="b"),),
        )
        assert choose_read(busy) == Read(chunk=1, worker_id="a")

    def test_another_ones_chunk_is_waited_for(self) -> None:
        """A reader fetches its own share from far away; an owner gets the time of a few reads."""
        origin = Source(worker_id="t", chunks=3, is_origin=True, rate=10.0)
        state = FetchState(
            worker_id="me",
            num_chunks=2,
            have=0,
            sources=(origin,),
            members=("me", "you"),
            chunk_bytes=100,
        )
        assert choose_read(state) == Read(chunk=0, worker_id="t")
        waiting = replace(state, have=1, stalled_s=29.0)
        assert choose_read(waiting) is None
        assert overdue_members(waiting) == frozenset()
        assert overdue_members(replace(waiting, stalled_s=31.0)) == {"you"}
        alone = replace(waiting, members=("me",))
        assert choose_read(alone) == Read(chunk=1, worker_id="t")

    def test_a_slow_read_is_doubled_elsewhere(self) -> None:
        """A read that takes far too long is started again from somebody else, once."""
        sources = (
            Source(worker_id="a", chunks=1, rate=1e6),
            Source(worker_id="b", chunks=1, rate=1e6),
        )
        flight = Flight(chunk=0, worker_id="a", elapsed_s=30.0)
        state = FetchState(worker_id="me", num_chunks=1, have=0, sources=sources, flights=(flight,))
        assert choose_read(state) == Read(chunk=0, worker_id="b", is_hedge=True)
        both = (flight, Flight(chunk=0, worker_id="b", elapsed_s=30.0))
        assert (
            choose_read(
                FetchState(worker_id="me", num_chunks=1, have=0, sources=sources, flights=both)
            )
            is None
        )


@dataclass
class Node:
    """One simulated receiver."""

    name: str
    region: str
    have: int = 0
    flights: dict[int, tuple[Read, float]] = field(default_factory=dict)
    progressed_s: float = 0.0
    finished_s: float | None = None
    dead_since_s: float | None = None
    given_up: frozenset[str] = frozenset()
    resting: dict[str, float] = field(default_factory=dict)
    seen: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """What it heard last of the others: the chunks that they have, and that are coming."""
    landed: int = 0


class Fleet:
    """A trainer with a narrow uplink and receivers with wide ones, in virtual time.

    Links are shared by time slices: a read from a source ends when the source has served
    everything that it was asked before. What others have is heard only every ``hear_s``.
    """

    def __init__(
        self,
        *,
        regions: Sequence[str],
        num_chunks: int,
        trainer_chunk_s: float = 0.16,
        peer_chunk_s: float = 0.03,
        hear_s: float = 0.1,
        stale_s: float = 1.5,
    ) -> None:
        self.num_chunks = num_chunks
        self.chunk_s = {"trainer": trainer_chunk_s}
        self.nodes = {
            f"n{at}": Node(name=f"n{at}", region=region) for at, region in enumerate(regions)
        }
        self.chunk_s |= dict.fromkeys(self.nodes, peer_chunk_s)
        self.free_at = dict.fromkeys(self.chunk_s, 0.0)
        self.sent = dict.fromkeys(self.chunk_s, 0)
        self.hear_s = hear_s
        self.stale_s = stale_s
        self.now_s = 0.0
        self._count = itertools.count()
        self._events: list[tuple[float, int, str, str, int]] = []

    def run(self, deaths: Mapping[str, float], *, until_s: float) -> None:
        """Let everybody fetch; the named ones die at their time, in mid-read if it is so."""
        for name in self.nodes:
            self._push(0.0, "hear", name, 0)
        for name, at_s in deaths.items():
            self._push(at_s, "die", name, 0)
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, kind, name, number = heapq.heappop(self._events)
            node = self.nodes[name]
            if kind == "die":
                node.dead_since_s = self.now_s
            elif node.dead_since_s is None and node.finished_s is None:
                if kind == "hear":
                    self._hear(node)
                else:
                    self._land(node, number)
                self._fly(node)

    def _push(self, at_s: float, kind: str, name: str, number: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._count), kind, name, number))

    def _hear(self, node: Node) -> None:
        node.seen = {
            each.name: (each.have, self._coming(each))
            for each in self.nodes.values()
            if each is not node
        }
        self._push(self.now_s + self.hear_s, "hear", node.name, 0)

    def _land(self, node: Node, number: int) -> None:
        if number not in node.flights:
            return
        read, _ = node.flights.pop(number)
        if self._is_dead(read.worker_id):
            node.resting[read.worker_id] = self.now_s + 5.0
            return
        node.have |= 1 << read.chunk
        node.landed += self._is_far(node, read.worker_id)
        node.progressed_s = self.now_s
        node.flights = {
            at: pair for at, pair in node.flights.items() if pair[0].chunk != read.chunk
        }
        if node.have == all_chunks(self.num_chunks):
            node.finished_s = self.now_s

    def _is_far(self, node: Node, source: str) -> bool:
        return source == "trainer" or self.nodes[source].region != node.region

    def _coming(self, node: Node) -> int:
        reads = [read for read, _ in node.flights.values()]
        return mask_of(read.chunk for read in reads if self._is_far(node, read.worker_id))

    def _is_dead(self, name: str, *, for_s: float = 0.0) -> bool:
        since_s = None if name == "trainer" else self.nodes[name].dead_since_s
        return since_s is not None and self.now_s - since_s >= for_s

    def _fly(self, node: Node) -> None:
        while node.finished_s is None:
            gone = overdue_members(self._state(node))
            if gone:
                node.given_up |= gone
                node.progressed_s = self.now_s
            read = choose_read(self._state(node))
            if read is None:
                return
            start_s = max(self.now_s, self.free_at[read.worker_id])
            end_s = start_s + self.chunk_s[read.worker_id]
            self.free_at[read.worker_id] = end_s
            self.sent[read.worker_id] += 1
            number = next(self._count)
            node.flights[number] = (read, self.now_s)
            self._push(end_s, "land", node.name, number)

    def _state(self, node: Node) -> FetchState:
        origin = Source(
            worker_id="trainer",
            chunks=all_chunks(self.num_chunks),
            is_origin=True,
            rate=1 / (8 * self.chunk_s["trainer"]),
        )
        usable = [name for name in node.seen if node.resting.get(name, 0.0) <= self.now_s]
        peers = [
            Source(worker_id=name, chunks=node.seen[name][0], region=self.nodes[name].region)
            for name in usable
        ]
        members = sorted(
            [
                node.name,
                *(
                    name
                    for name in usable
                    if self.nodes[name].region == node.region
                    and name not in node.given_up
                    and not self._is_dead(name, for_s=self.stale_s)
                    and node.seen[name][0] != all_chunks(self.num_chunks)
                ),
            ]
        )
        coming = 0
        for name in members:
            coming |= node.seen[name][1] if name in node.seen else 0
        return FetchState(
            worker_id=node.name,
            num_chunks=self.num_chunks,
            have=node.have,
            sources=(origin, *peers),
            members=tuple(members),
            region=node.region,
            coming=coming,
            landed=node.landed,
            flights=tuple(
                Flight(chunk=read.chunk, worker_id=read.worker_id, elapsed_s=self.now_s - started_s)
                for read, started_s in node.flights.values()
            ),
            stalled_s=self.now_s - node.progressed_s,
            chunk_bytes=1,
        )


class TestFleet:
    def test_eight_cost_the_trainer_one(self) -> None:
        """Eight receivers are done in little more than the time of one, with one payload sent."""
        alone = Fleet(regions=[""], num_chunks=64)
        alone.run({}, until_s=100)
        one_s = alone.nodes["n0"].finished_s
        assert one_s is not None
        fleet = Fleet(regions=[""] * 8, num_chunks=64)
        fleet.run({}, until_s=100)
        ends = [node.finished_s for node in fleet.nodes.values()]
        assert None not in ends
        assert max(end for end in ends if end is not None) <= 1.3 * one_s
        assert fleet.sent["trainer"] <= 1.15 * 64

    def test_each_region_costs_the_trainer_about_one(self) -> None:
        """Regions fetch from each other too, so that two cost no more than two payloads."""
        fleet = Fleet(regions=["x", "y"] * 4, num_chunks=64)
        fleet.run({}, until_s=100)
        assert all(node.finished_s is not None for node in fleet.nodes.values())
        assert fleet.sent["trainer"] <= 2.2 * 64

    @pytest.mark.parametrize("seed", range(20))
    def test_whoever_dies_the_others_finish(self, seed: int) -> None:
        """Up to all but one die at any moment, and the rest have everything in bounded time."""
        chance = random.Random(seed)  # noqa: S311 - a seed that repeats
        count = chance.randint(2, 10)
        regions = [chance.choice(["x", "y"]) for _ in range(count)]
        fleet = Fleet(regions=regions, num_chunks=chance.randint(1, 48))
        dying = chance.sample(sorted(fleet.nodes), chance.randint(1, count - 1))
        fleet.run({name: chance.uniform(0.0, 6.0) for name in dying}, until_s=200)
        left = [node for name, node in fleet.nodes.items() if name not in dying]
        assert all(node.finished_s is not None for node in left)
