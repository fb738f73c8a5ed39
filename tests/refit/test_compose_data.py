"""A trainer serves through what its job says; an engine that has one of it follows."""

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.core.errors import PreflightError, UsageError
from paceline.refit import compose
from paceline.refit.compose.data import (
    DataPlane,
    data_plane,
    follow_bucket,
    is_bucket,
    open_reader,
    open_source,
)
from paceline.refit.compose.manifests import ManifestReader
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.control.verify import check_manifests
from paceline.refit.errors import (
    ControlUnavailableError,
    FetchError,
    NotFoundError,
    PreconditionError,
)
from paceline.refit.generators.protocol import EngineState
from paceline.refit.model import WeightVersionShardManifest
from paceline.refit.publisher import Publisher, PublisherOptions
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.staging.torch_bytes import byte_view
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.address import split_addresses
from paceline.refit.transports.objectstore.bucket import Bucket
from paceline.refit.transports.objectstore.log import CommitReader, commit_key, sweep
from paceline.refit.transports.protocol import ObjectReader
from paceline.refit.transports.several import Source
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.fakes.generator import FakeGenerator

TOKEN = "of-this-test"  # noqa: S105 - not a secret


class Run:
    """A trainer over every transport, and engines over any of them."""

    def __init__(self, folder: Path, transports: tuple[str, ...]) -> None:
        self.bucket = f"file://{folder}/bucket/r"
        self.plane = DataPlane(transports=transports, bucket=self.bucket)
        names = (f"n{number}" for number in itertools.count())
        clock = system_clock()
        self.ledger = ControlLedger(MemoryStore(clock=clock), nonce=lambda: next(names))
        self.weights = {
            "w": torch.arange(200_000, dtype=torch.float32),
            "b": torch.zeros(7, dtype=torch.bfloat16),
        }
        self.source: Source = open_source(self.plane, token=lambda: TOKEN, name=f"s-{folder.name}")
        trainer = TorchModuleTrainer(clock=clock)
        trainer.bind_tensors(self.weights)
        self.publisher = Publisher(
            control=self.ledger,
            trainer=trainer,
            source=self.source,
            clock=clock,
            options=PublisherOptions(
                model_name="m", run_id="r", worker_id="t", keep_old=1, close_wait_s=0.1
            ),
        )
        self.publisher.start()
        self.readers: list[ObjectReader] = []

    def publish(self) -> str:
        self.weights["w"][::997] += 1
        return self.publisher.publish(step=0).result().version_id

    def engine(
        self, *transports: str, control: ControlPlane | None = None
    ) -> tuple[Receiver, FakeGenerator]:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        engine = FakeGenerator([byte_view(name, tensor) for name, tensor in zeros.items()])
        name = "-".join(transports)
        reader = open_reader(
            DataPlane(transports=transports, bucket=self.bucket),
            token=lambda: TOKEN,
            name=f"g-{name}-{id(self)}",
        )
        self.readers.append(reader)
        receiver = Receiver(
            ReceiverConfig(worker_id=f"g-{name}", model_name="m", run_id="r", endpoint="http://h"),
            control=control or self.ledger,
            engine=engine,
            reader=reader,
            clock=system_clock(),
            chance=lambda: 0.0,
        )
        receiver.register()
        return receiver, engine

    def serves_the_newest(self, receiver: Receiver, engine: FakeGenerator) -> bool:
        """Let it follow, and compare every live byte."""
        for _ in range(5):
            receiver.step()
        want = {name: bytes(byte_view(name, each).data) for name, each in self.weights.items()}
        return engine.live_bytes() == want and receiver.health().state is EngineState.READY

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.publisher.close()
        self.source.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, ("nixl", "http", "objectstore"))
    yield run
    run.close()


@pytest.mark.parametrize(
    "transports",
    [("nixl",), ("http",), ("objectstore",), ("http", "nixl"), ("nixl", "http", "objectstore")],
    ids="-".join,
)
def test_an_engine_with_any_of_them_follows(run: Run, transports: tuple[str, ...]) -> None:
    """Full and delta arrive bit for bit over whatever both sides have."""
    receiver, engine = run.engine(*transports)
    run.publish()
    assert run.serves_the_newest(receiver, engine)
    run.publish()
    assert run.serves_the_newest(receiver, engine)
    figures = receiver.figures()
    assert figures["installs"] == 2
    assert figures["refusals"] == 0


def test_an_engine_that_sees_a_bucket_alone_follows(run: Run) -> None:
    """No port of anybody's, no control service: the commits tell what there is."""
    control = follow_bucket(run.bucket)
    control._look_every_s = 0.0  # type: ignore[attr-defined]  # a test waits for nothing
    receiver, engine = run.engine("objectstore", control=control)
    assert control.list_versions("m") == []
    run.publish()
    run.publish()
    assert run.serves_the_newest(receiver, engine)
    for _ in range(9):  # beyond an anchor: what is superseded leaves the bucket
        run.publish()
    assert run.serves_the_newest(receiver, engine)
    late, fresh = run.engine("objectstore", control=control)
    assert run.serves_the_newest(late, fresh)
    with pytest.raises(NotFoundError):
        control.list_shards("r-000000")
    with pytest.raises(PreconditionError):
        control.delete_version("r-000000")


