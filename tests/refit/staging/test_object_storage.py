"""Checkpoints that transformers loads, deltas that come back, and nothing visible half."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.refit.digest import root_digest
from paceline.refit.errors import FetchError, ParseError, PublishError, VerifyError
from paceline.refit.model import TensorBuffer
from paceline.refit.staging.object_storage import (
    INDEX,
    Change,
    read_checkpoint,
    read_delta,
    write_checkpoint,
    write_delta,
)
from paceline.refit.staging.torch_bytes import byte_view
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.objectstore.bucket import Bucket
from paceline.testing.payloads import tensor_entry
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3


def buffers(model: torch.nn.Module) -> list[TensorBuffer]:
    """The distinct tensors under the names that the trainer publishes."""
    trainer = TorchModuleTrainer(clock=None)  # type: ignore[arg-type]  # waits for nothing
    trainer.bind_tensors(model)
    return list(trainer._live_buffers().values())


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_a_checkpoint(tmp_path: Path, tied: bool) -> None:
    """Names, ties, dtypes and every bit are those of the model; several shards and an index."""
    folder = write_tiny_qwen3(tmp_path / "model", tie_word_embeddings=tied)
    model = tiny_model(folder, seed=3)
    beside = {path.name: path.read_bytes() for path in folder.iterdir()}
    bucket = Bucket(f"file://{tmp_path}/bucket")
    found = buffers(model)
    key = write_checkpoint(bucket, "v1", found, beside=beside, shard_bytes=20_000)
    index = json.loads((tmp_path / "bucket" / key).read_bytes())
    assert len(set(index["weight_map"].values())) > 1
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bucket" / "v1", dtype="auto")
    entries = [tensor_entry(each) for each in found]
    again = [tensor_entry(each) for each in buffers(loaded)]
    assert root_digest(again) == root_digest(entries)
    back = read_checkpoint(bucket, key)
    assert {name: bytes(item.data) for name, item in back.items()} == {
        each.name: bytes(each.data) for each in found
    }


BASE = {"w": torch.arange(5000, dtype=torch.bfloat16), "n": torch.tensor([1, 2, 3])}


def changes() -> list[Change]:
    new = {name: tensor.clone() for name, tensor in BASE.items()}
    new["w"][7] = float("nan")
    return [
        Change(
            name=name, base=byte_view(name, BASE[name]).data, new=byte_view(name, new[name]).data
        )
        for name in BASE
    ]


def base_bytes() -> dict[str, memoryview]:
    return {name: byte_view(name, tensor).data for name, tensor in BASE.items()}


def test_a_delta_comes_back(tmp_path: Path) -> None:
    """Only what changed is written, and the base brings it back bit for bit."""
    bucket, made = Bucket(f"file://{tmp_path}"), changes()
    key = write_delta(bucket, "d", made, version="v1", base_version="v0", threads=2)
    found = read_delta(bucket, key, base_bytes(), version="v1", base_version="v0")
    assert found == {"w": bytes(made[0].new)}
    with pytest.raises(ParseError):
        read_delta(bucket, key, base_bytes(), version="v1", base_version="other")
    with pytest.raises(ParseError):
        read_delta(bucket, key, {"w": made[0].new}, version="v1", base_version="v0")
    with pytest.raises(VerifyError, match="does not have"):
        read_delta(bucket, key, {}, version="v1", base_version="v0")


def test_an_empty_delta_is_an_index_alone(tmp_path: Path) -> None:
    """Where nothing changed there is no shard."""
    bucket = Bucket(f"file://{tmp_path}")
    same = [Change(name="w", base=data, new=data) for data in base_bytes().values()]
    key = write_delta(bucket, "d", same, version="v1", base_version="v0")
    assert [path.name for path in (tmp_path / "d").iterdir()] == [INDEX]
    assert read_delta(bucket, key, base_bytes(), version="v1", base_version="v0") == {}


class Failing(Bucket):
    """Takes ``left`` keys and then no more."""

    left = 1

    def put_new(self, key: str, parts: Sequence[memoryview]) -> None:
        if not self.left:
            raise PublishError("no room")
        self.left -= 1
        super().put_new(key, parts)


def test_a_failure_in_the_middle_is_not_visible(tmp_path: Path) -> None:
    """Without its index a version is not there; writing it again completes it."""
    url = f"file://{tmp_path}"
    found = [byte_view(name, tensor) for name, tensor in BASE.items()]
    with pytest.raises(PublishError):
        write_checkpoint(Failing(url), "v", found, shard_bytes=1)
    with pytest.raises(FetchError, match="not there"):
        read_checkpoint(Bucket(url), f"v/{INDEX}")
    key = write_checkpoint(Bucket(url), "v", found, shard_bytes=1)
    assert set(read_checkpoint(Bucket(url), key)) == set(BASE)
    with pytest.raises(PublishError, match="never changes"):
        write_checkpoint(Bucket(url), "v", found[:1], shard_bytes=1)
