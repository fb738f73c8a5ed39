"""A loop of your own, and the five lines that publish its weights."""

import torch
from tiny import loss_of, network, settle

from paceline.refit import join_run


def main(steps: int = 3) -> None:
    """Train, and let every engine of the run have every step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with join_run() as run, run.publisher(model) as publisher:  # 1, 2
        publisher.publish(step=0)  # 3
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            publisher.before_step()  # 4: waits where weights are served in place
            optimizer.step()
            publisher.publish(step=step)  # 5: returns when they are copied
        settle(publisher)


if __name__ == "__main__":
    main()
