"""The unmodified clients of ModelExpress 0.7.0 work with our service, from a venv of their own."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.descriptor import FieldDescriptor
from safetensors.torch import save_file

from paceline.refit.control.auth import TokenRole
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.control.worker import ManifestServer
from paceline.refit.publisher import CanonicalPublisher, PublisherOptions
from paceline.refit.publisher.canonical import INDEX
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.objectstore.bucket import Bucket, BucketOptions
from paceline.refit.wire import refit_pb2
from paceline.store.memory import MemoryStore
from paceline.system import environ, system_clock
from paceline.testing.fakes.control import TOKENS, LoopbackControl
from paceline.testing.fakes.s3 import FakeS3

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peer" / "bin" / "python"
TIMEOUT_S = 110

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-peer (run: make peer)")


@pytest.fixture
def service() -> Iterator[LoopbackControl]:
    made = LoopbackControl(MemoryStore(clock=system_clock()))
    yield made
    made.stop()


def play(
    scene: str, tmp_path: Path, service: LoopbackControl | None = None, **more: str
) -> list[dict[str, Any]]:
    """Run a scene of peer.py and return what it told."""
    env: Mapping[str, str] = {
        "PATH": environ().get("PATH", ""),
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "MX_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }
    if service is not None:
        (tmp_path / "token").write_text(TOKENS[TokenRole.OPERATOR], encoding="utf8")
        env = {**env, "MODEL_EXPRESS_URL": service.address}
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("peer.py")), scene],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ours() -> list[dict[str, Any]]:
    """Return what ``peer.descriptors`` tells, of our own file."""
    file = refit_pb2.DESCRIPTOR
    told: list[dict[str, Any]] = []
    for message in file.message_types_by_name.values():
        for field in message.fields:
            kind: Any = field.message_type or field.enum_type
            assert isinstance(field, FieldDescriptor)
            told.append(
                {
                    "message": message.full_name,
                    "number": field.number,
                    "name": field.name,
                    "type": field.type,
                    "presence": field.has_presence,
                    "repeated": field.is_repeated,
                    "of": kind.full_name if kind else "",
                }
            )
    for enum in file.enum_types_by_name.values():
        told += [
            {"enum": enum.full_name, "number": value.number, "name": value.name}
            for value in enum.values
        ]
    for service in file.services_by_name.values():
        told += [
            {
                "service": service.full_name,
                "name": method.name,
                "takes": method.input_type.full_name,
                "returns": method.output_type.full_name,
                "streams": bool(method.client_streaming or method.server_streaming),
            }
            for method in service.methods
        ]
    return told


def test_the_descriptors_are_equal_field_by_field(tmp_path: Path) -> None:
    """Every message, field, number, type, presence, enum value and method is the wheel's."""

    def ordered(told: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(each, sort_keys=True) for each in told)

    assert ordered(play("descriptors", tmp_path)) == ordered(ours())


def test_their_control_client_sees_the_lifecycle_and_the_refusals(
    service: LoopbackControl, tmp_path: Path
) -> None:
    """Create, repeat, read, move, retire; each refusal has the status that they expect."""
    told = play("control", tmp_path, service)
    assert told[0] == {"state": "STAGING", "slots": ["rank-0", "rank-1"], "base": None}
    assert told[1] == {"again": True}
    refusals = [each for each in told if "refused" in each]
    assert len(refusals) == 6
    for each in refusals:
        assert each["refused"] in each["expected"]
    assert {"retired": "RELEASING"} in told


