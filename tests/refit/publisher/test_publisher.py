"""The publisher: every version is READY and fetchable, or leaves no trace."""

import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from paceline.refit.apply import stage_install
from paceline.refit.errors import (
    AccessRefusedError,
    ControlError,
    ControlUnavailableError,
    FetchError,
    NotFoundError,
    PreconditionError,
    PublishError,
    StagingError,
)
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.payload import verify_object
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import (
    InstalledReport,
    ObjectRange,
    TensorBuffer,
    TrainerStagingMode,
    WeightPayloadFormat,
    WorkerRegistration,
    WorkerRole,
)
from paceline.refit.publisher import PublishedVersion, Publisher, PublisherOptions
from paceline.refit.trainers.protocol import TrainerEngineAdapter
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.http.reader import HttpObjectReader
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.refit.transports.protocol import read_object
from paceline.telemetry.events import EVENT_FIELDS
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.control_plane import FakeControlPlane

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
DOWN = ControlUnavailableError("connection refused")


class Beats:
    """A heartbeat that the test lets happen."""

    def __init__(self) -> None:
        self._go: queue.Queue[bool] = queue.Queue()
        self._ready: queue.Queue[float] = queue.Queue()

    def __call__(self, seconds: float) -> bool:
        self._ready.put(seconds)
        return self._go.get(timeout=20)

    def once(self) -> float:
        """Let one beat happen and return how long the wait before it would have been."""
        seconds = self._ready.get(timeout=20)
        self._go.put(False)
        self._ready.put(self._ready.get(timeout=20))
        return seconds

    def stop(self) -> None:
        self._go.put(True)


@dataclass
class World:
    """A trainer with a publisher, and everything around it."""

    clock: FakeClock
    control: FakeControlPlane
    source: MemoryObjectServer
    trainer: TorchModuleTrainer
    publisher: Publisher
    weights: dict[str, torch.Tensor]
    beats: Beats
    told: list[tuple[str, Mapping[str, object]]]

    def step(self) -> None:
        self.weights["w"][::9] += 1

    def publish(self, step: int = 0) -> PublishedVersion:
        self.step()
        published = self.publisher.publish(step=step).result()
        assert self.publisher.flush(timeout_s=20)  # what follows a version is done too
        return published

    def states(self) -> dict[str, str]:
        return {uid: str(version.state) for uid, version in self.control.versions.items()}

    def generator(self, worker_id: str = "g0") -> str:
        self.control.register_worker(
            WorkerRegistration(worker_id=worker_id, role=WorkerRole.GENERATOR, model_name="m"),
            ttl_seconds=10_000,
        )
        return worker_id

    def fetch(self, uid: str) -> tuple[Manifest, bytes]:
        """Fetch a version as a receiver does."""
        (shard,) = self.control.list_shards(uid)
        reader = MemoryObjectReader()
        data = reader.read_manifest(shard.manifest_endpoint, size_max=2**20, timeout_s=1)
        manifest = parse_manifest(data)
        (item,) = manifest.objects
        target = bytearray(item.num_bytes)
        wanted = ObjectRange(object_id=item.object_id, offset=0, size=item.num_bytes)
        endpoint = reader.source_endpoint(shard.manifest_endpoint)
        read_object(reader, endpoint, wanted, memoryview(target), timeout_s=1)
        return manifest, bytes(target)

    def proves(self, uid: str) -> bool:
        """Whether a fetched full version is exactly the weights that it says."""
        manifest, data = self.fetch(uid)
        live = {
            entry.name: TensorBuffer(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                data=memoryview(bytearray(entry.num_bytes)),
            )
            for entry in manifest.tensors
        }
        objects = {manifest.objects[0].object_id: memoryview(data)}
        stage_install(manifest, objects, live=live, aliases={}, base=None)
        return True


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    """Build started worlds; they are closed afterwards."""
    worlds = []

    def build(*, arenas: int = 4, started: bool = True, **options: Any) -> World:
        clock, beats = FakeClock(), Beats()
        control, source = FakeControlPlane(clock=clock), MemoryObjectServer()
        weights = {"w": torch.zeros(200, dtype=torch.bfloat16), "b": torch.ones(5)}
        trainer = TorchModuleTrainer(clock=clock, arenas=arenas, transport="memory")
        trainer.bind_tensors(weights)
        told: list[tuple[str, Mapping[str, object]]] = []
        publisher = Publisher(
            control=control,
            trainer=trainer,
            source=source,
            clock=clock,
            options=PublisherOptions(
                model_name="m",
                run_id="run",
                worker_id="t0",
                heartbeat_wait=beats,
                **{"compose": False, **options},
            ),
            notify=lambda name, fields: told.append((name, fields)),
        )
        world = World(clock, control, source, trainer, publisher, weights, beats, told)
        if started:
            publisher.start()
        worlds.append(world)
        return world

    yield build
    for world in worlds:
        world.beats.stop()
        world.publisher.close()


