"""What happens behind training: in order, told of, bounded, and never in training's way."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from paceline.core.errors import DeadlineExceededError
from paceline.refit.errors import (
    ControlError,
    ControlUnavailableError,
    NoFreeArenaError,
    PublishError,
    StagingError,
    VersionSkippedError,
)
from paceline.refit.model import (
    TrainerStagingMode,
    VersionRequest,
    WeightPayloadFormat,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)
from paceline.refit.publisher import (
    PublicationState,
    Publisher,
    PublisherOptions,
    WhenInPlace,
    WhenLeased,
)
from paceline.refit.publisher.line import Job, Line, Outcome, Publication
from paceline.refit.trainers.protocol import TrainerEngineAdapter
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.memory import MemoryObjectServer
from paceline.refit.transports.several import SeveralServers
from paceline.system import system_clock
from paceline.telemetry.events import EVENT_FIELDS
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.trainer import Follower, buffers_of
from paceline.testing.fakes.control_plane import FakeControlPlane

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
IN_PLACE = TrainerStagingMode.IN_PLACE
WAIT_S = 20


class GatedControl(FakeControlPlane):
    """Creates versions when it is let."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.gate = threading.Event()
        self.gate.set()
        self.is_at_gate = threading.Event()

    def create_version(self, request: VersionRequest) -> WeightVersion:
        self.is_at_gate.set()
        assert self.gate.wait(WAIT_S)
        return super().create_version(request)


@dataclass
class World:
    """A publisher, and everything around it."""

    control: GatedControl
    source: MemoryObjectServer
    trainer: TorchModuleTrainer
    publisher: Publisher
    weights: dict[str, torch.Tensor]
    told: list[tuple[str, Mapping[str, object]]]

    def publish(self, step: int = 0) -> Publication:
        self.weights["w"][step::9] += 1
        return self.publisher.publish(step=step)

    def names(self) -> list[str]:
        return [name for name, _ in self.told]

    def lease(self, uid: str) -> Any:
        self.control.register_worker(
            WorkerRegistration(worker_id="g", role=WorkerRole.GENERATOR, model_name="m"),
            ttl_seconds=10_000,
        )
        return self.control.acquire_lease(version_id=uid, worker_id="g", ttl_seconds=1000)

    def shut(self) -> None:
        """Let the next version wait before it is created."""
        self.control.is_at_gate.clear()
        self.control.gate.clear()

    def wait_at_gate(self) -> None:
        assert self.control.is_at_gate.wait(WAIT_S)


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    """Build started worlds; they are closed afterwards."""
    with ExitStack() as parts:

        def build(*, arenas: int = 4, trainer: Any = None, **options: Any) -> World:
            clock = FakeClock()
            control, source = GatedControl(clock), MemoryObjectServer()
            weights = {"w": torch.zeros(200, dtype=torch.bfloat16), "b": torch.ones(5)}
            trainer = trainer or TorchModuleTrainer(
                clock=clock, arenas=arenas, transport="memory", storage=source
            )
            trainer.bind_tensors(weights)
            told: list[tuple[str, Mapping[str, object]]] = []
            made = PublisherOptions(
                model_name="m",
                run_id="run",
                worker_id="t0",
                heartbeat_wait=lambda seconds: True,
                **{"compose": False, "keep_old": 0, **options},
            )
            publisher = Publisher(
                control=control,
                trainer=trainer,
                source=source,
                clock=clock,
                options=made,
                notify=lambda name, fields: told.append((name, fields)),
            )
            publisher.start()
            parts.callback(_close, publisher, control)
            return World(control, source, trainer, publisher, weights, told)

        yield build


def _close(publisher: Publisher, control: GatedControl) -> None:
    control.gate.set()
    with suppress(PublishError, ControlError):  # the test has seen it in its own way
        publisher.close()


