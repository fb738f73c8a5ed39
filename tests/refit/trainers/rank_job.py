"""A training job that torchrun starts: every layout that people train in, published by all ranks.

Run with: torchrun ... rank_job.py FOLDER LAYOUT[,LAYOUT...]. What the weights were at each step is
gathered for the judge alone and written to FOLDER/LAYOUT-STEP.pt; publishing gathers nothing.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from paceline.core.waiting import wait_until
from paceline.refit.compose import join_run, run_settings
from paceline.refit.publisher import Publisher
from paceline.system import environ, system_clock

STEPS = 3
Built = tuple[torch.nn.Module, DeviceMesh | None]


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, a tie, a norm, a buffer, two blocks."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(51, 18)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm = torch.nn.LayerNorm(18)
        self.head = torch.nn.Linear(18, 51, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


class Block(torch.nn.Module):
    """Two layers that tensor parallelism cuts by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(18, 28)
        self.down = torch.nn.Linear(28, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return found


def _world() -> int:
    return distributed.get_world_size()


def _parallel(net: Net, mesh: DeviceMesh) -> Net:
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def _fully_sharded(net: Net, mesh: DeviceMesh) -> torch.nn.Module:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def ddp() -> Built:
    return DistributedDataParallel(Net()), None


def fsdp1() -> Built:
    policy = ModuleWrapPolicy({Block})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        Net(), auto_wrap_policy=policy, use_orig_params=True, device_id=cpu
    ), None


def fsdp2() -> Built:
    mesh = init_device_mesh("cpu", (_world(),), mesh_dim_names=("fsdp",))
    return _fully_sharded(Net(), mesh), None


def tp() -> Built:
    mesh = init_device_mesh("cpu", (_world(),), mesh_dim_names=("tp",))
    return _parallel(Net(), mesh), mesh


def fsdp2_tp() -> Built:
    mesh = init_device_mesh("cpu", (_world() // 2, 2), mesh_dim_names=("dp", "tp"))
    return _fully_sharded(_parallel(Net(), mesh["tp"]), mesh["dp"]), mesh


def hsdp() -> Built:
    mesh = init_device_mesh("cpu", (_world() // 2, 2), mesh_dim_names=("copy", "fsdp"))
    return _fully_sharded(Net(), mesh), None


def qwen3_fsdp2(model_dir: Path) -> Built:
    from paceline.testing.tiny_model import tiny_model

    model = tiny_model(model_dir, seed=1, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model), None


LAYOUTS: Mapping[str, Callable[[], Built]] = {
    each.__name__: each for each in (ddp, fsdp1, fsdp2, tp, fsdp2_tp, hsdp)
}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take one real step, on other data in every rank that has data of its own."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 40, (2, 5), generator=generator)
    out: Any = model(ids)
    logits = getattr(out, "logits", out)
    loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def full_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gather everything, which publishing never does."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            plain = {
                name.replace("_fsdp_wrapped_module.", ""): value.clone()
                for name, value in [*model.named_parameters(remove_duplicate=False)]
            }
        buffers = model.named_buffers()
        return plain | {
            name.replace("_fsdp_wrapped_module.", ""): value.clone() for name, value in buffers
        }
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in inner.state_dict().items()
    }


def publish_all(folder: Path, layout: str, build: Callable[[], Built]) -> None:
    """Train and publish, then serve until the judge has seen enough."""
    model, mesh = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = replace(run_settings(environ()), run_id=layout, model_name=layout)
    with join_run(settings) as run:
        publisher = run.publisher(model, mesh=mesh)
        assert isinstance(publisher, Publisher)
        with publisher:
            for step in range(STEPS):
                publisher.publish(step=10 * step).result()
                state = full_state(model)
                if distributed.get_rank() == 0:
                    torch.save(state, folder / f"{layout}-{step}.part")
                    (folder / f"{layout}-{step}.part").rename(folder / f"{layout}-{step}.pt")
                wait_for(folder / f"{layout}-{step}.seen")
                train(model, optimizer, step)
            wait_for(folder / f"{layout}.seen")


def wait_for(path: Path) -> None:
    """Wait for the judge's word."""
    wait_until(path.exists, what=path.name, clock=system_clock(), timeout_s=120, interval_s=0.05)


def main() -> None:
    """Run every layout that is asked for."""
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    builders: dict[str, Callable[[], Built]] = {
        **LAYOUTS,
        "qwen3_fsdp2": functools.partial(qwen3_fsdp2, folder / "model"),
    }
    for name in names:
        publish_all(folder, name, builders[name])
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter
