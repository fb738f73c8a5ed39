"""The receiver against the real ledger and the memory transport, on a clock that jumps."""

import itertools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from paceline.core.retry import RetryPolicy
from paceline.core.waiting import wait_until
from paceline.refit.apply import prove_base
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.errors import ControlUnavailableError, FetchError, UncertainStateError
from paceline.refit.generators.protocol import EngineState
from paceline.refit.manifest.render import render_manifest
from paceline.refit.model import (
    Event,
    InstalledReport,
    TensorBuffer,
)
from paceline.refit.receiver.fetch import FetchLimits
from paceline.refit.receiver.install import InstallLimits
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.receiver.standing import StalenessBound
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.refit.transports.protocol import ObjectReader, Part
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.generator import FakeGenerator
from paceline.testing.fakes.trainer import FakeTrainer, State, bytes_of, root_of
from paceline.testing.faults import CorruptingReader, FlakyReader, SlowReader, TruncatingReader
from paceline.testing.payloads import delta_payload, full_payload
from refit.conftest import SMALL_DISK_BYTES

ALIASES = (("head", "embed"),)


class WaitingReader(SlowReader):
    """Gives no byte of an object before something else has happened, once it is told to."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__(MemoryObjectReader(), clock=system_clock(), delay_s=0)
        self._event = event
        self.waits = False
        self.waited: list[bool] = []

    def read_part(self, endpoint: str, part: Part, *, timeout_s: float) -> None:
        if self.waits:
            self.waited.append(self._event.wait(20))
        super().read_part(endpoint, part, timeout_s=timeout_s)


def make_states(count: int) -> list[State]:
    """Return states in which a few elements of two tensors change each time; one never does."""
    rng = np.random.default_rng(0)
    arrays: dict[str, npt.NDArray[Any]] = {
        "embed": rng.standard_normal((40, 20)).astype(np.float32),
        "norm": np.ones(20, np.float32),
        "table": np.arange(64, dtype=np.int64),
    }
    states: list[State] = []
    for _ in range(count):
        states.append(
            {
                name: TensorBuffer(
                    name=name,
                    dtype="I64" if array.dtype == np.int64 else "F32",
                    shape=array.shape,
                    data=memoryview(array.tobytes()),
                )
                for name, array in arrays.items()
            }
        )
        for name in ("embed", "norm"):
            flat = arrays[name].reshape(-1)
            at = rng.integers(0, flat.size, 5)
            flat[at] += rng.standard_normal(5).astype(np.float32)
    return states


STATES = make_states(5)


class FlakyControl:
    """The ledger behind a line that a test can cut, wholly or for single calls."""

    def __init__(self, ledger: ControlLedger) -> None:
        self._ledger = ledger
        self.dead: set[str] = set()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> object:
            self.calls.append(name)
            if name in self.dead or "*" in self.dead:
                raise ControlUnavailableError("the line is cut")
            return getattr(self._ledger, name)(*args, **kwargs)

        return call


class World:
    """A run with one trainer and one engine."""

    def __init__(self, **changes: Any) -> None:
        self.clock = FakeClock()
        nonces = (f"n{at}" for at in itertools.count())
        self.ledger = ControlLedger(MemoryStore(clock=self.clock), nonce=lambda: next(nonces))
        self.line = FlakyControl(self.ledger)
        self.server = MemoryObjectServer()
        self.trainer = FakeTrainer(self.ledger, self.server, aliases=ALIASES)
        self.changes = changes
        self.engine, self.receiver = self.join("gen-0")

    def join(
        self, worker_id: str, reader: ObjectReader | None = None
    ) -> tuple[FakeGenerator, Receiver]:
        engine = FakeGenerator(list(make_states(5)[4].values()), aliases=dict(ALIASES))
        return engine, self.follow(engine, worker_id, reader)

    def follow(
        self, engine: FakeGenerator, worker_id: str, reader: ObjectReader | None = None
    ) -> Receiver:
        config = ReceiverConfig(
            worker_id=worker_id,
            model_name="m",
            run_id="r",
            endpoint="http://127.0.0.1:1",
            retry=RetryPolicy(first_delay_s=1, delay_s_max=8),
        )
        line: Any = self.line
        return Receiver(
            replace(config, **self.changes),
            control=line,
            engine=engine,
            reader=reader or MemoryObjectReader(),
            clock=self.clock,
            chance=lambda: 0.0,
        )

    def publish(self, upto: int, *, first: int = 0) -> None:
        """Publish v0 whole and the others as deltas."""
        for at in range(first, upto + 1):
            if at == 0:
                self.trainer.publish_full("v0", 0, STATES[0])
            else:
                self.trainer.publish_delta(
                    f"v{at}", at, STATES[at - 1], STATES[at], base_uid=f"v{at - 1}"
                )

    def settle(self, receiver: Receiver | None = None, *, rounds: int = 10) -> None:
        for _ in range(rounds):
            (receiver or self.receiver).step()
            self.clock.advance(0.1)

    def events(self, name: str) -> list[Event]:
        return [each for each in self.ledger.list_events() if each.name == name]

    def report(self, worker_id: str = "gen-0") -> InstalledReport:
        reports = self.ledger.list_installed("m", live_only=False)
        return next(each for each in reports if each.worker_id == worker_id)

    def assert_serves(self, sequence: int, engine: FakeGenerator | None = None) -> None:
        engine = engine or self.engine
        installed = engine.installed()
        assert installed is not None
        assert (installed.sequence, installed.root_digest) == (sequence, root_of(STATES[sequence]))
        assert engine.live_bytes() == bytes_of(STATES[sequence])

    def assert_no_leases(self) -> None:
        for version in self.ledger.list_versions("m"):
            assert self.ledger.list_leases(version.uid) == []


class TestFollowing:
    def test_chain(self) -> None:
        """An engine follows version by version, byte for byte, and says so each time."""
        world = World()
        for at in range(4):
            world.publish(at, first=at)
            world.settle(rounds=2)
            world.assert_serves(at)
            report = world.report()
            assert (report.sequence, report.root_digest) == (at, root_of(STATES[at]))
            assert (report.state, report.version_id) == ("ready", f"v{at}")
        installed = world.events("version.installed")
        assert [each.fields["sequence"] for each in installed] == [0, 1, 2, 3]
        assert world.receiver.figures()["installs"] == 4
        world.assert_no_leases()

    def test_late_joiner(self) -> None:
        """One that comes late starts from the newest anchor and ends on the same digest."""
        world = World()
        world.publish(3)
        world.trainer.publish_full("v2-full", 2, STATES[2])
        engine, late = world.join("gen-1")
        world.settle(late)
        world.settle()
        world.assert_serves(3, engine)
        world.assert_serves(3)
        assert world.report("gen-0").root_digest == world.report("gen-1").root_digest
        mine = [e for e in world.events("version.installed") if e.worker_id == "gen-1"]
        assert [each.fields["version_id"] for each in mine] == ["v2-full", "v3"]

    def test_lease_is_renewed(self) -> None:
        """While bytes come slowly the lease and the registration live on."""
        world = World()
        world.publish(0)
        slow = SlowReader(MemoryObjectReader(), clock=world.clock, delay_s=10)
        engine, receiver = world.join("gen-1", slow)
        receiver.step()
        world.assert_serves(0, engine)
        assert world.line.calls.count("acquire_lease") > 1
        assert world.line.calls.count("register_worker") > 1
        world.assert_no_leases()

    def test_thread(self) -> None:
        """In a thread it follows by itself, and stops when told."""
        world = World()
        world.clock = system_clock()  # type: ignore[assignment]
        engine, receiver = world.join("gen-1")
        receiver.start()
        world.publish(1)
        for _ in range(2000):
            installed = engine.installed()
            if installed is not None and installed.sequence == 1:
                break
            world.clock.sleep(0.01)
        receiver.stop(timeout_s=20)
        world.assert_serves(1, engine)
        assert receiver.health().state is EngineState.READY


class WrongManifestReader(MemoryObjectReader):
    """Serves another manifest than the one advertised, a well-formed one."""

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        return render_manifest(full_payload(STATES[3].values(), aliases=ALIASES)[0])


class DeadReader(MemoryObjectReader):
    """A source that was killed."""

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        raise FetchError("connection refused")


READERS: Mapping[str, Callable[[World], ObjectReader]] = {
    "truncated": lambda world: TruncatingReader(MemoryObjectReader(), keep=10),
    "corrupted": lambda world: CorruptingReader(MemoryObjectReader(), at=100),
    "slow": lambda world: SlowReader(MemoryObjectReader(), clock=world.clock, delay_s=1000),
    "altered manifest": lambda world: CorruptingReader(
        MemoryObjectReader(), at=50, in_manifests=True
    ),
    "other manifest": lambda world: WrongManifestReader(),
    "killed": lambda world: DeadReader(),
}


def wrong_base(world: World) -> None:
    manifest, data = delta_payload(STATES[2], STATES[1], aliases=ALIASES)
    world.trainer.publish("v1", 1, manifest, data, parent_root=root_of(STATES[0]), base_uid="v0")


def missing_tensor(world: World) -> None:
    fewer = {name: each for name, each in STATES[1].items() if name != "table"}
    manifest, data = full_payload(fewer.values(), aliases=ALIASES)
    world.trainer.publish("v1", 1, manifest, data, parent_root=None)


def other_root(world: World) -> None:
    manifest, data = full_payload(STATES[1].values(), aliases=ALIASES)
    lied = replace(manifest, root_digest=root_of(STATES[2]))
    world.trainer.publish("v1", 1, lied, data, parent_root=None)


def other_tie(world: World) -> None:
    manifest, data = full_payload(STATES[1].values(), aliases=(("head", "norm"),))
    world.trainer.publish("v1", 1, manifest, data, parent_root=None)


def huge_payload(world: World) -> None:
    manifest, data = full_payload(STATES[1].values(), aliases=ALIASES)
    large = replace(manifest.objects[0], num_bytes=2**40, chunk_bytes=2**26)
    lied = replace(manifest, objects=(large,))
    world.trainer.publish("v1", 1, lied, data, parent_root=None)


PUBLICATIONS = [wrong_base, missing_tensor, other_root, other_tie, huge_payload]


class TestFaults:
    @pytest.mark.parametrize("fault", READERS)
    def test_bad_source(self, fault: str) -> None:
        """Whatever a source does, the version before is served, byte for byte, and it is told."""
        world = World()
        world.publish(0)
        world.settle()
        receiver = world.follow(world.engine, "gen-0", READERS[fault](world))
        receiver._base = world.receiver._base
        world.publish(1, first=1)
        world.settle(receiver)
        world.assert_serves(0)
        world.assert_no_leases()
        refused = world.events("version.refused")
        assert refused
        assert refused[0].fields["version_id"] == "v1"
        assert refused[0].fields["reason"]
        assert receiver.health().state is EngineState.READY

    @pytest.mark.parametrize("publish", PUBLICATIONS)
    def test_bad_publication(self, publish: Callable[[World], None]) -> None:
        """A version that is not what its record says is refused, and the next good one goes in."""
        world = World()
        world.publish(0)
        world.settle()
        publish(world)
        world.settle()
        world.assert_serves(0)
        assert len(world.events("version.refused")) >= 1
        world.trainer.publish_full("v2", 2, STATES[2])
        world.settle()
        world.assert_serves(2)
        world.assert_no_leases()

    def test_anchor_leads_around(self) -> None:
        """When a delta is refused, the next try takes the anchor of the same weights."""
        world = World()
        world.publish(0)
        world.settle()
        wrong_base(world)
        world.trainer.publish_full("v1-full", 1, STATES[1])
        world.settle()
        world.assert_serves(1)
        assert world.report().version_id == "v1-full"

    def test_backoff(self) -> None:
        """A version that fails is tried again, later each time, and goes in when it can."""
        world = World()
        world.publish(0)
        flaky = FlakyReader(MemoryObjectReader(), failures=3)
        engine, receiver = world.join("gen-1", flaky)
        world.settle(receiver, rounds=65)
        assert engine.installed() is None
        assert len(world.events("version.refused")) == 3
        world.settle(receiver, rounds=10)
        world.assert_serves(0, engine)

    def test_write_fails(self) -> None:
        """A write that fails inside the pause leaves the version before."""
        world = World()
        world.publish(0)
        world.settle()

        def fail() -> None:
            raise FetchError("stands for any failure before the write")

        world.engine.before_write = fail
        world.publish(1, first=1)
        world.settle()
        world.assert_serves(0)
        world.engine.before_write = lambda: None
        world.settle(rounds=20)
        world.assert_serves(1)

    @pytest.mark.parametrize("where", ["write", "proof", "later"])
    def test_uncertain(self, where: str) -> None:
        """Bytes that are no version are not served until a full version is in."""
        world = World()
        world.publish(0)
        world.settle()
        if where == "later":
            _spoil(world.engine)
        else:
            spoil = _spoil if where == "proof" else _spoil_and_say_so
            world.engine.after_write = lambda: spoil(world.engine)
        world.publish(1, first=1)
        world.receiver.step()
        assert world.engine.installed() is None
        assert world.report().state == "failed"
        assert world.events("version.refused")
        world.engine.after_write = lambda: None
        world.trainer.publish_full("v1-full", 1, STATES[1])
        world.settle()
        world.assert_serves(1)
        assert world.report().state == "ready"

    def test_release_fails(self) -> None:
        """A lease that cannot be given back does not undo an install."""
        world = World()
        world.publish(0)
        world.line.dead = {"release_lease"}
        world.settle()
        world.assert_serves(0)
        assert world.report().sequence == 0


def _spoil(engine: FakeGenerator) -> None:
    engine.live_tensors()["embed"].data[0:40] = bytes(range(40))


def _spoil_and_say_so(engine: FakeGenerator) -> None:
    _spoil(engine)
    raise UncertainStateError("half written")


def test_the_base_is_proven_while_the_delta_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """That needs no byte of it; damage is found by it as ever, and what is in is not touched."""
    proven = threading.Event()

    def prove(*args: Any, **more: Any) -> None:
        try:
            prove_base(*args, **more)
        finally:
            proven.set()

    monkeypatch.setattr("paceline.refit.receiver.install.prove_base", prove)
    world, reader = World(), WaitingReader(proven)
    engine, receiver = world.join("gen-1", reader)
    world.publish(0)
    world.settle(receiver)
    reader.waits = True
    world.publish(1, first=1)
    world.settle(receiver)
    assert set(reader.waited) == {True}
    world.assert_serves(1, engine)
    _spoil(engine)
    proven.clear()
    world.publish(2, first=2)
    receiver.step()
    (refused,) = world.events("version.refused")
    assert "'embed': live bytes are not the base any more" in str(refused.fields["reason"])
    assert engine.installed() is None


class TestControlServiceAway:
    def test_serves_then_stale_then_back(self) -> None:
        """Without the service it serves on, says stale after the bound, and recovers by itself."""
        world = World(bound=StalenessBound(silence_s=30))
        world.publish(0)
        world.settle()
        world.line.dead = {"*"}
        world.publish(1, first=1)
        world.settle(rounds=100)
        assert world.receiver.health().state is EngineState.READY
        world.settle(rounds=300)
        health = world.receiver.health()
        assert health.state is EngineState.STALE
        assert "silent" in health.reason
        world.assert_serves(0)
        world.line.dead = set()
        world.settle(rounds=100)
        world.assert_serves(1)
        assert world.report().state == "ready"
        assert [e.fields["sequence"] for e in world.events("version.installed")] == [0, 1]

    def test_report_is_made_up_for(self) -> None:
        """An install whose report was lost is reported when the service is back."""
        world = World()
        world.publish(0)
        world.line.dead = {"report_installed"}
        world.settle()
        world.assert_serves(0)
        world.line.dead = set()
        world.settle(rounds=100)
        assert world.report().sequence == 0
        assert len(world.events("version.installed")) == 1

    def test_does_not_hammer(self) -> None:
        """A service that is away is asked seldom."""
        world = World()
        world.line.dead = {"*"}
        world.settle(rounds=1000)
        assert len(world.line.calls) < 25

    def test_lease_renewal_fails(self) -> None:
        """A renewal that fails in mid-fetch does not stop the install."""
        world = World()
        world.publish(0)

        class Cutting(SlowReader):
            def read_part(self, endpoint: str, part: Part, *, timeout_s: float) -> None:
                world.line.dead = {"acquire_lease", "register_worker"}
                super().read_part(endpoint, part, timeout_s=timeout_s)

        reader = Cutting(MemoryObjectReader(), clock=world.clock, delay_s=15)
        engine, receiver = world.join("gen-1", reader)
        receiver.step()
        world.assert_serves(0, engine)


class TestStanding:
    def test_loading_then_ready_then_draining(self) -> None:
        """The state that is reported follows the engine's life."""
        world = World()
        world.settle(rounds=1)
        assert world.report().state == "loading"
        assert world.report().sequence == -1
        world.publish(0)
        world.settle(rounds=1)
        assert world.report().state == "ready"
        world.receiver.drain()
        world.settle(rounds=1)
        assert world.report().state == "draining"

    def test_too_far_behind(self) -> None:
        """An engine that cannot keep up says so itself."""
        world = World(bound=StalenessBound(versions=1))
        world.publish(0)
        world.settle()
        receiver = world.follow(world.engine, "gen-0", DeadReader())
        world.publish(2, first=1)
        world.settle(receiver, rounds=3)
        assert receiver.health().state is EngineState.STALE
        assert world.report().state == "stale"
        world.assert_serves(0)

    def test_crash_is_loud(self) -> None:
        """A receiver that dies of a bug takes its engine out of service."""
        world = World()

        class Broken(MemoryObjectReader):
            def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
                raise ZeroDivisionError("bug")

        _, receiver = world.join("gen-1", Broken())
        world.publish(0)
        receiver.start()
        receiver._thread.join(20)  # type: ignore[union-attr]
        health = receiver.health()
        assert health.state is EngineState.FAILED
        assert "ZeroDivisionError: bug" in health.reason


def test_an_engine_without_room_serves_on_and_says_what_to_free(small_disk: Path) -> None:
    """Where payloads wait the disk is full: the version before stays, and room lets it follow."""
    fetch = FetchLimits(window_bytes=1024, spool_dir=small_disk, spool_keep_s=0)
    world = World(limits=InstallLimits(fetch=fetch))
    world.publish(0)
    world.settle()
    world.assert_serves(0)
    filler = small_disk / "filler"
    wait_until(
        lambda: (
            os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize == SMALL_DISK_BYTES
        ),
        what="the payload before to be let go, also by reads that came too late",
        clock=system_clock(),
        timeout_s=20,
        interval_s=0.01,
    )
    filler.write_bytes(bytes(SMALL_DISK_BYTES))
    world.trainer.publish_full("v1", 1, STATES[1])
    world.settle()
    world.assert_serves(0)
    refused = world.events("version.refused")[-1].fields
    assert f"{small_disk} is full" in str(refused)
    assert "make room" in str(refused)
    assert list(small_disk.iterdir()) == [filler]
    filler.unlink()
    world.clock.advance(60)
    world.settle()
    world.assert_serves(1)