def test_training_goes_on_while_a_version_comes_out(make: Make) -> None:
    """Publish returns before anybody was asked; what was captured is what comes out."""
    world = make()
    world.shut()
    first = world.publish(0)
    world.wait_at_gate()
    assert (first.state, first.version) == (PublicationState.UNDERWAY, None)
    with pytest.raises(DeadlineExceededError, match=r"run-000000 is underway after 0 s"):
        first.result(timeout_s=0)
    second = world.publish(1)
    assert str(second.state) == "waiting"
    world.weights["w"].fill_(7)  # the optimizer steps on
    assert not world.publisher.flush(timeout_s=0)
    world.control.gate.set()
    assert world.publisher.flush(timeout_s=WAIT_S)
    assert [each.result().payload_format for each in (first, second)] == [FULL, DELTA]
    assert {first.state, second.state} == {PublicationState.READY}
    said = world.control.versions["run-000001"]
    assert said.base_version_id == "run-000000"
    assert said.description is not None
    assert said.description.parent_root == first.result().root_digest
    assert 0 <= first.result().stall_ms <= first.result().publish_ms


def test_a_failure_is_raised_by_the_next_call_once(make: Make) -> None:
    """Whoever does not ask is told at the next publish, which captures nothing then."""
    world = make()
    first = world.publish(0).result()
    world.control.fail("create_version", ControlError("no room"))
    failed = world.publish(1)
    with pytest.raises(PublishError, match="no room"):
        world.publisher.flush(timeout_s=WAIT_S)
    assert failed.state is PublicationState.FAILED
    assert failed.version is None
    third = world.publish(2).result()  # told once is enough
    assert third.payload_format is DELTA
    assert world.control.versions[third.version_id].base_version_id == first.version_id
    assert world.names() == ["version.published", "version.failed", "version.published"]
    for name, fields in world.told:
        assert set(EVENT_FIELDS[name]) <= fields.keys()
    world.control.fail("create_version", ControlError("no room"))
    world.publish(3)
    assert world.publisher._line.wait_idle(WAIT_S)
    with pytest.raises(PublishError, match="no room"):
        world.publish(4)
    assert world.publish(4).result().payload_format is DELTA


class UnwillingTrainer(TorchModuleTrainer):
    """Gets ready for the next version when it is let, and then cannot."""

    gate: threading.Event | None = None

    def prepare(self, *, payload_format: WeightPayloadFormat) -> None:
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
            raise StagingError("no pages")

    def stage_committed(self) -> Any:
        raise StagingError("no arena")


def test_what_follows_a_version_neither_delays_nor_fails_it(make: Make) -> None:
    """READY is what whoever asks is told; the rest is told of, and tried on, one by one."""
    trainer = UnwillingTrainer(clock=FakeClock(), arenas=4, transport="memory")
    world = make(trainer=trainer, anchor_every=1)
    trainer.gate = threading.Event()
    assert world.publish(0).result(WAIT_S).payload_format is FULL  # prepare waits
    trainer.gate.set()
    second = world.publish(1).result(WAIT_S)
    assert (second.payload_format, second.anchor_error) == (DELTA, "no arena")
    assert world.publisher.flush(timeout_s=WAIT_S)
    assert world.names() == ["version.published", "version.left_undone"] * 2
    assert world.told[1][1]["reason"] == "no pages"
    assert set(EVENT_FIELDS["version.left_undone"]) <= world.told[1][1].keys()


def test_a_delta_behind_a_failed_one_has_the_base_of_before(make: Make) -> None:
    """Two are captured while the first of them fails: the second spans both steps."""
    world = make()
    first = world.publish(0).result()
    follower = Follower()
    world.shut()
    world.control.fail("create_version", ControlError("no room"))
    lost, kept = world.publish(1), world.publish(2)
    world.control.gate.set()
    with pytest.raises(PublishError):
        lost.result()
    assert kept.result().payload_format is DELTA
    versions = world.control.versions
    assert versions[kept.version_id].base_version_id == first.version_id
    description = versions[kept.version_id].description
    assert description is not None
    assert description.parent_root == first.root_digest
    staged = {each.uid: each.staged for each in world.publisher._shelf.all_there()}
    for uid in (first.version_id, kept.version_id):
        follower.install(staged[uid])
    assert follower.live_bytes()["w"] == world.weights["w"].view(torch.uint8).numpy().tobytes()


