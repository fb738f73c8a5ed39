"""A trainer that starts again goes on with the chain if it has the weights, and says so if not."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.waiting import wait_until
from paceline.refit.control.auth import TokenRole
from paceline.refit.errors import PublishError
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.model import (
    CompletionFence,
    ObjectRange,
    StagedWeightVersionShardData,
    TrainerStagingMode,
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
    WeightVersionShardManifest,
)
from paceline.refit.plan.install import Holding, plan_install
from paceline.refit.publisher import Publisher, PublisherOptions, WhenUnproven
from paceline.refit.publisher.resuming import BROKEN, CONTINUED, begin
from paceline.refit.staging.shard import StagedBuffers, StagedObject
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.http.reader import HttpObjectReader
from paceline.refit.transports.memory import MemoryObjectServer
from paceline.refit.transports.protocol import read_object
from paceline.store.memory import MemoryStore
from paceline.system import chance, system_clock
from paceline.telemetry.events import EVENT_FIELDS
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.trainer import Follower
from paceline.testing.fakes.control import TOKENS, LoopbackControl
from paceline.testing.fakes.control_plane import FakeControlPlane
from paceline.testing.killed_trainer import DATA_TOKEN, PUBLISH_POINTS

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
WAIT_S = 60


def version(uid: str, sequence: int, root: str, **more: Any) -> WeightVersion:
    """A version as the service lists it."""
    said = VersionDescription(
        run_id=more.pop("run_id", "run"), sequence=sequence, step=10 * sequence, root_digest=root,
        parent_root=None, payload_bytes=1, full_bytes=1, changed_elements=1, total_elements=1,
    )  # fmt: skip
    found = WeightVersion(
        uid=uid, model_name="m", payload_format=DELTA, state=VersionState.READY, description=said,
        base_version_id=None, expected_source_slots=("s",), idempotency_key=uid,
        layout_signature="", created_at_unix_ms=0,
    )  # fmt: skip
    return replace(found, **more)


LISTED = [
    version("run-000000", 0, "r0"),
    version("run-000001", 1, "r1"),
    version("run-000001-full", 1, "r1"),
    version("run-000001-from-000000", 1, "r1"),
    version("run-000002", 2, "r2", state=VersionState.STAGING),
    version("other-000007", 7, "r7", run_id="other"),
    version("run.2-000000", 0, "r0", run_id="run.2"),
]


def test_equal_weights_go_on_after_everything_that_was_begun() -> None:
    """The head is the last that came out; a uid that was created is not used again."""
    found = begin(LISTED, run_id="run", root_digest="r1", policy=WhenUnproven.REFUSE)
    assert (found.run_id, found.next_sequence, found.event) == ("run", 3, CONTINUED)
    assert found.head is not None
    assert (found.head.uid, found.head.root_digest) == ("run-000001", "r1")


def test_a_run_that_has_nothing_begins() -> None:
    """No version, or none that came out: nothing is compared and nothing told."""
    assert begin([], run_id="run", root_digest="", policy=WhenUnproven.REFUSE).next_sequence == 0
    found = begin(LISTED[4:], run_id="run", root_digest="", policy=WhenUnproven.REFUSE)
    assert (found.next_sequence, found.head, found.event) == (3, None, "")


@pytest.mark.parametrize(
    ("root", "said"), [("r0", r"those of run-000000 \(step 0\)"), ("x" * 64, "has no version of")]
)
def test_other_weights_are_told_apart(root: str, said: str) -> None:
    """Older ones are named; each policy does what it says, and none counts anew in silence."""
    anchor = begin(LISTED, run_id="run", root_digest=root, policy=WhenUnproven.ANCHOR)
    assert (anchor.run_id, anchor.next_sequence, anchor.head) == ("run", 3, None)
    other = begin(LISTED, run_id="run", root_digest=root, policy=WhenUnproven.NEW_RUN)
    assert (other.run_id, other.next_sequence, other.head) == ("run.3", 0, None)
    for found in (anchor, other):
        assert found.event == BROKEN
        assert set(EVENT_FIELDS[BROKEN]) <= found.to_fields().keys()
        assert found.to_fields()["last_version_id"] == "run-000001"
    with pytest.raises(PublishError, match=said + ".*load the weights of step 10"):
        begin(LISTED, run_id="run", root_digest=root, policy=WhenUnproven.REFUSE)


class World:
    """A run whose trainer starts more than once."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.control = FakeControlPlane(clock=self.clock)
        self.told: list[tuple[str, Mapping[str, object]]] = []
        self.publishers: list[Publisher] = []

    def start(self, value: float, **options: Any) -> tuple[Publisher, torch.Tensor]:
        """Start a trainer whose weights are ``value``; the one before is just gone."""
        weights = torch.full((300,), value)
        source = MemoryObjectServer()
        trainer = TorchModuleTrainer(clock=self.clock, transport="memory")
        trainer.bind_tensors({"w": weights})
        made = PublisherOptions(
            model_name="m",
            run_id="run",
            worker_id=f"t{len(self.publishers)}",
            heartbeat_wait=lambda seconds: True,
            **{"compose": False, **options},
        )
        publisher = Publisher(
            control=self.control,
            trainer=trainer,
            source=source,
            clock=self.clock,
            options=made,
            notify=lambda name, fields: self.told.append((name, fields)),
        )
        publisher.start()
        self.publishers.append(publisher)
        return publisher, weights

    def said(self, uid: str) -> VersionDescription:
        found = self.control.versions[uid].description
        assert found is not None
        return found