def test_a_bucket_that_is_away_is_a_silent_service(tmp_path: Path) -> None:
    """Like a control service that does not answer: asked again, and the engine goes stale."""
    (tmp_path / "v1" / "commits").mkdir(parents=True)
    (tmp_path / commit_key(0)).write_bytes(b"{")
    control = follow_bucket(f"file://{tmp_path}")
    with pytest.raises(ControlUnavailableError, match="cannot be read"):
        control.list_versions("m")


def test_the_trainer_goes_on_without_its_bucket(run: Run, tmp_path: Path) -> None:
    """A commit that fails is made up for by the next one."""
    first = run.publish()
    commits = tmp_path / "bucket" / "r" / "v1" / "commits"
    moved = commits.rename(tmp_path / "away")
    commits.write_text("in the way")
    second = run.publish()
    commits.unlink()
    moved.rename(commits)
    third = run.publish()
    newest = CommitReader(Bucket(run.bucket)).newest()
    assert {first, second, third} <= {item.version.uid for item in newest.versions}


def test_sweep_removes_what_nobody_names(run: Run) -> None:
    """Leftovers of a killed publisher go when they are old; what is committed never does."""
    run.publish()
    bucket = Bucket(run.bucket)
    bucket.put_new("v1/objects/" + "0" * 64, [memoryview(b"leftover")])
    now = datetime.now(UTC)  # noqa: TID251 - the bucket's own clock is real
    assert sweep(bucket, now=now) == []
    gone = sweep(bucket, now=now + timedelta(hours=2))
    assert gone == ["v1/objects/" + "0" * 64]
    receiver, engine = run.engine("objectstore")
    assert run.serves_the_newest(receiver, engine)


def test_a_writer_that_is_overtaken_writes_after(tmp_path: Path) -> None:
    """Two writers of one prefix never share a number, and neither loses what it committed."""
    first, second = (Run(tmp_path, ("objectstore",)) for _ in range(2))
    uids = [first.publish(), second.publish(), first.publish()]
    newest = CommitReader(Bucket(first.bucket)).newest()
    assert newest.number >= 2
    assert set(uids) <= {item.version.uid for item in newest.versions}
    first.close()
    second.close()


def test_settings_come_from_the_environment() -> None:
    """What the job file says reaches the processes."""
    said = {
        "PACELINE_TRANSPORTS": "nixl,objectstore",
        "PACELINE_BUCKET": "s3://b/runs/",
        "PACELINE_DATA_CA": "/ca.crt",
        "PACELINE_HOST": "10.0.0.5",
    }
    plane = data_plane(said, run_id="r")
    assert plane.transports == ("nixl", "objectstore")
    assert (plane.bucket, plane.host, plane.trusted) == (
        "s3://b/runs/r",
        "10.0.0.5",
        Path("/ca.crt"),
    )
    assert data_plane({}, run_id="r") == DataPlane()
    assert [is_bucket(text) for text in ("s3://b/p", "127.0.0.1:1", "x://b")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("transports", "match"),
    [
        (("ftp",), "write any of http, nixl, objectstore"),
        ((), "write any"),
        (("objectstore",), "needs a bucket"),
    ],
)
def test_settings_are_checked(transports: tuple[str, ...], match: str) -> None:
    """A typo is told with what would be right."""
    with pytest.raises(UsageError, match=match):
        DataPlane(transports=transports)


def test_tls_from_the_settings(tmp_path: Path) -> None:
    """With the run's certificate a trainer serves https, and engines check it."""
    files, trusted = compose.create_certificate_files(tmp_path, name="r", hosts=["127.0.0.1"])
    serving = DataPlane(certificate=files.certificate, key=files.key)
    source = open_source(serving, token=lambda: TOKEN, name="t")
    manifest = WeightVersionShardManifest(
        data=b"{}", tensor_count=1, total_bytes=1, transport="http"
    )
    address = source.publish_manifest(version_id="v", source_slot_id="s", manifest=manifest)
    assert address.startswith("https://127.0.0.1:")
    reader = open_reader(DataPlane(trusted=trusted), token=lambda: TOKEN, name="g")
    assert reader.read_manifest(address, size_max=9, timeout_s=5) == b"{}"
    reader.close()
    stranger = open_reader(DataPlane(), token=lambda: TOKEN, name="g")
    with pytest.raises(FetchError, match="not trusted"):
        stranger.read_manifest(address, size_max=9, timeout_s=5)
    stranger.close()
    with pytest.raises(PreflightError, match="cannot read"):
        open_reader(DataPlane(trusted=tmp_path / "no"), token=lambda: TOKEN, name="g")
    source.close()


def test_manifests_are_read_at_every_kind_of_address(run: Run) -> None:
    """What verifies a version needs no NIXL and no bucket of its own; ways that differ are told."""
    uid = run.publish()
    (shard,) = run.ledger.list_shards(uid)
    assert len(split_addresses(shard.manifest_endpoint)) > 1
    reader = ManifestReader(DataPlane(), token=lambda: TOKEN)
    read = partial(reader.read, size_max=2**20, timeout_s=20.0)
    assert check_manifests([shard], read) == []
    address = next(
        each for each in split_addresses(shard.manifest_endpoint) if each.startswith("file://")
    )
    Path(address.removeprefix("file://")).write_bytes(b"{}")
    (problem,) = check_manifests([shard], read)
    assert "2 different manifests" in problem
    reader.close()
