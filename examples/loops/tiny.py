"""What all loops here train: a small network on a sum that it can learn."""

from typing import Any

import torch


def network(seed: int = 0) -> torch.nn.Module:
    """Return the network, the same for a seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Return how far the network is from the sum of its inputs, on the batch of this step."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    found: torch.Tensor = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    return found


def settle(publisher: Any) -> None:
    """Wait until every engine of the run serves the last version."""
    if not publisher.wait_installed(timeout_s=60):
        raise SystemExit("an engine did not install the last version; its log says why")