Make = Callable[..., World]


def test_first_is_full_then_deltas(make: Make) -> None:
    """The first version is full, the next are deltas on it, each with its parent's root."""
    world = make()
    first, second, third = (world.publish(step) for step in (10, 20, 30))
    assert [first.version_id, second.version_id] == ["run-000000", "run-000001"]
    assert (first.payload_format, second.payload_format) == (FULL, DELTA)
    assert second.payload_bytes < second.full_bytes
    assert (second.changed_elements, second.total_elements) == (23, 205)
    versions = world.control.versions
    assert versions["run-000002"].base_version_id == "run-000001"
    said = versions["run-000002"].description
    assert said is not None
    assert (said.sequence, said.step, said.parent_root) == (2, 30, second.root_digest)
    assert said.root_digest == third.root_digest
    assert set(world.states().values()) == {"READY"}
    assert world.proves("run-000000")
    manifest, _ = world.fetch("run-000002")
    assert manifest.base_root == second.root_digest


def test_events_carry_their_fields(make: Make) -> None:
    """Each publish tells one event with at least the fields of the list."""
    world = make()
    world.publish(5)
    ((name, fields),) = world.told
    assert name == "version.published"
    assert set(EVENT_FIELDS[name]) <= fields.keys()
    assert (fields["step"], fields["payload_format"]) == (5, "FULL_TENSOR")


def test_anchors_and_retention(make: Make) -> None:
    """Every few sequences a full version stands beside the delta, and what it replaces goes."""
    world = make(anchor_every=3, keep_old=1)
    found = [world.publish() for _ in range(8)]
    assert [item.anchor_id for item in found if item.anchor_id] == [
        "run-000003-full",
        "run-000006-full",
    ]
    anchor = world.control.versions["run-000006-full"]
    beside = world.control.versions["run-000006"]
    assert anchor.payload_format is FULL
    assert anchor.base_version_id is None
    assert anchor.description is not None
    assert beside.description is not None
    assert anchor.description == replace(
        beside.description,
        payload_bytes=anchor.description.payload_bytes,
        changed_elements=205,
    )
    ready = {uid for uid, state in world.states().items() if state == "READY"}
    assert ready == {"run-000005", "run-000006", "run-000006-full", "run-000007"}
    assert {uid for uid, _, _ in world.control.shards} == ready
    assert world.proves("run-000006-full")
    with pytest.raises(NotFoundError):
        world.fetch("run-999999")


def test_full_payloads_need_no_anchor(make: Make) -> None:
    """With FULL_TENSOR every version is one to start from."""
    world = make(payload_format=FULL, keep_old=0)
    for _ in range(3):
        found = world.publish()
        assert (found.payload_format, found.anchor_id) == (FULL, None)
    assert [uid for uid, state in world.states().items() if state == "READY"] == ["run-000002"]


def test_leased_versions_stay_until_the_lease_ends(make: Make) -> None:
    """A released version with a lease keeps its bytes; when the lease expires they go."""
    world = make(payload_format=FULL, keep_old=0)
    world.publish()
    world.control.acquire_lease(
        version_id="run-000000", worker_id=world.generator(), ttl_seconds=60
    )
    for _ in range(3):
        world.publish()
    assert world.states()["run-000000"] == "RELEASING"
    assert world.proves("run-000000")
    world.clock.advance(61)
    world.beats.once()
    assert "run-000000" not in {uid for uid, _, _ in world.control.shards}


