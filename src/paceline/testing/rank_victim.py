"""One rank of a sharded trainer that publishes when it is told, and may be killed at any time.

Run with the variables of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and of a run:
``python -m paceline.testing.rank_victim FOLDER``. For every step N from 0 on it waits for the file
``go-N-RANK``, publishes, and says how that ended in ``end-N-RANK``. Its weights are the same at
every start, unless there is a file ``other-RANK``.
"""

import json
import os
import sys
from pathlib import Path
from typing import cast

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.waiting import wait_until
from paceline.refit.compose import join_run
from paceline.refit.publisher import Publisher
from paceline.system import system_clock

WAIT_S = 120.0
LOOK_S = 0.02


def main() -> None:
    """Publish step after step until the process is ended."""
    folder, clock = Path(sys.argv[1]), system_clock()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(1)
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 10)))
    if (folder / f"other-{distributed.get_rank()}").exists():
        _change(model)
    with join_run() as run:
        publisher = run.publisher(model)
        assert isinstance(publisher, Publisher)
        with publisher:
            for step in range(1000):
                _publish(publisher, folder, step, clock)


def _change(model: FSDPModule) -> None:
    """Begin with weights that no version has, in this rank's part."""
    with torch.no_grad():
        for parameter in cast(torch.nn.Module, model).parameters():
            cast(DTensor, parameter).to_local().add_(1.0)


def _publish(publisher: Publisher, folder: Path, step: int, clock: Clock) -> None:
    rank = distributed.get_rank()
    wait_until(
        (folder / f"go-{step}-{rank}").exists,
        what=f"step {step}",
        clock=clock,
        timeout_s=WAIT_S,
        interval_s=LOOK_S,
    )
    try:
        published = publisher.publish(step=step).result()
        said = {"version": published.version_id, "format": published.payload_format.value}
    except PacelineError as exc:
        said = {"error": str(exc)}
    part = folder / f"end-{step}-{rank}.part"
    part.write_text(json.dumps({**said, "at_s": clock.monotonic()}))
    part.rename(folder / f"end-{step}-{rank}")


if __name__ == "__main__":
    main()
    os._exit(0)