@pytest.fixture
def world() -> Iterator[World]:
    """A run; every trainer of it is closed."""
    world = World()
    yield world
    for publisher in world.publishers:
        publisher.close()


@pytest.mark.parametrize("payload", [DELTA, FULL])
@pytest.mark.parametrize("mode", [TrainerStagingMode.COPY_TO_HOST, TrainerStagingMode.IN_PLACE])
def test_proven_weights_continue(
    world: World, payload: WeightPayloadFormat, mode: TrainerStagingMode
) -> None:
    """What comes next follows from the last version; as a delta where a base can be kept."""
    options = {"payload_format": payload, "staging_mode": mode}
    publisher, _ = world.start(1.0, **options)
    last = publisher.publish(step=4).result()
    again, weights = world.start(1.0, **options)
    assert world.told[-1][0] == CONTINUED
    again.before_step()
    weights[7] = 3.0
    found = again.publish(step=5).result()
    assert (found.version_id, found.sequence) == ("run-000001", 1)
    assert world.said("run-000001").parent_root == last.root_digest
    is_delta = payload is DELTA and mode is TrainerStagingMode.COPY_TO_HOST
    assert found.payload_format is (DELTA if is_delta else FULL)
    assert found.changed_elements == (1 if is_delta else 300)
    assert found.anchor_id == ("run-000001-full" if is_delta else None)


def test_other_weights_start_anew_and_say_so(world: World) -> None:
    """The default: next sequence, full, no parent, an event; the version after is a delta again."""
    publisher, weights = world.start(1.0)
    publisher.publish(step=0).result()
    weights[0] = 9.0
    publisher.publish(step=1).result()
    again, weights = world.start(1.0)
    name, fields = world.told[-1]
    assert name == BROKEN
    assert "those of run-000000 (step 0), not those of run-000001" in str(fields["reason"])
    found = again.publish(step=0).result()
    assert (found.version_id, found.payload_format) == ("run-000002", FULL)
    assert world.said("run-000002").parent_root is None
    weights[1] = 4.0
    assert again.publish(step=1).result().payload_format is DELTA


def test_other_weights_may_have_a_run_of_their_own(world: World) -> None:
    """With ``new-run`` the old one stays as it is, and the new one begins with an anchor."""
    world.start(1.0)[0].publish(step=0).result()
    again, _ = world.start(2.0, when_unproven=WhenUnproven.NEW_RUN)
    assert again.run_id == "run.2"
    found = again.publish(step=0).result()
    assert (found.version_id, found.payload_format) == ("run.2-000000", FULL)
    assert world.said("run.2-000000").run_id == "run.2"
    assert again.wait_installed(timeout_s=30)


def test_other_weights_may_be_refused(world: World) -> None:
    """With ``refuse`` nothing starts, and the trainer gives back what it took for the proof."""
    world.start(1.0)[0].publish(step=0).result()
    with pytest.raises(PublishError, match=r"load the weights of step 0.*when_unproven"):
        world.start(2.0, when_unproven=WhenUnproven.REFUSE)
    again, _ = world.start(1.0, when_unproven=WhenUnproven.REFUSE)
    assert again.publish(step=1).result().sequence == 1