def test_training_waits_for_readers_no_longer_than_their_lease(make: Make) -> None:
    """With every arena leased staging waits, and goes on when a dead reader's lease expires."""
    world = make(arenas=2, payload_format=FULL, keep_old=0, stage_wait_s=30)
    world.publish()
    reader = world.generator()
    world.control.acquire_lease(version_id="run-000000", worker_id=reader, ttl_seconds=20)
    world.publish()
    before = world.clock.monotonic()
    world.publish()
    assert 0 < world.clock.monotonic() - before <= 21


def test_skip_policy_refuses_at_once(make: Make) -> None:
    """With no patience a publish without a free arena is skipped, and the next one works."""
    world = make(arenas=2, payload_format=FULL, keep_old=0, stage_wait_s=0)
    world.publish()
    lease = world.control.acquire_lease(
        version_id="run-000000", worker_id=world.generator(), ttl_seconds=20
    )
    world.publish()
    before = world.clock.monotonic()
    with pytest.raises(StagingError):
        world.publish()
    assert world.clock.monotonic() == before
    world.control.release_lease(lease)
    assert world.publish().sequence == 3


CALLS = ["register_worker", "create_version", "describe_version", "create_shard"]


@pytest.mark.parametrize("after", [False, True], ids=["refused", "reply-lost"])
@pytest.mark.parametrize("method", CALLS)
def test_failed_publish_leaves_no_trace(make: Make, method: str, *, after: bool) -> None:
    """Whichever call fails, the base stays, the uid is not used again, and the next one works."""
    world = make()
    first = world.publish()
    world.control.fail(method, ControlError("no room"), after=after)
    with pytest.raises(PublishError, match="no room"):
        world.publish()
    assert world.states().get("run-000001", "RELEASING") == "RELEASING"
    assert {uid for uid, _, _ in world.control.shards} == {"run-000000"}
    second = world.publish()
    assert second.version_id == "run-000002"
    manifest, _ = world.fetch("run-000002")
    assert manifest.base_root == first.root_digest
    assert world.control.versions["run-000002"].base_version_id == "run-000000"
    was_maybe_seen = method == "create_shard"
    assert second.anchor_id == ("run-000002-full" if was_maybe_seen else None)


@pytest.mark.parametrize("after", [False, True], ids=["down", "reply-lost"])
@pytest.mark.parametrize("method", CALLS)
def test_short_outages_are_ridden_out(make: Make, method: str, *, after: bool) -> None:
    """A control service that does not answer for a moment costs time, not a version."""
    world = make()
    world.control.fail(method, DOWN, after=after, times=2)
    assert world.publish().sequence == 0
    assert world.states() == {"run-000000": "READY"}


def test_long_outage_ends_at_the_deadline(make: Make) -> None:
    """Past its deadline a publish says that the service is away; afterwards the next one works."""
    world = make(control_wait_s=5)
    world.publish()
    world.control.down = DOWN
    before = world.clock.monotonic()
    with pytest.raises(ControlUnavailableError):
        world.publish()
    assert world.clock.monotonic() - before <= 5
    world.control.down = None
    assert world.proves("run-000000")
    assert world.publish().version_id == "run-000002"
    assert world.publisher.trouble is None


def test_outage_after_the_shard_was_sent(make: Make) -> None:
    """A version that may be READY unknown to us leaves like any other, and an anchor follows."""
    world = make(control_wait_s=1)
    world.publish()
    world.control.fail("create_shard", DOWN, after=True, times=99)
    with pytest.raises(ControlUnavailableError):
        world.publish()
    world.control.fail("create_shard", DOWN, times=0)
    assert world.states()["run-000001"] == "READY"
    assert world.proves("run-000000")
    assert world.fetch("run-000001")
    found = world.publish()
    assert world.states()["run-000001"] == "RELEASING"
    assert found.anchor_id == "run-000002-full"


