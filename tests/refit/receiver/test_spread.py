"""Receivers that serve each other: real threads, the real ledger, faults of every kind."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.clock import Clock
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.errors import ControlUnavailableError, FetchError
from paceline.refit.model import TensorBuffer
from paceline.refit.plan.sources import ReadPolicy
from paceline.refit.receiver.fetch import FetchLimits
from paceline.refit.receiver.install import InstallLimits, Supply
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.receiver.payload import PayloadBuffer
from paceline.refit.receiver.spread import Spread, SpreadOptions
from paceline.refit.receiver.swarm import Swarm, SwarmOptions
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.refit.transports.protocol import ObjectReader, Part, ReadPlan
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.fakes.generator import FakeGenerator
from paceline.testing.fakes.trainer import FakeTrainer, State, bytes_of, root_of
from refit.conftest import SMALL_DISK_BYTES

CHUNK_BYTES = 1000
POLICY = ReadPolicy(patience_s=0.2, patience_unknown_s=0.5, hedge_after_s=0.3)


def make_state(seed: int, elements: int = 16_000) -> State:
    """Return weights of ``4 * elements`` bytes."""
    values = np.random.default_rng(seed).standard_normal(elements).astype(np.float32)
    return {
        "w": TensorBuffer(
            name="w", dtype="F32", shape=values.shape, data=memoryview(values.tobytes())
        )
    }


STATE = make_state(0)


class Line(MemoryObjectReader):
    """One receiver's way to everybody: counts what comes from where, and misbehaves if told to."""

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(clock=world.clock)
        self._world = world
        self._name = name

    def plan_read(self, endpoint: str, parts: Sequence[Part], *, timeout_s: float) -> ReadPlan:
        source = self._world.name_of(endpoint)
        (part,) = parts
        self._world.before_read(self._name, source)
        plan = super().plan_read(endpoint, parts, timeout_s=timeout_s)
        return _Told(plan, lambda: self._world.after_read(self._name, source, part))

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        self._world.before_read(self._name, self._world.name_of(self.source_endpoint(address)))
        return super().read_manifest(address, size_max=size_max, timeout_s=timeout_s)


class _Told:
    """A plan whose end is told."""

    def __init__(self, plan: ReadPlan, after: Callable[[], None]) -> None:
        self._plan = plan
        self._after = after
        self.source = plan.source
        self.num_bytes = plan.num_bytes

    def run(self, terms: Any) -> Any:
        done = self._plan.run(terms)
        self._after()
        return done

    def close(self) -> None:
        self._plan.close()


@dataclass
class Node:
    """One receiver with its engine and its server."""

    name: str
    engine: FakeGenerator
    receiver: Receiver
    server: MemoryObjectServer
    spread: Spread

    def is_done(self) -> bool:
        installed = self.engine.installed()
        return installed is not None and self.engine.live_bytes() == bytes_of(STATE)


