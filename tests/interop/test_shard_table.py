"""A NIXL manifest of ours is what a stock ModelExpress receiver plans its reads from."""

import base64
import json
from pathlib import Path

import pytest
import torch

from interop.test_peer import PYTHON, play
from paceline.refit.staging.torch_bytes import byte_view
from paceline.refit.transports.nixl.agent import NixlAgent, Region, region_of, region_of_tensor
from paceline.refit.transports.nixl.shard_table import TablePlace, render_shard_table
from paceline.refit.transports.nixl.table import Stretch

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-peer (run: make peer)")


def place_of(name: str, tensor: torch.Tensor) -> TablePlace:
    region, view = region_of_tensor(tensor), byte_view(name, tensor)
    where = Stretch(
        address=region.address, size=region.size, memory=region.memory, device=region.device
    )
    return TablePlace(dtype=view.dtype, shape=view.shape, where=where)


def test_their_receiver_finds_our_tensors(tmp_path: Path) -> None:
    """They read names, dtypes, shapes and addresses; what lies there is what NIXL then reads."""
    weights = {
        "w": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "n": torch.tensor([1, 2, 3]),
    }
    trainer, generator = NixlAgent("shard-table-trainer"), NixlAgent("shard-table-generator")
    metadata = trainer.register_tensors(weights)
    table = render_shard_table(
        {name: place_of(name, each) for name, each in weights.items()},
        agent_name=trainer.agent_name,
        agent_metadata=metadata,
        metadata_endpoint="127.0.0.1:5555",
        step=7,
    )
    (tmp_path / "table.json").write_bytes(table)
    told = play("shard_table", tmp_path, TABLE=str(tmp_path / "table.json"))
    assert told[0] == {"agents": [trainer.agent_name], "devices": [0]}
    found = {each["tensor"]: each for each in told[1:]}
    assert set(found) == set(weights)
    said = json.loads(table)
    assert said["publisher_step"] == 7
    generator.meet(base64.b64decode(said["agent_meta_b64"]), said["agent_name"])
    for name, tensor in weights.items():
        here = found[name]
        assert (here["dtype"], here["shape"]) == (str(tensor.dtype), list(tensor.shape))
        target = memoryview(bytearray(here["elsize"] * tensor.numel()))
        generator.register([region_of(target)])
        remote = Region(here["addr"], len(target))
        read = generator.prepare(trainer.agent_name, [region_of(target)], [remote])
        done = generator.post(read)
        while not done:
            done = generator.poll(read)
        assert target == byte_view(name, tensor).data
        generator.forget(read)
        generator.deregister([region_of(target)])