def test_lost_base_is_followed_by_a_full_version(make: Make) -> None:
    """If the control service forgot the base, one publish fails and the next starts afresh."""
    world = make()
    world.publish()
    world.control.versions.clear()
    world.control.requests.clear()
    with pytest.raises(PublishError, match="starts afresh"):
        world.publish()
    found = world.publish()
    assert found.payload_format is FULL
    assert world.publish().payload_format is DELTA


def test_failed_anchor_is_reported_and_tried_again(make: Make) -> None:
    """An anchor that fails does not fail the step; the next version brings it."""
    world = make(anchor_every=1)
    world.publish()
    world.control.fail("describe_version", PreconditionError("no room"), skip=1)
    found = world.publish()
    assert found.anchor_id is None
    assert "no room" in (found.anchor_error or "")
    assert world.states()["run-000001"] == "READY"
    assert world.states()["run-000001-full"] == "RELEASING"
    assert world.publish().anchor_id == "run-000002-full"


def test_refused_access_is_said_as_such(make: Make) -> None:
    """A wrong token is not dressed up as a passing failure."""
    world = make()
    world.control.fail("create_version", AccessRefusedError("token"))
    with pytest.raises(AccessRefusedError):
        world.publish()


def test_equal_payloads_share_an_object(make: Make) -> None:
    """Two steps that change nothing have one object; releasing one keeps the other fetchable."""
    world = make(anchor_every=4, keep_old=0)
    world.publish()
    for _ in range(3):
        world.publisher.publish(step=0).result()
    assert world.fetch("run-000003")[1] == world.fetch("run-000001")[1]
    found = world.publisher.publish(step=0).result()
    assert found.anchor_id == "run-000004-full"
    assert set(world.states()) - {uid for uid, _, _ in world.control.shards} == {
        f"run-{number:06d}" for number in range(4)
    }
    assert world.fetch("run-000004")
    assert world.proves("run-000004-full")


def test_heartbeat_renews_and_survives(make: Make) -> None:
    """The registration is renewed at a third of its life, and an outage is only noted."""
    world = make(registration_ttl_s=30)
    for _ in range(5):
        world.clock.advance(10)
        assert world.beats.once() == 10
    assert world.control.list_workers("m")
    world.control.down = DOWN
    world.beats.once()
    assert world.publisher.trouble is DOWN
    world.control.down = None
    world.beats.once()
    assert world.publisher.trouble is None


def test_restart_goes_on_counting(make: Make) -> None:
    """A new process of the same run never uses a uid again, and starts with a full version."""
    world = make(started=False)
    donor = make()
    for _ in range(3):
        donor.publish()
    world.control.versions.update(donor.control.versions)
    world.publisher.start()
    found = world.publish()
    assert (found.version_id, found.payload_format) == ("run-000003", FULL)


def test_close_releases_everything(make: Make) -> None:
    """After close no version can be leased, no byte fetched; readers get a bounded time."""
    world = make(close_wait_s=3)
    world.publish()
    (shard,) = world.control.list_shards("run-000000")
    world.publish()
    world.control.acquire_lease(
        version_id="run-000001", worker_id=world.generator(), ttl_seconds=99
    )
    before = world.clock.monotonic()
    world.beats.stop()
    world.publisher.close()
    world.publisher.close()
    assert world.clock.monotonic() - before <= 4
    assert set(world.states().values()) == {"RELEASING"}
    with pytest.raises(FetchError):
        MemoryObjectReader().read_manifest(shard.manifest_endpoint, size_max=999, timeout_s=1)
    with pytest.raises(PublishError, match="closed"):
        world.publish()


def test_context_manager_starts_and_closes(make: Make) -> None:
    """``with`` is start and close."""
    world = make(started=False)
    with pytest.raises(PublishError, match="start"):
        world.publish()
    with world.publisher as publisher:
        publisher.publish(step=1)
        world.beats.stop()
    assert set(world.states().values()) == {"RELEASING"}