class World:
    """A trainer, and receivers that know each other through the ledger."""

    def __init__(self, *, read_s: float = 0.002) -> None:
        self.clock: Clock = system_clock()
        nonces = (f"n{at}" for at in itertools.count())
        self.store = MemoryStore(clock=self.clock)
        self.ledger = ControlLedger(self.store, nonce=lambda: next(nonces))
        self.control: Any = self.ledger
        """What receivers call."""
        self.origin = MemoryObjectServer()
        self.trainer = FakeTrainer(self.ledger, self.origin)
        self.read_s = read_s
        self.nodes: dict[str, Node] = {}
        self.sent: dict[tuple[str, str], int] = {}
        self.dead: set[str] = set()
        self.liars: set[str] = set()
        self.slow: set[str] = set()
        self.cannot_reach: set[tuple[str, str]] = set()
        self._uplink = threading.Lock()
        self._books = threading.Lock()

    def name_of(self, endpoint: str) -> str:
        names = {node.server.endpoint: node.name for node in self.nodes.values()}
        return names.get(endpoint, "trainer")

    def before_read(self, reader: str, source: str) -> None:
        if source in self.dead or (reader, source) in self.cannot_reach:
            raise FetchError(f"{source} does not answer")
        if source in self.slow:
            self.clock.sleep(1.5)
        if source == "trainer":
            with self._uplink:  # one after another: it has one narrow link
                self.clock.sleep(self.read_s)

    def after_read(self, reader: str, source: str, part: Part) -> None:
        if source in self.dead:
            raise FetchError(f"{source} died")
        if source in self.liars:
            part.target[0] ^= 1
        with self._books:
            key = (reader, source)
            self.sent[key] = self.sent.get(key, 0) + part.wanted.size

    def add(self, name: str, *, region: str = "", **changes: Any) -> Node:
        server = MemoryObjectServer()
        board: Any = changes.pop("board", self.ledger)
        fetch = changes.pop("fetch", FetchLimits())
        swarm = Swarm(
            board=board,
            server=server,
            worker_id=name,
            clock=self.clock,
            options=replace(SwarmOptions(region=region, announce_s=0.02, stale_s=0.5), **changes),
        )
        engine = FakeGenerator(list(make_state(9).values()))
        spread = Spread(swarm, SpreadOptions(policy=POLICY))
        reader: ObjectReader = Line(self, name)
        receiver = Receiver(
            ReceiverConfig(
                worker_id=name,
                model_name="m",
                run_id="r",
                endpoint="",
                limits=InstallLimits(fetch=fetch),
            ),
            control=self.control,
            engine=engine,
            reader=reader,
            clock=self.clock,
            chance=lambda: 0.0,
            supply=Supply(spread=spread),
        )
        self.nodes[name] = Node(name, engine, receiver, server, spread)
        return self.nodes[name]

    def start(self, *names: str) -> None:
        for name in names or tuple(self.nodes):
            self.nodes[name].receiver.start()

    def wait(self, *names: str, timeout_s: float = 20.0) -> None:
        """Wait until these have the weights, to the bit."""
        deadline = self.clock.monotonic() + timeout_s
        waited = [self.nodes[name] for name in names or tuple(self.nodes)]
        while not all(node.is_done() for node in waited):
            late = [node.name for node in waited if not node.is_done()]
            assert self.clock.monotonic() < deadline, f"not done: {late}, {self.refusals()}"
            self.clock.sleep(0.01)

    def stop(self) -> None:
        for node in self.nodes.values():
            node.receiver.stop(timeout_s=20)

    def bytes_from(self, source: str) -> int:
        return sum(size for (_, sender), size in self.sent.items() if sender == source)

    def refusals(self) -> list[object]:
        events = self.ledger.list_events()
        return [each.fields["reason"] for each in events if each.name == "version.refused"]


PAYLOAD = sum(len(buffer.data) for buffer in STATE.values())


def test_the_trainer_sends_about_one_payload_to_six() -> None:
    """Six receivers get the same bytes, most of them from each other."""
    world = World()
    for at in range(6):
        world.add(f"n{at}")
    world.start()
    world.trainer.publish_full("v0", 0, STATE)
    world.wait()
    world.stop()
    assert world.bytes_from("trainer") <= 2 * PAYLOAD
    assert len({node.engine.installed() for node in world.nodes.values()}) == 1
    assert world.refusals() == []


