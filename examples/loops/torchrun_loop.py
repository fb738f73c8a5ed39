"""FSDP2 on all processes that torchrun starts; each publishes what it holds, nothing is gathered.

torchrun --standalone --nproc-per-node 2 torchrun_loop.py
"""

import torch
from tiny import loss_of, network, settle
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.refit import join_run


def main(steps: int = 3) -> None:
    """Train one model on all processes."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(kind, (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
        model = network().to(kind)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with join_run() as run, run.publisher(model, mesh=mesh) as publisher:
            publisher.publish(step=0)
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                publisher.before_step()
                optimizer.step()
                publisher.publish(step=step)
            settle(publisher)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
