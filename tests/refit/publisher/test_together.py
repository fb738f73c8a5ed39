"""Several processes, one version: they find each other's, and nobody waits for the dead."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from paceline.refit.control.ledger import ControlLedger
from paceline.refit.digest import version_root
from paceline.refit.errors import AccessRefusedError, ControlError, PublishError
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.model import (
    Event,
    Region,
    Shard,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)
from paceline.refit.publisher import (
    PublishedVersion,
    Publisher,
    PublisherOptions,
    WhenUnproven,
)
from paceline.refit.publisher.resuming import BROKEN, CONTINUED
from paceline.refit.publisher.together import Together
from paceline.refit.publisher.values import version_uid
from paceline.refit.trainers.protocol import Collected
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.store.memory import MemoryStore
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.control import counting

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
SLOTS = ("a", "b")
ROWS = 8


class Half(TorchModuleTrainer):
    """One of two processes: half of the rows of one tensor."""

    def __init__(self, slot: str, clock: FakeClock, *, fill: float = 0.0) -> None:
        super().__init__(clock=clock, transport="memory")
        self._slot = slot
        self.weights = torch.full((ROWS // 2, 5), fill)

    @property
    def expected_source_slots(self) -> tuple[str, ...]:
        return SLOTS

    def _collect(self, source: Any) -> Collected:
        at = SLOTS.index(self._slot) * ROWS // 2
        region = Region(global_shape=(ROWS, 5), offsets=(at, 0))
        return Collected(tensors={"w": self.weights}, regions={"w": region})


class WatchedControl(ControlLedger):
    """Lets the test act while somebody waits: whoever waits asks who lives, or what is told."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(MemoryStore(clock=clock), nonce=counting())
        self.refuses = False
        self.meanwhile: list[Callable[[], None]] = []

    def list_versions(
        self, model_name: str, *, run_id: str | None = None
    ) -> Sequence[WeightVersion]:
        if self.refuses:
            raise AccessRefusedError("this is not for you")
        return super().list_versions(model_name, run_id=run_id)

    def list_workers(self, model_name: str) -> Sequence[WorkerRegistration]:
        if self.meanwhile:
            self.meanwhile.pop()()
        return super().list_workers(model_name)

    def list_events(self, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        if self.meanwhile:
            self.meanwhile.pop()()
        return super().list_events(after=after, limit=limit)


@dataclass
class World:
    """A control plane, and the processes that were started."""

    clock: FakeClock = field(default_factory=FakeClock)
    started: list[Publisher] = field(default_factory=list)
    told: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control = WatchedControl(self.clock)

    def rank(
        self,
        slot: str,
        *,
        incarnation: str = "1",
        name: str = "",
        fill: float = 0.0,
        policy: WhenUnproven = WhenUnproven.ANCHOR,
    ) -> Publisher:
        """Start a process whose weights are all the same."""
        trainer = Half(slot, self.clock, fill=fill)
        trainer.bind_tensors({})
        publisher = Publisher(
            control=self.control,
            trainer=trainer,
            source=MemoryObjectServer(),
            clock=self.clock,
            options=PublisherOptions(
                model_name="m",
                run_id="run",
                worker_id=name or f"t-{slot}-{len(self.started)}",
                incarnation=incarnation,
                when_unproven=policy,
                close_wait_s=0.1,
                heartbeat_wait=lambda seconds: True,  # no heartbeat: tests register
            ),
            notify=lambda name, fields: self.told.append((name, fields)),
        )
        self.started.append(publisher)
        publisher.start()
        return publisher

    def again(
        self, *, fills: Sequence[float] = (0.0, 0.0), **options: Any
    ) -> tuple[Publisher, Publisher]:
        """Start both anew, the second while the first waits for it."""
        self.told.clear()
        found: list[Publisher] = []

        def start_second() -> None:
            found.append(self.rank("b", incarnation="2", fill=fills[1], **options))

        self.control.meanwhile.append(start_second)
        return self.rank("a", incarnation="2", fill=fills[0], **options), found[0]

    def together(self, first: Publisher, second: Publisher, *, step: int) -> list[PublishedVersion]:
        """Let the second publish while the first waits for it."""
        found = []
        self.control.meanwhile.append(lambda: found.append(self.publish(second, step)))
        return [self.publish(first, step), *found]

    def publish(self, rank: Publisher, step: int) -> PublishedVersion:
        """Take a step and publish it; step 0 is the weights as they are."""
        half: Any = rank._trainer
        half.weights[0, step % 5] += min(step, 1)
        return rank.publish(step=step).result(60)

    def states(self) -> dict[str, VersionState]:
        return {version.uid: version.state for version in self.control.list_versions("m")}

    def roots(self, uid: str) -> dict[str, str]:
        """The root digest of each slot, as its manifest says."""
        reader = MemoryObjectReader()
        return {
            shard.source_slot_id: parse_manifest(
                reader.read_manifest(shard.manifest_endpoint, size_max=2**20, timeout_s=1)
            ).root_digest
            for shard in self.control.list_shards(uid)
        }


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for publisher in made.started:
        publisher.close()


def test_whoever_comes_first_makes_the_version(world: World) -> None:
    """Full, then deltas, in whatever order they come; one root over both slots."""
    a, b = world.rank("a"), world.rank("b")
    rounds = [
        world.together(*pair, step=step) for step, pair in enumerate([(a, b), (b, a), (a, b)])
    ]
    for step, (one, other) in enumerate(rounds):
        assert one.version_id == other.version_id == f"run-{step:06d}"
        assert one.root_digest == other.root_digest
        assert one.payload_format is other.payload_format is (DELTA if step else FULL)
        version = world.control.get_version(one.version_id)
        assert version.state is VersionState.READY
        assert version.expected_source_slots == SLOTS
        assert version.description is not None
        roots = world.roots(one.version_id)
        assert version.description.root_digest == version_root(roots) == one.root_digest
        before = rounds[step - 1][0].root_digest if step else None
        assert version.description.parent_root == before
        assert version.description.full_bytes == one.full_bytes == ROWS * 5 * 4
        assert one.payload_bytes == other.payload_bytes == version.description.payload_bytes


def test_nobody_waits_for_the_dead(world: World) -> None:
    """A version that lacks their slot fails; after a restart the next is full."""
    a, b = world.rank("a"), world.rank("b")
    world.together(a, b, step=0)
    asked_s = world.clock.monotonic()
    with pytest.raises(PublishError, match="lacks b, whose process is gone"):
        world.publish(a, 1)
    assert world.clock.monotonic() - asked_s < 5
    assert world.states()["run-000001"] is VersionState.RELEASING
    again = world.rank("b")
    for published in world.together(a, again, step=2):
        assert (published.version_id, published.payload_format) == ("run-000002", FULL)
    for published in world.together(again, a, step=3):
        assert published.payload_format is DELTA


def test_a_process_that_never_came_is_waited_for_until_the_deadline(world: World) -> None:
    a = world.rank("a")
    with pytest.raises(PublishError, match="lacks b after 60 s"):
        world.publish(a, 0)


def test_a_process_without_a_base_makes_all_start_anew(world: World) -> None:
    """It cannot join a delta: that one is given up, and the next is full for everybody."""
    a, b = world.rank("a"), world.rank("b")
    world.together(a, b, step=0)
    fresh = world.rank("b")
    problems: list[PublishError] = []

    def try_it() -> None:
        with pytest.raises(PublishError) as caught:
            world.publish(fresh, 1)
        problems.append(caught.value)

    world.control.meanwhile.append(try_it)
    with pytest.raises(PublishError):
        world.publish(a, 1)
    assert len(problems) == 1
    for published in world.together(a, fresh, step=2):
        assert published.payload_format is FULL


def test_what_another_start_left_is_not_gone_on_with(world: World) -> None:
    """The same step of an earlier start of all processes is another version."""
    left = VersionRequest(
        model_name="m",
        idempotency_key="run-000000:step 0:1",
        payload_format=FULL,
        expected_source_slots=SLOTS,
        uid="run-000000",
    )
    world.control.create_version(left)
    a, b = world.rank("a", incarnation="2"), world.rank("b", incarnation="2")
    first, second = world.together(b, a, step=0)
    assert first.version_id == second.version_id == "run-000001"


def test_another_step_is_another_version(world: World) -> None:
    """A process that is a step ahead does not fill a slot of the step before."""
    a, b = world.rank("a"), world.rank("b")

    def ahead() -> None:
        with pytest.raises(PublishError, match="lacks a"):
            world.publish(b, 1)

    world.control.meanwhile.append(ahead)
    with pytest.raises((PublishError, ControlError)):
        world.publish(a, 0)
    for published in world.together(a, b, step=2):
        assert published.payload_format is FULL


def test_who_leaves_as_soon_as_it_is_out_has_not_given_up(world: World) -> None:
    """The last process may close before the others look again: theirs came out all the same."""
    a, b = world.rank("a"), world.rank("b")
    left = []

    def publish_and_leave() -> None:
        left.append(world.publish(b, 0))
        b.close()

    world.control.meanwhile.append(publish_and_leave)
    published = world.publish(a, 0)
    assert world.states()[published.version_id] is VersionState.RELEASING
    assert published.root_digest == left[0].root_digest
    assert a.wait_installed(timeout_s=30)


@pytest.mark.parametrize("order", [(("a", 4), ("b", 5)), (("b", 5), ("a", 4))])
def test_whoever_is_at_a_later_step_is_not_waited_for(
    world: World, order: Sequence[tuple[str, int]]
) -> None:
    """One failed to stage and went on: the others give that step up at once, and only those."""
    registrations = {slot: f"t@run/{slot}" for slot in SLOTS}
    parts = {}
    for slot, worker_id in registrations.items():
        registration = WorkerRegistration(
            worker_id=worker_id, role=WorkerRole.TRAINER, model_name="m"
        )
        world.control.register_worker(registration, ttl_seconds=1000)
        parts[slot] = Together(
            control=world.control,
            clock=world.clock,
            options=PublisherOptions(model_name="m", run_id="run", worker_id="t"),
            slot=slot,
            slots=SLOTS,
        )
    uids = [bring(world, parts[slot], slot, step=step) for slot, step in order]
    if order[0][0] == "b":
        uids.reverse()
    started = world.clock.monotonic()
    with pytest.raises(PublishError, match="lacks b, which went on to step 5 without step 4"):
        parts["a"].wait_ready(uids[0], step=4)
    assert world.clock.monotonic() == started
    with pytest.raises(PublishError, match="lacks a after 60 s"):  # it may still come
        parts["b"].wait_ready(uids[1], step=5)


def test_a_process_that_was_stopped_catches_up(world: World) -> None:
    """What the others gave up meanwhile is given up by it too; tried again, it is a new version."""
    options = PublisherOptions(model_name="m", run_id="run", worker_id="t")
    parts = {
        slot: Together(
            control=world.control, clock=world.clock, options=options, slot=slot, slots=SLOTS
        )
        for slot in SLOTS
    }
    registration = WorkerRegistration(worker_id="t@run/a", role=WorkerRole.TRAINER, model_name="m")
    world.control.register_worker(registration, ttl_seconds=1000)
    for step in (4, 5):
        world.control.delete_version(bring(world, parts["a"], "a", step=step))
    after = -1
    for step in (4, 5):
        turn = parts["b"].agree(step=step, after=after, head_uid=None, needs_full=False)
        assert turn.is_given_up
        after = turn.sequence
    again = parts["b"].agree(step=5, after=after, head_uid=None, needs_full=True)
    assert (again.sequence, again.is_given_up) == (2, False)
    assert bring(world, parts["a"], "a", step=6) == "run-000002"
    found = parts["b"].agree(step=6, after=after, head_uid=None, needs_full=False)
    assert (found.sequence, found.is_full, found.is_given_up) == (2, True, False)


def bring(world: World, part: Together, slot: str, *, step: int) -> str:
    """Create the version of a step, or find it, and bring a slot."""
    turn = part.agree(step=step, after=-1, head_uid=None, needs_full=True)
    uid = version_uid("run", turn.sequence)
    wanted = VersionRequest(
        model_name="m",
        idempotency_key=uid,
        payload_format=FULL,
        base_version_id=None,
        expected_source_slots=(slot,),
        uid=uid,
    )
    world.control.create_version(part.request(wanted, step=step))
    shard = Shard(
        version_id=uid,
        source_slot_id=slot,
        worker_id=f"t@run/{slot}",
        tensor_count=1,
        total_bytes=4,
        manifest_digest="0" * 64,
        manifest_endpoint="memory://x",
    )
    world.control.create_shard(shard)
    return uid


def test_a_restarted_process_gives_up_what_it_had_filled(world: World) -> None:
    """Its bytes went with it, so the version must never become READY."""
    a = world.rank("a")

    def restart() -> None:
        world.rank("a", name="t-a-again")

    world.control.meanwhile.append(restart)
    with pytest.raises(PublishError, match="given up by another process"):
        world.publish(a, 0)


def test_a_control_service_that_is_away_costs_no_memory(world: World) -> None:
    """What was captured is given back if nobody can say which version it is to be."""
    a, b = world.rank("a"), world.rank("b")
    world.together(a, b, step=0)
    world.control.refuses = True
    for step in range(1, 8):
        with pytest.raises(ControlError, match="not for you"):
            world.publish(a, step)
    world.control.refuses = False
    for published in world.together(a, b, step=9):
        assert published.sequence == 1


def test_all_that_have_the_last_weights_continue(world: World) -> None:
    """Each proves its own slot; the next version is a delta that follows from the last one.

    Its anchor needs both at once: see the ranks that are processes, in trainers/test_sharded.py.
    """
    last, _ = world.together(world.rank("a"), world.rank("b"), step=0)
    a, b = world.again()
    assert [name for name, _ in world.told] == [CONTINUED, CONTINUED]
    for _, fields in world.told:
        assert fields["last_version_id"] == last.version_id
        assert fields["root_digest"] == last.root_digest
    for published in world.together(b, a, step=1):
        assert (published.version_id, published.payload_format) == ("run-000001", DELTA)
        assert published.changed_elements == 2
    said = world.control.get_version("run-000001").description
    assert said is not None
    assert said.parent_root == last.root_digest


@pytest.mark.parametrize("fills", [(0.0, 3.0), (3.0, 0.0)])
def test_one_with_other_weights_makes_all_start_anew(
    world: World, fills: tuple[float, float]
) -> None:
    """No version is lost over it: all know before the first one, and say so."""
    last, _ = world.together(world.rank("a"), world.rank("b"), step=0)
    a, b = world.again(fills=fills)
    assert [name for name, _ in world.told] == [BROKEN, BROKEN]
    assert {fields["last_version_id"] for _, fields in world.told} == {last.version_id}
    assert len({fields["root_digest"] for _, fields in world.told}) == 1
    for published in world.together(a, b, step=1):
        assert (published.version_id, published.payload_format) == ("run-000001", FULL)
    said = world.control.get_version("run-000001").description
    assert said is not None
    assert said.parent_root is None
    for published in world.together(b, a, step=2):
        assert published.payload_format is DELTA


def test_older_weights_are_named_and_may_have_a_run_of_their_own(world: World) -> None:
    """All take the same new run id, and meet there again."""
    a, b = world.rank("a"), world.rank("b")
    for step in (0, 1):
        world.together(a, b, step=step)
    a, b = world.again(policy=WhenUnproven.NEW_RUN)
    assert all("those of run-000000" in str(fields["reason"]) for _, fields in world.told)
    assert a.run_id == b.run_id == "run.2"
    for step, pair in enumerate([(a, b), (b, a)]):
        for published in world.together(*pair, step=step):
            assert published.version_id == f"run.2-{step:06d}"
            assert published.payload_format is (DELTA if step else FULL)


def test_others_may_be_refused_and_then_nobody_starts(world: World) -> None:
    """Also where the process itself has what it should have."""
    world.together(world.rank("a"), world.rank("b"), step=0)
    refused = []

    def start_second() -> None:
        with pytest.raises(PublishError) as caught:
            world.rank("b", incarnation="2", fill=1.0, policy=WhenUnproven.REFUSE)
        refused.append(str(caught.value))

    world.control.meanwhile.append(start_second)
    with pytest.raises(PublishError, match="load the weights of step 0"):
        world.rank("a", incarnation="2", policy=WhenUnproven.REFUSE)
    assert len(refused) == 1
    a, b = world.again(policy=WhenUnproven.REFUSE)
    assert {each.sequence for each in world.together(a, b, step=1)} == {1}


def test_one_that_does_not_come_is_waited_for_until_the_deadline(world: World) -> None:
    """What an earlier start told does not count."""
    world.together(world.rank("a"), world.rank("b"), step=0)
    world.again()
    world.told.clear()
    asked_s = world.clock.monotonic()
    world.rank("a", incarnation="3")
    assert 60 < world.clock.monotonic() - asked_s < 62
    ((name, fields),) = [each for each in world.told if each[0].startswith("chain.")]
    assert name == BROKEN
    assert "not every process of this trainer" in str(fields["reason"])


def test_one_that_comes_back_to_living_ones_does_not_wait_for_them(world: World) -> None:
    """They began before and went on since: nobody else starts now."""
    a, b = world.rank("a"), world.rank("b")
    world.together(a, b, step=0)
    world.control.meanwhile += [b._heartbeat.register] * 200
    asked_s = world.clock.monotonic()
    again = world.rank("a")
    assert world.clock.monotonic() - asked_s < 10
    world.control.meanwhile.clear()
    assert world.told[-1][0] == BROKEN
    for published in world.together(again, b, step=1):
        assert published.payload_format is FULL
