"""How prime-rl moves weights: the trainer broadcasts, the orchestrator waits for a mark."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tiny import loss_of, network, settle

from paceline.refit import join_run
from paceline.refit.integrations.prime_rl import FOLDER, STABLE, WeightBroadcast


def newest_step(output_dir: Path) -> int:
    """Return what prime-rl's orchestrator would serve; -1 before the first step."""
    marks = (output_dir / FOLDER).glob(f"step_*/{STABLE}")
    return max((int(mark.parent.name.removeprefix("step_")) for mark in marks), default=-1)


def main(steps: int = 3, output_dir: Path | None = None) -> None:
    """Train as prime-rl's trainer does."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with TemporaryDirectory() as directory, join_run() as run:
        folder = output_dir or Path(directory)
        publisher = run.publisher(model)
        broadcast = WeightBroadcast(folder, lambda _: publisher)
        try:
            for step in range(steps + 1):
                broadcast.broadcast_weights(model, step)
                if newest_step(folder) != step:
                    raise RuntimeError("the orchestrator did not see the step")
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            settle(publisher)
        finally:
            broadcast.shutdown()


if __name__ == "__main__":
    main(output_dir=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