def test_what_is_told_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch is over when its last chunk is served on, not when it has come."""
    accept = PayloadBuffer.accept

    def accept_slowly(payload: PayloadBuffer, number: int, data: memoryview) -> bool:
        is_first = accept(payload, number, data)
        system_clock().sleep(0.1)
        return is_first

    monkeypatch.setattr(PayloadBuffer, "accept", accept_slowly)
    world = World()
    world.add("bridge")
    world.add("island")
    world.cannot_reach.add(("island", "trainer"))
    world.start("bridge")
    world.trainer.publish_full("v0", 0, STATE)
    world.wait("bridge")
    world.start("island")
    world.wait()
    world.stop()
    assert world.refusals() == []


def test_two_may_die_in_the_middle() -> None:
    """Whoever dies takes nothing with it: the others finish with the same digest."""
    world = World(read_s=0.01)
    for at in range(5):
        world.add(f"n{at}")
    world.trainer.publish_full("v0", 0, STATE)
    world.start()
    world.clock.sleep(0.2)
    world.dead |= {"n1", "n3"}
    for name in ("n1", "n3"):
        world.nodes[name].receiver._stop.set()
    world.wait("n0", "n2", "n4")
    world.stop()
    roots = {world.nodes[name].engine.installed() for name in ("n0", "n2", "n4")}
    assert len(roots) == 1
    assert next(iter(roots)).root_digest == root_of(STATE)  # type: ignore[union-attr]


def test_a_late_joiner_takes_nothing_from_the_trainer() -> None:
    """What neighbours have is not fetched from far away again, and several of them give it."""
    world = World()
    for name in ("n0", "n1", "n2"):
        world.add(name)
    world.trainer.publish_full("v0", 0, STATE)
    world.start()
    world.wait()
    world.add("late")
    before = world.bytes_from("trainer")
    world.start("late")
    world.wait()
    world.stop()
    assert world.bytes_from("trainer") == before
    givers = {source for reader, source in world.sent if reader == "late"}
    assert len(givers) > 1


def test_a_relay_brings_weights_to_who_cannot_dial_the_trainer() -> None:
    """One that reaches only its neighbour gets manifest and payload there."""
    world = World()
    world.add("bridge")
    world.add("island")
    world.cannot_reach.add(("island", "trainer"))
    world.trainer.publish_full("v0", 0, STATE)
    world.start("bridge")
    world.wait("bridge")
    world.start("island")
    world.wait("island")
    world.stop()
    assert ("island", "trainer") not in world.sent


def test_a_liar_is_blamed_and_the_range_comes_from_elsewhere() -> None:
    """Bytes that fail their hash are fetched again from somebody else, and nothing is refused."""
    world = World()
    world.add("liar")
    world.trainer.publish_full("v0", 0, STATE)
    world.start("liar")
    world.wait("liar")
    world.liars.add("liar")
    victim = world.add("victim")
    world.start("victim")
    world.wait("victim")
    world.stop()
    assert world.sent["victim", "trainer"] >= PAYLOAD - CHUNK_BYTES
    assert world.sent["victim", "liar"] <= POLICY.per_source_max * CHUNK_BYTES
    assert victim.receiver.figures()["refusals"] == 0


def test_a_slow_neighbour_is_helped_out() -> None:
    """A read that does not get on is doubled from somebody else, and the first to arrive counts."""
    world = World()
    for name in ("quick", "slow"):
        world.add(name)
    world.trainer.publish_full("v0", 0, STATE)
    world.start()
    world.wait()
    world.slow.add("slow")
    world.add("late")
    started = world.clock.monotonic()
    world.start("late")
    world.wait("late")
    world.stop()
    assert world.sent["late", "quick"] >= PAYLOAD - 4 * CHUNK_BYTES
    assert world.clock.monotonic() - started < 10


def test_another_region_costs_the_trainer_one_payload_more() -> None:
    """Two regions take about two payloads from the trainer, however many receivers they have."""
    world = World()
    for at in range(6):
        world.add(f"n{at}", region="eu" if at % 2 else "us")
    world.start()
    world.trainer.publish_full("v0", 0, STATE)
    world.wait()
    world.stop()
    assert world.bytes_from("trainer") <= 3 * PAYLOAD


def test_what_is_gone_is_served_no_longer() -> None:
    """While readers may still hold a version its relays serve it; once it is gone they let go."""
    world = World()
    node = world.add("n0")
    world.trainer.publish_full("v0", 0, STATE)
    world.start()
    world.wait()
    world.ledger.delete_version("v0")
    world.clock.sleep(0.3)
    world.stop()
    assert [each.worker_id for each in world.ledger.list_replicas("v0")] == ["n0"]
    node.spread.keep_only(frozenset({"v1"}))
    assert world.ledger.list_replicas("v0") == []
    assert node.server._objects._entries == {}


@pytest.mark.parametrize("promises", [False, True])
def test_a_receiver_without_room_harms_nobody(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, *, promises: bool
) -> None:
    """Where one keeps what it serves on the disk is full, before the first byte or at the last.

    It says so and blames nobody, the others neither wait for it nor lack anything, and once there
    is room it takes all from them.
    """
    if promises:  # a file system that finds out when it is written to
        monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: os.ftruncate(fd, at + size))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(SMALL_DISK_BYTES - PAYLOAD // 2 // 4096 * 4096))
    world = World()
    for name in ("n0", "n1"):
        world.add(name)
    full = world.add("full", fetch=FetchLimits(window_bytes=1024, spool_dir=small_disk))
    world.trainer.publish_full("v0", 0, STATE)
    world.start()
    world.wait("n0", "n1")
    deadline = world.clock.monotonic() + 20
    while not world.refusals():
        assert world.clock.monotonic() < deadline
        world.clock.sleep(0.01)
    assert not full.is_done()
    assert all("No space" in str(each) or "is full" in str(each) for each in world.refusals())
    filler.unlink()
    before = world.bytes_from("trainer")
    world.wait("full")
    world.stop()
    assert world.bytes_from("trainer") < before + PAYLOAD // 2, "reads that were under way may end"
    assert {each.worker_id for each in world.ledger.list_replicas("v0")} == {"n0", "n1", "full"}


class Restarting:
    """A control service that can be away, and comes back as another process over its records."""

    def __init__(self, ledger: ControlLedger, store: MemoryStore) -> None:
        self._ledger = ledger
        self._store = store
        self._nonces = (f"again-{at}" for at in itertools.count())
        self.is_away = False
        self.unheard = 0

    def come_back(self) -> None:
        self._ledger = ControlLedger(self._store, nonce=lambda: next(self._nonces))
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ledger, name)

        def call(*args: Any, **named: Any) -> Any:
            if self.is_away:
                self.unheard += 1
                raise ControlUnavailableError("down")
            return found(*args, **named)

        return call


@pytest.mark.parametrize("before", [0, 5 * CHUNK_BYTES, PAYLOAD])
def test_the_control_service_restarts_in_the_middle(before: int) -> None:
    """At any point of a fan-out: what is proven stays, and everybody finishes with one digest."""
    world = World(read_s=0.005)
    control = Restarting(world.ledger, world.store)
    world.control = control
    for at in range(4):
        world.add(f"n{at}", board=control)
    world.trainer.publish_full("v0", 0, STATE)
    world.start()
    deadline = world.clock.monotonic() + 20
    while sum(world.sent.values()) < before:
        assert world.clock.monotonic() < deadline
        world.clock.sleep(0.001)
    control.is_away = True
    while control.unheard < 8:
        assert world.clock.monotonic() < deadline
        world.clock.sleep(0.001)
    control.come_back()
    world.wait()
    world.stop()
    roots = {node.engine.installed() for node in world.nodes.values()}
    assert [each.root_digest for each in roots if each is not None] == [root_of(STATE)]
    assert all(node.receiver.figures()["installs"] == 1 for node in world.nodes.values())


class DeafBoard:
    """A board that nobody answers at."""

    def announce_replica(self, replica: Any) -> Any:
        raise ControlUnavailableError("down")

    list_replicas = announce_replica

    def withdraw_replica(self, **names: str) -> bool:
        raise ControlUnavailableError("down")


def test_without_the_board_everything_comes_from_the_trainer() -> None:
    """A control service that knows nothing of replicas costs bytes and nothing else."""
    world = World()
    world.add("n0", board=DeafBoard())
    world.trainer.publish_full("v0", 0, STATE)
    world.start()
    world.wait()
    world.stop()
    assert world.sent["n0", "trainer"] >= PAYLOAD


def test_what_is_proven_stays_for_the_next_try() -> None:
    """A fetch that loses its only source goes on where it was once the source is back."""
    world = World()
    node = world.add("n0")
    world.trainer.publish_full("v0", 0, STATE)
    world.start()
    deadline = world.clock.monotonic() + 10
    while world.bytes_from("trainer") < 10 * CHUNK_BYTES:
        assert world.clock.monotonic() < deadline
        world.clock.sleep(0.001)
    world.dead.add("trainer")
    while not world.refusals():
        assert world.clock.monotonic() < deadline
        world.clock.sleep(0.01)
    world.dead.clear()
    world.wait()
    world.stop()
    assert world.bytes_from("trainer") < 1.5 * PAYLOAD
    assert node.receiver.figures()["installs"] == 1


@pytest.mark.parametrize("kept", [1, 3 * PAYLOAD])
def test_served_bytes_are_bounded(kept: int) -> None:
    """Beyond the bound the oldest payloads are served no longer; the newest always is."""
    world = World()
    world.add("n0", kept_bytes_max=kept)
    world.trainer.publish_full("old", 0, make_state(1))
    world.start()
    deadline = world.clock.monotonic() + 10
    while not world.ledger.list_replicas("old"):
        assert world.clock.monotonic() < deadline
        world.clock.sleep(0.01)
    world.trainer.publish_full("v0", 1, STATE)
    world.wait()
    world.stop()
    assert [each.worker_id for each in world.ledger.list_replicas("v0")] == ["n0"]
    assert bool(world.ledger.list_replicas("old")) is (kept > PAYLOAD)