def test_waiting_for_engines(make: Make) -> None:
    """The end of a run waits until every live engine serves the last weights."""
    world = make()
    with pytest.raises(PublishError, match="nothing"):
        world.publisher.wait_installed(timeout_s=1)
    found = world.publish()
    assert world.publisher.wait_installed(timeout_s=30)
    for worker_id in ("g0", "g1"):
        world.generator(worker_id)
        assert not world.publisher.wait_installed(timeout_s=1)
        world.control.report_installed(serving(worker_id, found.version_id, found.root_digest))
    assert world.publisher.wait_installed(timeout_s=30)


def test_engines_of_other_runs_are_not_waited_for(make: Make) -> None:
    """One that serves another run of the same model will never serve this one's weights."""
    world = make()
    world.publish()
    world.generator("g0")
    world.control.report_installed(serving("g0", "run-b-000007", "b" * 64))
    assert world.publisher.wait_installed(timeout_s=30)
    world.control.report_installed(serving("g0", "", ""))
    assert not world.publisher.wait_installed(timeout_s=1)


def serving(worker_id: str, version_id: str, root_digest: str) -> InstalledReport:
    return InstalledReport(
        worker_id=worker_id, model_name="m", endpoint="", version_id=version_id,
        sequence=0, root_digest=root_digest, state="ready", installed_at_unix_ms=0,
        fetched_bytes=0, refit_ms=0, pause_ms=0,
    )  # fmt: skip


def test_in_place_steps_wait_for_readers(make: Make) -> None:
    """In place, a step takes the version back first and is refused while a reader holds it."""
    world = make(staging_mode=TrainerStagingMode.IN_PLACE, stage_wait_s=2)
    world.publisher.before_step()
    assert world.publish().payload_format is FULL
    lease = world.control.acquire_lease(
        version_id="run-000000", worker_id=world.generator(), ttl_seconds=99
    )
    assert world.proves("run-000000")
    with pytest.raises(StagingError, match="must not step"):
        world.publisher.before_step()
    world.control.release_lease(lease)
    world.publisher.before_step()
    assert world.states() == {"run-000000": "RELEASING"}
    assert world.publish().payload_format is FULL
    make().publisher.before_step()


def test_trainers_must_sign_the_chain(make: Make) -> None:
    """A trainer without a chain is refused when the publisher is made."""
    world = make(started=False)
    with pytest.raises(TypeError, match="SupportsChain"):
        Publisher(
            control=world.control,
            trainer=cast("TrainerEngineAdapter", object()),
            source=world.source,
            clock=world.clock,
            options=PublisherOptions(model_name="m", run_id="r", worker_id="t"),
        )


def test_over_http() -> None:
    """The same over sockets: what a receiver reads by HTTP is the version, until it is closed."""
    clock = FakeClock()
    source = HttpObjectServer(token=lambda: "t")
    reader = HttpObjectReader(token=lambda: "t", clock=clock, chance=lambda: 0.0)
    control = FakeControlPlane(clock=clock)
    trainer = TorchModuleTrainer(clock=clock)
    trainer.bind_tensors({"w": torch.arange(5000.0)})
    options = PublisherOptions(model_name="m", run_id="run", worker_id="t0")
    with Publisher(
        control=control, trainer=trainer, source=source, clock=clock, options=options
    ) as publisher:
        found = publisher.publish(step=0).result()
        (shard,) = control.list_shards(found.version_id)
        assert shard.manifest_endpoint.startswith(f"{source.endpoint}/v1/manifests/run-000000/")
        data = reader.read_manifest(shard.manifest_endpoint, size_max=2**20, timeout_s=5)
        manifest = parse_manifest(data)
        (item,) = manifest.objects
        target = bytearray(item.num_bytes)
        wanted = ObjectRange(object_id=item.object_id, offset=0, size=item.num_bytes)
        read_object(reader, source.endpoint, wanted, memoryview(target), timeout_s=5)
        verify_object(item, memoryview(target))
        assert manifest.root_digest == found.root_digest
    with pytest.raises(FetchError, match="not served"):
        reader.read_manifest(shard.manifest_endpoint, size_max=2**20, timeout_s=5)
    reader.close()
    source.close()