def test_a_lost_base_costs_one_version_behind_training_too(make: Make) -> None:
    """Captured as a delta and published whole, since the service forgot its base meanwhile."""
    world = make()
    world.publish(0).result()
    world.control.versions.clear()
    world.control.requests.clear()
    world.shut()
    lost, kept = world.publish(1), world.publish(2)
    world.control.gate.set()
    with pytest.raises(PublishError, match="starts afresh"):
        lost.result()
    assert kept.result().payload_format is FULL


def test_whoever_publishes_from_two_threads_gets_two_versions(make: Make) -> None:
    """One captures at a time: the second stands until the first is done, and is the next one."""
    world = make()
    capture, is_inside, is_let = world.trainer.capture, threading.Event(), threading.Event()
    inside: list[str] = []

    def slow(**options: Any) -> Any:
        inside.append(threading.current_thread().name)
        is_inside.set()
        assert is_let.wait(WAIT_S)
        return capture(**options)

    world.trainer.capture = slow  # type: ignore[method-assign]
    made: dict[str, Publication] = {}
    threads = [
        threading.Thread(target=lambda i=i: made.update({str(i): world.publish(i)}), name=str(i))
        for i in range(2)
    ]
    threads[0].start()
    assert is_inside.wait(WAIT_S)
    threads[1].start()
    assert world.publisher._line._turn.locked()
    assert inside == ["0"]
    is_let.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert [made[str(i)].result().sequence for i in range(2)] == [0, 1]


def test_a_publisher_starts_once(make: Make) -> None:
    """Started again, or used after its end, it says what to do instead; the run is not touched."""
    world = make()
    with pytest.raises(PublishError, match="starts once"):
        world.publisher.start()
    assert world.publish(0).result().sequence == 0
    world.publisher.close()
    with pytest.raises(PublishError, match="make another one"):
        world.publish(1)
    with pytest.raises(PublishError, match="starts once"), world.publisher:
        pass


def test_a_step_is_a_number(make: Make) -> None:
    """Whatever counts as one is taken as one, and nothing else gets as far as a sequence."""
    world = make()
    with pytest.raises(TypeError):
        world.publisher.publish(step="last")  # type: ignore[arg-type]
    found = world.publisher.publish(step=torch.tensor(7)).result()  # type: ignore[arg-type]
    assert (found.sequence, found.step) == (0, 7)


@pytest.mark.parametrize("payload", [FULL, DELTA])
def test_as_many_arenas_as_are_asked_for_are_enough(
    make: Make, payload: WeightPayloadFormat
) -> None:
    """With the fewest every version comes out; with one less there would be an end."""
    options = {"payload_format": payload, "stage_wait_s": 0, "anchor_every": 3}
    least = PublisherOptions(
        model_name="m", run_id="r", worker_id="w", payload_format=payload
    ).arenas_min
    for arenas, is_enough in ((least, True), (least - 1, False)):
        world = make(arenas=arenas, **options)
        with nullcontext() if is_enough else pytest.raises(NoFreeArenaError):
            for step in range(7):
                world.publish(step).result()


