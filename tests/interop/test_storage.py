"""The canonical formats in a bucket, between us and ModelExpress 0.7.0, in both directions."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from interop.test_peer import PYTHON, play
from paceline.refit.model import (
    ObjectStorageSource,
    ObjectStorageType,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
)
from paceline.refit.staging.object_storage import (
    INDEX,
    Change,
    read_delta,
    write_checkpoint,
    write_delta,
)
from paceline.refit.staging.torch_bytes import byte_view
from paceline.refit.transports.objectstore.bucket import Bucket, BucketOptions
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.fakes.control import LoopbackControl
from paceline.testing.moto_server import serve_s3

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-peer (run: make peer)")

SEED = {"w": torch.arange(64, dtype=torch.bfloat16), "n": torch.tensor([1, 2, 3])}


def data_of(weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bytes(byte_view(name, each).data) for name, each in weights.items()}


def changed(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """What the peer's scene does in a step."""
    new = {name: tensor.clone() for name, tensor in weights.items()}
    new["w"][step], new["n"][step] = float("nan"), -step
    return new


def test_ours_reads_what_theirs_published(tmp_path: Path) -> None:
    """Two of their deltas, applied to the seed, give the bytes that they meant."""
    service = LoopbackControl(MemoryStore(clock=system_clock()))
    with serve_s3("bucket") as s3:
        play("storage", tmp_path, service, S3_ENDPOINT=s3.endpoint)
        bucket = Bucket(s3.url("run"), options=BucketOptions(config=s3.config, allow_http=True))
        weights, base = SEED, "seed"
        for step in range(2):
            uid, here = f"delta-{step}", {k: memoryview(v) for k, v in data_of(weights).items()}
            found = read_delta(bucket, f"{uid}/{INDEX}", here, version=uid, base_version=base)
            weights, base = changed(weights, step), uid
            assert found == data_of(weights)
    service.stop()


def test_theirs_reads_what_ours_published(tmp_path: Path) -> None:
    """Their generator installs our delta and our checkpoint, bit for bit."""
    (tmp_path / "seed").mkdir()
    save_file(SEED, tmp_path / "seed" / "model.safetensors")
    (tmp_path / "seed" / INDEX).write_text(
        '{"weight_map":{"w":"model.safetensors","n":"model.safetensors"}}'
    )
    delta, full = changed(SEED, 0), changed(changed(SEED, 1), 2)
    service = LoopbackControl(MemoryStore(clock=system_clock()))
    client = service.client()
    with serve_s3("bucket") as s3:
        bucket = Bucket(s3.url("ours"), options=BucketOptions(config=s3.config, allow_http=True))
        before, after = data_of(SEED), data_of(delta)
        changes = [
            Change(name=name, base=memoryview(before[name]), new=memoryview(after[name]))
            for name in SEED
        ]
        keys = {
            "seed": f"seed/{INDEX}",
            "our-delta": write_delta(
                bucket, "delta", changes, version="our-delta", base_version="seed"
            ),
            "our-full": write_checkpoint(
                bucket, "full", [byte_view(name, each) for name, each in full.items()]
            ),
        }
        for uid, key in keys.items():
            is_delta = uid == "our-delta"
            client.create_version(
                VersionRequest(
                    model_name="peer-model",
                    idempotency_key=uid,
                    uid=uid,
                    payload_format=WeightPayloadFormat.XOR_DELTA
                    if is_delta
                    else WeightPayloadFormat.FULL_HF_CHECKPOINT,
                    base_version_id="seed" if is_delta else None,
                    object_storage=ObjectStorageSource(
                        uri=f"{s3.url('ours')}/{key}", storage_type=ObjectStorageType.S3
                    ),
                    state=VersionState.READY,
                )
            )
        told = play("reads_ours", tmp_path, service, S3_ENDPOINT=s3.endpoint, SEED=str(tmp_path))
    expected = {
        (uid, name): hashlib.sha256(data).hexdigest()
        for uid, weights in (("our-delta", delta), ("our-full", full))
        for name, data in data_of(weights).items()
    }
    assert {(each["uid"], each["tensor"]): each["sha256"] for each in told} == expected
    client.close()
    service.stop()