def test_manifests_of_both_sides_are_fetched_and_believed(
    service: LoopbackControl, tmp_path: Path
) -> None:
    """Their manifest service and ours cover a version; leases hold its shards until given back."""
    manifests = ManifestServer()
    digest = manifests.publish(
        version_id="by-workers", source_slot_id="rank-1", manifest=b'{"from": "ours"}'
    )
    told = play("workers", tmp_path, service, OUR_MANIFESTS=manifests.endpoint, OUR_DIGEST=digest)
    manifests.close()
    assert told == [
        {"slot": "rank-0", "state": "WEIGHT_VERSION_STATE_STAGING"},
        {"slot": "rank-1", "state": "WEIGHT_VERSION_STATE_READY"},
        {"lease": told[2]["lease"]},
        {"slot": "rank-0", "manifest": '{"from": "theirs"}'},
        {"slot": "rank-1", "manifest": '{"from": "ours"}'},
        {"refused": "FAILED_PRECONDITION", "expected": ["FAILED_PRECONDITION"]},
        {"given_back": True},
        {"evicted": True},
    ]


def test_their_trainer_and_generator_exchange_versions_through_object_storage(
    service: LoopbackControl, tmp_path: Path
) -> None:
    """Two deltas on a seed, NaN included, arrive bit for bit; no lease is left behind."""
    with FakeS3() as s3:
        told = play("storage", tmp_path, service, S3_ENDPOINT=s3.endpoint)
    assert told == [{"tensor": "w", "same": True}, {"tensor": "n", "same": True}]
    client = service.client()
    assert [v.state.value for v in client.list_versions("peer-model")] == ["READY"] * 3
    assert client.list_leases("delta-1") == []
    client.close()


def test_their_generator_follows_what_we_publish_in_the_canonical_format(
    service: LoopbackControl, tmp_path: Path
) -> None:
    """A checkpoint, deltas, one without changes, a checkpoint again: bit for bit each time."""
    weights = {
        "b": torch.randn(300, 20).to(torch.bfloat16),
        "n": torch.tensor([1, 2, 3]),
        "s": torch.tensor(float("nan")),
    }
    (tmp_path / "seed").mkdir()
    save_file(weights, tmp_path / "seed" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (tmp_path / "seed" / INDEX).write_text(json.dumps(index), encoding="utf8")
    client = service.client()
    trainer = TorchModuleTrainer(clock=system_clock())
    trainer.bind_tensors(weights)
    formats = []
    with FakeS3() as s3, canonical_publisher(client, trainer, s3) as publisher:
        for step in range(5):
            published = publisher.publish(step=step).result()
            formats.append((published.payload_format.value, published.changed_elements))
            save_file(weights, tmp_path / f"{published.version_id}.safetensors")
            if step != 1:
                weights["b"][step, :7] += 1
                weights["n"][step % 3] = -step
        versions = [version.uid for version in client.list_versions("peer-model")]
        told = play(
            "follow",
            tmp_path,
            service,
            S3_ENDPOINT=s3.endpoint,
            SEED=str(tmp_path / "seed"),
            EXPECTED=str(tmp_path),
            VERSIONS=",".join(versions),
        )
    delta, full = "XOR_DELTA", "FULL_HF_CHECKPOINT"
    assert formats == [(full, 6004), (delta, 8), (delta, 0), (delta, 8), (full, 6004)]
    assert told == [
        {"version": uid, "same": dict.fromkeys("bns", True), "more": []} for uid in versions[1:]
    ]
    assert [v.state.value for v in client.list_versions("peer-model")] == ["READY"] * 5
    client.close()


def canonical_publisher(
    control: ControlPlane, trainer: TorchModuleTrainer, s3: FakeS3
) -> CanonicalPublisher:
    """Return a publisher into the bucket, not started."""
    config = {
        "endpoint": s3.endpoint,
        "region": "us-east-1",
        "access_key_id": "nobody",
        "secret_access_key": "nothing",
    }
    return CanonicalPublisher(
        control=control,
        trainer=trainer,
        bucket=Bucket("s3://bucket/run", options=BucketOptions(config=config, allow_http=True)),
        clock=system_clock(),
        options=PublisherOptions(
            model_name="peer-model", run_id="r", worker_id="t-0", anchor_every=4
        ),
    )