@pytest.mark.parametrize("policy", list(WhenLeased))
def test_a_full_ring_is_met_as_the_policy_says(make: Make, policy: WhenLeased) -> None:
    """Three arenas, of the base and two captures: the next one waits, goes, or drops one."""
    world = make(arenas=3, when_leased=policy)
    world.publish(0).result()
    world.shut()
    second = world.publish(1)
    world.wait_at_gate()
    third = world.publish(2)
    if policy is WhenLeased.BLOCK:
        threading.Thread(target=world.control.gate.set).start()
    fourth = world.publish(3)
    world.control.gate.set()
    if policy is WhenLeased.SKIP:
        assert fourth.state is PublicationState.SKIPPED
        with pytest.raises(VersionSkippedError, match="left out"):
            fourth.result()
        assert "version.skipped" in world.names()
    else:
        assert fourth.result().sequence == 3
    assert second.result().sequence == 1
    if policy is not WhenLeased.DROP:
        assert third.result().sequence == 2
    assert world.publish(4).result().sequence == 4


def test_a_full_ring_asks_no_dead_service(make: Make) -> None:
    """Versions that fail since nobody answers free their arenas, and training asks nobody."""
    world = make(arenas=3)
    world.publish(0).result()
    world.shut()
    world.publish(1)
    world.wait_at_gate()
    world.publish(2)
    silent = ControlUnavailableError("silent")
    world.control.fail("create_version", silent, times=1000)
    asked: list[str] = []
    delete = world.control.delete_version

    def delete_version(uid: str) -> WeightVersion:
        asked.append(threading.current_thread().name)
        return delete(uid)

    world.control.delete_version = delete_version  # type: ignore[method-assign]
    line = world.publisher._line
    wait = line.wait_for_one

    def open_and_wait(timeout_s: float) -> bool:
        world.control.gate.set()
        return wait(timeout_s)

    line.wait_for_one = open_and_wait  # type: ignore[method-assign]
    third = world.publish(3)
    assert threading.current_thread().name not in asked
    with pytest.raises(ControlUnavailableError, match="silent"):
        third.result()
    assert "version.failed" not in world.names()


def test_drop_prefers_newer_weights(make: Make) -> None:
    """What is captured and has not begun goes first; nobody could lease it."""
    world = make(arenas=3, when_leased=WhenLeased.DROP)
    first = world.publish(0).result()
    world.shut()
    begun = world.publish(1)
    world.wait_at_gate()
    dropped = world.publish(2)
    newest = world.publish(3)
    world.control.gate.set()
    assert dropped.state is PublicationState.SKIPPED
    with pytest.raises(VersionSkippedError, match="newer weights"):
        dropped.result()
    assert newest.result().payload_format is DELTA
    assert world.control.versions[newest.version_id].base_version_id == begun.version_id
    assert begun.result().root_digest != first.root_digest
    world.publisher.flush(timeout_s=WAIT_S)  # the policy is no failure


def test_drop_lets_the_oldest_unleased_version_go(make: Make) -> None:
    """Full versions hold arenas: the oldest that is not leased goes, the newest and leased stay."""
    world = make(arenas=3, when_leased=WhenLeased.DROP, payload_format=FULL, keep_old=9)
    for step in range(3):
        world.publish(step).result()
    world.lease("run-000000")
    assert world.publish(3).result().sequence == 3
    states = {uid: str(version.state) for uid, version in world.control.versions.items()}
    assert states == {
        "run-000000": "READY",
        "run-000001": "RELEASING",
        "run-000002": "READY",
        "run-000003": "READY",
    }


def test_block_gives_up_at_its_deadline(make: Make) -> None:
    """With every arena leased a publish waits for its time, and says what to do."""
    world = make(arenas=2, payload_format=FULL, stage_wait_s=3, keep_old=9)
    for step in range(2):
        world.publish(step).result()
    world.lease("run-000000")
    with pytest.raises(NoFreeArenaError, match="more arenas"):
        world.publish(2)


