"""The same with Accelerate: publish the model below its wrappers."""

import torch
from accelerate import Accelerator
from tiny import loss_of, network, settle

from paceline.refit import join_run


def main(steps: int = 3) -> None:
    """Train as Accelerate says, on whatever it was configured for."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with join_run() as run, run.publisher(accelerator.unwrap_model(model)) as publisher:
        publisher.publish(step=0)
        for step in range(1, steps + 1):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step))
                publisher.before_step()
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # not while gradients are accumulated
                publisher.publish(step=step)
        settle(publisher)


if __name__ == "__main__":
    main()