class Trainers:
    """A process that forks trainers, which die where they are told to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.testing.killed_trainer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def ended(self) -> int:
        return int(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=WAIT_S)
        self._process.stdout.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    """One process for all tests of this file."""
    found = Trainers()
    yield found
    found.close()


DAILY = [("described", "after"), ("committed", "before")]
CASES = [
    pytest.param(point, saves, marks=() if (point, saves) in DAILY else pytest.mark.slow)
    for point in PUBLISH_POINTS
    for saves in ("after", "before")
]


@pytest.mark.parametrize(("point", "saves"), CASES)
def test_killed_trainers_leave_a_chain(
    trainers: Trainers, tmp_path: Path, point: str, saves: str
) -> None:
    """SIGKILL in the third publish, and a restart from the last save: whoever follows arrives.

    Saved after publishing, a restart has the weights of the version before the killed one; saved
    before it, those of the killed one. Which of the two came out decides whether it can prove them.
    """
    service = LoopbackControl(MemoryStore(clock=system_clock()))
    control = service.client()
    order = {
        "folder": str(tmp_path),
        "control": service.address,
        "token": TOKENS[TokenRole.TRAINER],
        "saves": saves,
        "steps": 6,
    }
    trainers.order(**order, point=f"{point}:3")
    assert trainers.ended() == -signal.SIGKILL
    before = [each for each in control.list_versions("m") if each.state is VersionState.READY]
    head = max(before, key=lambda each: said_of(each).sequence)
    trainers.order(**order)
    clock = system_clock()
    wait_until(
        (tmp_path / "done").exists, what="training", clock=clock, timeout_s=WAIT_S, interval_s=0.02
    )
    root = json.loads((tmp_path / "done").read_text())["root"]
    versions = control.list_versions("m")
    for held in (
        None,
        Holding(sequence=said_of(head).sequence, root_digest=said_of(head).root_digest),
    ):
        path = plan_install(versions, held=held, avoid=frozenset(e.uid for e in before)).path
        assert path
        assert said_of(path[-1]).root_digest == root
    follower = Follower()
    for each in plan_install(versions, held=None, avoid=frozenset(e.uid for e in before)).path:
        assert follower.install(fetched(control, each)).root_digest == said_of(each).root_digest
    (tmp_path / "stop").touch()
    assert trainers.ended() == 0
    check_events(tmp_path, versions, is_proven=is_proven(point, saves))
    control.close()
    service.stop()


def is_proven(point: str, saves: str) -> bool:
    """Whether the saved weights are those of the last version that came out."""
    came_out = list(PUBLISH_POINTS).index(point) >= list(PUBLISH_POINTS).index("ready")
    return came_out == (saves == "before")


def said_of(version: WeightVersion) -> VersionDescription:
    assert version.description is not None
    return version.description


def check_events(folder: Path, versions: Any, *, is_proven: bool) -> None:
    """Sequences only rise, and every break of the chain was told of."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [each for each in events if each["event"].startswith("chain.")]
    assert [each["event"] for each in told] == [CONTINUED if is_proven else BROKEN]
    kept = [each for each in versions if each.description and "-full" not in each.uid]
    ready = [said_of(each) for each in kept if each.state is not VersionState.STAGING]
    for one, two in pairwise(sorted(ready, key=lambda each: each.sequence)):
        assert one.sequence < two.sequence
        begins_anew = two.sequence == told[0]["sequence"] and not is_proven
        assert (two.parent_root is None) == begins_anew
        if two.parent_root is not None and two.sequence > told[0]["sequence"]:
            assert two.parent_root == one.root_digest


def fetched(control: Any, version: WeightVersion) -> StagedWeightVersionShardData:
    """Fetch a version over HTTP, as what a follower installs."""
    (shard,) = control.list_shards(version.uid)
    reader = HttpObjectReader(token=lambda: DATA_TOKEN, clock=system_clock(), chance=chance)
    data = reader.read_manifest(shard.manifest_endpoint, size_max=2**20, timeout_s=WAIT_S)
    manifest = parse_manifest(data)
    (item,) = manifest.objects
    target = memoryview(bytearray(item.num_bytes))
    wanted = ObjectRange(object_id=item.object_id, offset=0, size=item.num_bytes)
    endpoint = reader.source_endpoint(shard.manifest_endpoint)
    read_object(reader, endpoint, wanted, target, timeout_s=WAIT_S)
    reader.close()
    buffers = StagedBuffers(
        manifest=manifest,
        objects=(
            StagedObject(object_id=item.object_id, num_bytes=item.num_bytes, parts=(target,)),
        ),
        changed_elements=0,
        total_elements=0,
        full_bytes=0,
    )
    return StagedWeightVersionShardData(
        manifest=WeightVersionShardManifest(
            data=data, tensor_count=1, total_bytes=item.num_bytes, transport="http"
        ),
        publish_ready=CompletionFence(lambda: None),
        buffer_owner=buffers,
    )
