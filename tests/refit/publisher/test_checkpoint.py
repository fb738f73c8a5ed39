"""FULL_HF_CHECKPOINT: one publication that transformers loads and an engine follows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.refit.compose.trainer import _config_of
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.digest import root_digest
from paceline.refit.errors import PublishError
from paceline.refit.generators.protocol import InstalledVersion
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.render import render_manifest
from paceline.refit.model import TensorBuffer, TrainerStagingMode, WeightPayloadFormat
from paceline.refit.publisher import Publisher, PublisherOptions
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.staging import checkpoint
from paceline.refit.staging.object_storage import INDEX, read_checkpoint
from paceline.refit.staging.torch_bytes import byte_view
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.memory import MemoryObjectServer
from paceline.refit.transports.objectstore.bucket import Bucket
from paceline.refit.transports.objectstore.reader import BucketObjectReader
from paceline.refit.transports.objectstore.server import BucketObjectServer
from paceline.refit.transports.several import SeveralServers
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.fakes.generator import FakeGenerator
from paceline.testing.payloads import tensor_entry
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3
from refit.conftest import SMALL_DISK_BYTES

CHECKPOINT = WeightPayloadFormat.FULL_HF_CHECKPOINT


def made(source: Any, model: Any, **more: Any) -> tuple[ControlLedger, Publisher]:
    """A publisher of checkpoints on a ledger of its own."""
    clock = system_clock()
    ledger = ControlLedger(MemoryStore(clock=clock), nonce=lambda: "n")
    trainer = TorchModuleTrainer(clock=clock, storage=source)
    trainer.bind_tensors(model)
    options = PublisherOptions(
        model_name="m",
        run_id="r",
        worker_id="t",
        staging_mode=TrainerStagingMode.WRITE_TO_STORAGE,
        payload_format=CHECKPOINT,
        checkpoint_files=_config_of(model),
        close_wait_s=0.1,
    )
    publisher = Publisher(
        control=ledger,
        trainer=trainer,
        source=source,
        clock=clock,
        options=replace(options, **more),
    )
    return ledger, publisher


def buffers_of(model: torch.nn.Module) -> dict[str, TensorBuffer]:
    """The distinct tensors of a model, as engines hold them."""
    state, seen = model.state_dict(), set[int]()
    found = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = byte_view(name, tensor)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_one_publication_is_loaded_and_followed(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers, and an engine of ours over the same bucket, have the published digest."""
    monkeypatch.setattr(checkpoint.checkpoint_shard, "__kwdefaults__", {"file_bytes": 20_000})
    model = tiny_model(write_tiny_qwen3(tmp_path / "m", tie_word_embeddings=tied), seed=3)
    bucket = Bucket(f"file://{tmp_path}/bucket")
    ledger, publisher = made(BucketObjectServer(bucket), model)
    initial = tiny_model(tmp_path / "m", seed=4)
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    engine = FakeGenerator(list(buffers_of(initial).values()), aliases=aliases)
    receiver = Receiver(
        ReceiverConfig(worker_id="g", model_name="m", run_id="r", endpoint="http://127.0.0.1:1"),
        control=ledger,
        engine=engine,
        reader=BucketObjectReader(bucket, clock=system_clock()),
        clock=system_clock(),
        chance=lambda: 0.0,
    )
    with publisher:
        for step in range(2):
            with torch.no_grad():
                next(model.parameters()).add_(0.25)
            published = publisher.publish(step=step).result()
            assert published.payload_format is CHECKPOINT
            for _ in range(5):
                receiver.step()
            found = engine.installed()
            assert isinstance(found, InstalledVersion)
            assert (found.version_id, found.root_digest) == (
                published.version_id,
                published.root_digest,
            )
        folder = tmp_path / "bucket" / published.version_id
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        assert len(set(index["weight_map"].values())) > 1
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        entries = [tensor_entry(each) for each in buffers_of(loaded).values()]
        assert root_digest(entries) == published.root_digest
    assert AutoModelForCausalLM.from_pretrained(folder) is not None  # leases do not hold it