def test_a_version_is_staged_while_the_one_before_is_leased(make: Make) -> None:
    """A lease keeps its bytes, whatever is captured, committed and released after it."""
    world = make(arenas=4, payload_format=FULL, keep_old=0)
    follower, wanted = Follower(), world.weights["w"].clone()
    first = world.publish(0)
    wanted[0::9] += 1
    first.result()
    lease = world.lease("run-000000")
    for step in range(1, 5):
        world.publish(step).result()
    (staged,) = [
        each.staged for each in world.publisher._shelf.all_there() if each.uid == "run-000000"
    ]
    follower.install(staged)
    assert follower.live_bytes()["w"] == wanted.view(torch.uint8).numpy().tobytes()
    world.control.release_lease(lease)


def test_steps_that_follow_at_once_compute_the_same() -> None:
    """A model that is published after every step is bit for bit the one that is not."""
    models = [Regression(), Regression()]
    roots = set()
    clock = FakeClock()
    trainer = TorchModuleTrainer(clock=clock, transport="memory")
    trainer.bind_tensors(models[1])
    options = PublisherOptions(
        model_name="m", run_id="r", worker_id="t", heartbeat_wait=lambda seconds: True
    )
    with Publisher(
        control=FakeControlPlane(clock=clock),
        trainer=trainer,
        source=MemoryObjectServer(),
        clock=clock,
        options=options,
    ) as publisher:
        publications = []
        for step in range(6):
            models[0].train_once(step)
            models[1].train_once(step)
            publications.append(publisher.publish(step=step))
        roots = {each.result().root_digest for each in publications}
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)
    assert len(roots) == 6


