"""One rank of a model under FSDP2: what publishing costs it, while all the others stand still."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from paceline.core.waiting import wait_until
from paceline.refit.model import TrainerStagingMode, WeightPayloadFormat
from paceline.refit.trainers.sharded import ShardedTrainer
from paceline.system import system_clock

COLUMNS = 4096
LAYERS = 8
ROUNDS = 6
SHARE = 0.01
"""Of the elements, changed by a step."""


def build(mebibytes: int) -> torch.nn.Module:
    """Return a model of so many mebibytes, in layers of equal size."""
    rows = mebibytes * 2**20 // 2 // COLUMNS // LAYERS
    layers = [
        torch.nn.Linear(COLUMNS, rows, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    model = torch.nn.ModuleList(layers)
    for layer in model:
        fully_shard(layer)
    return model


def step(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Change a share of this rank's elements by a little, as an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local().view(-1)
            at = torch.randint(0, local.numel(), (int(local.numel() * SHARE),), generator=generator)
            local[at] += 0.01


def publish(trainer: ShardedTrainer, payload_format: WeightPayloadFormat) -> Sequence[float]:
    """Stage one version and make it the base; return what it took.

    Seconds without those in which others had the processor, seconds of the processor, all seconds.
    """
    began, cpu, kept_out = time.perf_counter(), time.process_time(), kept_out_s()
    staged = trainer.stage_shard(
        tensors=None,
        staging_mode=TrainerStagingMode.COPY_TO_HOST,
        payload_format=payload_format,
    )
    staged.publish_ready.wait()
    all_s = time.perf_counter() - began
    took = all_s - (kept_out_s() - kept_out), time.process_time() - cpu, all_s
    trainer.commit_staged(staged)
    trainer.release_staged(staged)
    return took


def kept_out_s() -> float:
    """Return how long this thread could have run while others had its core; 0 if nobody tells."""
    path = Path("/proc/thread-self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def take_one_core(rank: int) -> None:
    """Give this process as much as any other: one core, so there is no second thread either.

    With two, one thread waits for another that others may keep out: no clock tells that apart.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def turn(folder: Path, name: str, rank: int, world: int) -> Iterator[None]:
    """Act when every rank is ready and those before this one have acted; others sleep meanwhile.

    A barrier would not do: whoever waits in gloo's keeps a core busy.
    """
    (folder / f"{name}-ready-{rank}").touch()
    before = [folder / f"{name}-ready-{each}" for each in range(world)]
    done = [folder / f"{name}-done-{each}" for each in range(world)]
    sleep_until_all_exist([*before, *done[:rank]])
    yield
    done[rank].touch()
    sleep_until_all_exist(done)


def sleep_until_all_exist(paths: Sequence[Path]) -> None:
    """Wait for files without keeping a core busy."""
    wait_until(
        lambda: all(path.exists() for path in paths),
        what="the other ranks",
        clock=system_clock(),
        timeout_s=300,
        interval_s=0.01,
    )


def main() -> None:
    """Measure rank after rank, and write what this one found."""
    folder, mebibytes = Path(sys.argv[1]), int(sys.argv[2])
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    take_one_core(rank)
    model = build(mebibytes)
    trainer = ShardedTrainer(clock=system_clock())
    trainer.bind_tensors(model)
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, list[Sequence[float]]] = {"full": [], "delta": []}
    for round_ in range(ROUNDS):
        for kind, payload_format in (
            ("full", WeightPayloadFormat.FULL_TENSOR),
            ("delta", WeightPayloadFormat.XOR_DELTA),
        ):
            step(model, generator)
            with turn(folder, f"{round_}-{kind}", rank, world):
                took = publish(trainer, payload_format)
            if round_:  # the first one takes memory and loads loops
                found[kind].append(took)
    usual = {kind: [median(e) for e in zip(*some, strict=True)] for kind, some in found.items()}
    (folder / f"{world}-{rank}.json").write_text(json.dumps(usual))
    distributed.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
