"""A LoRA: merged for engines that hold whole models, or alone for those that hold its base."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from tiny import loss_of, network, settle

from paceline.refit import join_run


def main(steps: int = 3, publishes: str = "merged") -> None:
    """Train a LoRA over weights that stay."""
    model = get_peft_model(network(), LoraConfig(r=4, target_modules=["0", "2"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    with join_run() as run, run.publisher(model, publishes=publishes) as publisher:
        publisher.publish(step=0)
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            publisher.before_step()
            optimizer.step()
            publisher.publish(step=step)
        settle(publisher)


if __name__ == "__main__":
    main(publishes=sys.argv[1] if len(sys.argv) > 1 else "merged")