class Regression(torch.nn.Module):
    """A small model with a real optimizer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.inner = torch.nn.Linear(40, 30)
        self.outer = torch.nn.Linear(30, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_once(self, step: int) -> None:
        """Take one step."""
        inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.outer(self.inner(inputs).relu()).square().mean().backward()
        self.optimizer.step()


def test_adapters_that_know_one_way_are_published_too(make: Make) -> None:
    """One that signs no capture is staged by training, after the version before."""

    class Plain(TrainerEngineAdapter):
        def __init__(self) -> None:
            self._inner = TorchModuleTrainer(clock=FakeClock(), transport="memory")
            self.threads: set[str] = set()

        source_slot_id = property(lambda self: self._inner.source_slot_id)
        supported_staging_modes = property(lambda self: self._inner.supported_staging_modes)
        supported_payload_formats = property(lambda self: self._inner.supported_payload_formats)

        def bind_tensors(self, tensors: Any) -> str:
            return self._inner.bind_tensors(tensors)

        def stage_shard(self, **options: Any) -> Any:
            self.threads.add(threading.current_thread().name)
            return self._inner.stage_shard(**options)

        def commit_staged(self, staged: Any) -> None:
            self._inner.commit_staged(staged)

        def discard_staged(self, staged: Any) -> None:
            self._inner.discard_staged(staged)

        def release_staged(self, staged: Any) -> None:
            self._inner.release_staged(staged)

    plain = Plain()
    world = make(trainer=plain)
    found = [world.publish(step) for step in range(3)]
    assert [each.result().payload_format for each in found] == [FULL, DELTA, DELTA]
    assert plain.threads == {threading.current_thread().name}


def test_closing_finishes_what_was_captured(make: Make) -> None:
    """What waits is published before the publisher is closed, and a failure of it is raised."""
    world = make(close_wait_s=WAIT_S)
    world.shut()
    found = [world.publish(step) for step in range(3)]
    world.control.fail("create_version", ControlError("no room"), skip=2)
    world.control.gate.set()
    with pytest.raises(PublishError, match="no room"):
        world.publisher.close()
    assert [each.state for each in found[:2]] == [PublicationState.READY] * 2
    world.publisher.close()


def test_a_version_that_outlives_its_publisher_does_not_come_out(make: Make) -> None:
    """Closing does not wait for ever; what ends after it leaves no trace."""
    world = make(close_wait_s=0.05, control_wait_s=0.05)
    world.publish(0).result()
    world.shut()
    late = world.publish(1)
    world.wait_at_gate()
    world.publisher.close()
    later = world.publisher._line
    world.control.gate.set()
    assert later.wait_idle(WAIT_S)
    with suppress(PublishError):
        late.result()
    assert {str(each.state) for each in world.control.versions.values()} == {"RELEASING"}


def test_closing_has_an_end() -> None:
    """A job that does not end is left; those behind it are said not to have come out."""
    failed: list[str] = []
    line = Line(on_failure=lambda publication, cause: failed.append(publication.version_id))
    gate, given_back = threading.Event(), []
    line.start()
    jobs = [
        Job(
            publication=Publication(version_id=f"v{number}", sequence=number, step=0, wait_s=1),
            work=lambda: _wait(gate),
            give_back=lambda number=number: given_back.append(number),  # type: ignore[misc]
        )
        for number in range(2)
    ]
    for job in jobs:
        line.hand_over(job)
    assert not line.close(0.05)
    assert (failed, given_back) == (["v1"], [1])
    with pytest.raises(PublishError, match="closed"):
        line.hand_over(jobs[1])
    gate.set()
    assert line.wait_idle(WAIT_S)
    with pytest.raises(PublishError, match="v1"):
        line.raise_unseen()


def _wait(gate: threading.Event) -> Any:
    assert gate.wait(WAIT_S)
    return Outcome(version=None)  # type: ignore[arg-type] # nobody asks


def test_failed_uploads_and_failed_creates_leave_nothing(make: Make) -> None:
    """What WRITE_TO_STORAGE uploaded for a version that did not come out is withdrawn."""
    world = make(staging_mode=TrainerStagingMode.WRITE_TO_STORAGE)
    world.publish(0).result()
    world.control.fail("create_version", ControlError("no room"))
    with pytest.raises(PublishError):
        world.publish(1).result()
    assert len(world.source._objects._entries) == 1
    assert world.publish(2).result().payload_format is DELTA
    assert len(world.source._objects._entries) == 2


def test_an_upload_that_broke_off_is_not_read_later(make: Make) -> None:
    """What it left readable lay in memory that is used again: the same weights are served anew."""
    world = make(staging_mode=TrainerStagingMode.WRITE_TO_STORAGE, payload_format=FULL)
    serve, broken = world.source.serve_object, PublishError("the store went away")

    def break_off(object_id: str, parts: Sequence[memoryview]) -> None:
        serve(object_id, parts)
        raise broken

    world.source.serve_object = break_off  # type: ignore[method-assign]
    with pytest.raises(PublishError, match="went away"):
        world.publish(0).result()
    world.source.serve_object = serve  # type: ignore[method-assign]
    assert world.source._objects._entries == {}
    assert world.publisher.publish(step=1).result().sequence == 1
    assert bytes(world.weights["w"].view(torch.uint8).numpy()) in read_whole(world, "run-000001")


class Slow(MemoryObjectServer):
    """A transport whose readers know where the memory is."""

    replace_object = None  # type: ignore[assignment]


def test_in_place_steps_copy_what_readers_need(make: Make) -> None:
    """With the policy ``copy`` the optimizer's own hook copies, and the lease keeps its bytes."""
    world = make(staging_mode=IN_PLACE, payload_format=FULL, when_in_place=WhenInPlace.COPY)
    parameter = torch.nn.Parameter(world.weights["w"], requires_grad=False)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    world.publisher.protect(optimizer)
    follower = Follower()
    wanted = bytes(world.weights["w"].view(torch.uint8).numpy())
    world.publisher.publish(step=0).result()
    world.lease("run-000000")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert bytes(world.weights["w"].view(torch.uint8).numpy()) != wanted
    assert str(world.control.versions["run-000000"].state) == "READY"
    data = read_whole(world, "run-000000")
    assert wanted in data
    second = world.publisher.publish(step=1).result()
    assert second.payload_format is FULL
    staged = {each.uid: each.staged for each in world.publisher._shelf.all_there()}
    follower.install(staged["run-000001"])
    assert follower.live_bytes()["w"] == world.weights["w"].view(torch.uint8).numpy().tobytes()
    optimizer.step()
    world.publisher.publish(step=2).result()