def test_a_manifest_says_where_tensors_are_in_the_files() -> None:
    """Aligned to their elements, and the manifest passes its own parser."""
    trainer = TorchModuleTrainer(clock=system_clock())
    trainer.bind_tensors(
        {
            "a": torch.ones(3, dtype=torch.uint8),
            "b": torch.ones(5, dtype=torch.float64),
            "c": torch.tensor(1.0, dtype=torch.bfloat16),
        }
    )
    staged = trainer.stage_shard(
        tensors=None,
        staging_mode=TrainerStagingMode.COPY_TO_HOST,
        payload_format=CHECKPOINT,
    )
    manifest = parse_manifest(staged.manifest.data)
    assert render_manifest(manifest) == staged.manifest.data
    widths = {"a": 1, "b": 8, "c": 2}
    assert {item.tensor: item.offset % widths[item.tensor] for item in manifest.segments} == (
        dict.fromkeys(widths, 0)
    )


def test_without_a_bucket_nothing_is_published() -> None:
    """The error says what is missing, also behind several transports."""
    for source in (MemoryObjectServer(), SeveralServers([MemoryObjectServer()])):
        ledger, publisher = made(source, {"w": torch.ones(4)}, staging_mode=_HOST)
        with publisher, pytest.raises(PublishError, match="add objectstore"):
            publisher.publish(step=0).result()
        assert ledger.list_versions("m") == []


_HOST = TrainerStagingMode.COPY_TO_HOST


def test_an_index_that_cannot_be_written_leaves_nothing_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index and no READY version; the one before stays as it is."""
    bucket = Bucket(f"file://{tmp_path}")
    ledger, publisher = made(BucketObjectServer(bucket), {"w": torch.ones(4)})
    with publisher:
        first = publisher.publish(step=0).result()
        put = Bucket.put_new

        def full(self: Bucket, key: str, parts: Any) -> None:
            if key.endswith("index.json"):
                raise PublishError("no room")
            put(self, key, parts)

        monkeypatch.setattr(Bucket, "put_new", full)
        with pytest.raises(PublishError, match="no room"):
            publisher.publish(step=1).result()
        states = {each.uid: str(each.state) for each in ledger.list_versions("m")}
        assert states[first.version_id] == "READY"
        assert list(states.values()).count("READY") == 1
        assert not (tmp_path / "r-000001" / "model.safetensors.index.json").exists()


def test_a_bucket_without_room_keeps_the_version_before(small_disk: Path, tmp_path: Path) -> None:
    """The error says what to free, the old version is still loaded, and room lets it go on."""
    bucket = Bucket(f"file://{small_disk}/bucket")
    weights = {"w": torch.zeros(SMALL_DISK_BYTES // 16)}  # a quarter of the disk
    ledger, publisher = made(BucketObjectServer(bucket), weights)
    with publisher:
        first = publisher.publish(step=0).result()
        filler = small_disk / "filler"
        filler.write_bytes(bytes(SMALL_DISK_BYTES * 5 // 8))
        weights["w"] += 1
        with pytest.raises(PublishError, match="remove folders of old versions"):
            publisher.publish(step=1).result()
        states = {each.uid: str(each.state) for each in ledger.list_versions("m")}
        assert states[first.version_id] == "READY"
        assert list(states.values()).count("READY") == 1
        found = read_checkpoint(bucket, f"{first.version_id}/{INDEX}")
        assert bytes(found["w"].data) == bytes(weights["w"].numel() * 4)
        assert not (small_disk / "bucket" / "r-000001" / INDEX).exists()
        filler.unlink()
        third = publisher.publish(step=2).result()
        assert bytes(read_checkpoint(bucket, f"{third.version_id}/{INDEX}")["w"].data) == (
            weights["w"].numpy().tobytes()
        )