def read_whole(world: World, uid: str) -> bytes:
    """Read what is served of a version now."""
    (version,) = [each for each in world.publisher._shelf.all_there() if each.uid == uid]
    found = b""
    for item in buffers_of(version.staged).objects:
        with world.source._objects.reading(item.object_id) as held:
            assert held is not None
            found += b"".join(held.pieces(0, held.num_bytes))
    return found


def test_in_place_waits_where_nothing_can_be_copied(make: Make) -> None:
    """Without room, or over a transport that cannot move, the version goes and steps wait."""
    world = make(
        staging_mode=IN_PLACE, payload_format=FULL, when_in_place=WhenInPlace.COPY, stage_wait_s=0
    )
    world.publisher._live._source = SeveralServers([Slow()])
    world.publisher.publish(step=0).result()
    lease = world.lease("run-000000")
    with pytest.raises(StagingError, match="must not step"):
        world.publisher.before_step()
    world.control.release_lease(lease)
    world.publisher.before_step()
    assert str(world.control.versions["run-000000"].state) == "RELEASING"


def test_weights_that_move_before_anybody_is_told(make: Make) -> None:
    """Who writes past every hook while a version comes out makes that version fail."""
    world = make(staging_mode=IN_PLACE, payload_format=FULL)
    world.shut()
    publication = world.publisher.publish(step=0)
    world.wait_at_gate()
    world.weights["w"] += 1
    world.control.gate.set()
    with pytest.raises(StagingError, match="moved"):
        publication.result()
    assert world.publisher.publish(step=1).result().sequence == 1


@pytest.mark.parametrize("policy", list(WhenInPlace))
def test_mutation_during_a_lease_is_found(make: Make, policy: WhenInPlace) -> None:
    """The next step is refused with the reason, and the version goes: its bytes are not its own."""
    world = make(staging_mode=IN_PLACE, payload_format=FULL, when_in_place=policy, stage_wait_s=0)
    world.publisher.publish(step=0).result()
    lease = world.lease("run-000000")
    world.weights["w"] += 1
    for _ in range(2):
        with pytest.raises(StagingError, match="the version counters moved"):
            world.publisher.before_step()
    assert str(world.control.versions["run-000000"].state) == "RELEASING"
    world.control.release_lease(lease)
    with suppress(StagingError):
        world.publisher.before_step()  # takes it down
    world.publisher.before_step()
    assert world.publisher.publish(step=1).result().sequence == 1


def test_sequences_are_never_used_again(make: Make) -> None:
    """Skipped and failed versions leave gaps, so that a uid is one state for ever."""
    world = make()
    sequences = []
    for step in range(4):
        if step == 1:
            world.control.fail("create_version", ControlError("no room"))
        publication = world.publish(step)
        sequences.append(publication.sequence)
        with nullcontext() if step != 1 else pytest.raises(PublishError):
            publication.result()
    assert all(after == before + 1 for before, after in pairwise(sequences))
    assert "run-000001" not in {
        uid for uid, version in world.control.versions.items() if str(version.state) == "READY"
    }


def test_the_real_clock_waits_for_the_line(make: Make) -> None:
    """A publish that has to wait for the one before waits for its end, not for time."""
    world = make(arenas=3)
    world.publisher._capturer._clock = system_clock()
    world.publish(0).result()
    world.shut()
    second = world.publish(1)
    world.wait_at_gate()
    world.publish(2)
    done: list[Sequence[Any]] = []
    thread = threading.Thread(target=lambda: done.append([world.publish(3).result()]))
    thread.start()
    world.control.gate.set()
    thread.join(WAIT_S)
    assert done
    assert second.result().sequence == 1
