"""Consecutive bf16 states of one tensor, as post-training with Adam makes them.

The released weights lie on the bf16 grid; fp32 masters start there, take Adam steps whose
gradients are noise with 10 % signal and a log-normal scale per element, and are cast to bf16
after each step. In the steady state about 0.9 % of the elements change per step at a learning
rate of 1e-6, 2.6 % at 3e-6 and 7 % at 1e-5; the first step changes two to four times as many.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint16]

ELEMENTS = 2**25
_SPREAD = 0.02
_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
_DECAY = 0.01


def simulate(
    wanted: Mapping[float, Sequence[int]], *, elements: int, seed: int = 0
) -> Iterator[tuple[float, int, Words]]:
    """Yield (learning rate, step, words) for the steps wanted; all rates see one gradient."""
    random = torch.Generator().manual_seed(seed)
    released = (torch.randn(elements, generator=random) * _SPREAD).bfloat16().float()
    masters = {rate: released.clone() for rate in wanted}
    scale = torch.exp(torch.randn(elements, generator=random) * 1.5) * 1e-5
    signal = torch.randn(elements, generator=random) * 0.1
    first, second = torch.zeros(elements), torch.zeros(elements)
    for step in range(max(max(steps) for steps in wanted.values()) + 1):
        if step:
            gradient = torch.randn(elements, generator=random).add_(signal).mul_(scale)
            first.mul_(_BETAS[0]).add_(gradient, alpha=1 - _BETAS[0])
            second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            root = (second / (1 - _BETAS[1] ** step)).sqrt_().add_(_EPSILON)
            update = (first / (1 - _BETAS[0] ** step)).div_(root)
            for rate, master in masters.items():
                master.mul_(1 - rate * _DECAY).add_(update, alpha=-rate)
        for rate, steps in wanted.items():
            if step in steps:
                yield rate, step, masters[rate].bfloat16().view(torch.int16).numpy().view(np.uint16)


class Snapshots:
    """Snapshots on disk, simulated once and kept in the temporary directory."""

    def __init__(self, wanted: Mapping[float, Sequence[int]], *, elements: int = ELEMENTS) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"paceline-snapshots-{elements}"
        missing = [
            (rate, step)
            for rate, steps in wanted.items()
            for step in steps
            if not self._path(rate, step).exists()
        ]
        if missing:
            self._folder.mkdir(exist_ok=True)
            for rate, step, words in simulate(wanted, elements=elements):
                partial = self._path(rate, step).with_suffix(".partial")
                with partial.open("wb") as file:
                    np.save(file, words)
                partial.rename(self._path(rate, step))

    def __call__(self, rate: float, step: int) -> Words:
        """Return one snapshot in memory of its own."""
        words: Words = np.load(self._path(rate, step))
        return words

    def _path(self, rate: float, step: int) -> Path:
        return self._folder / f"lr{rate:g}-step{step}.npy"


def entropy_given_exponent(old: Words, new: Words) -> float:
    """Return the bytes that no coder of mask and steps that looks at the base exponent beats.

    Per exponent of the base: the entropy of which elements change, and of the steps they take.
    """
    ranks = [np.where(w & 0x8000, ~w, w | 0x8000) for w in (old, new)]
    steps = ranks[1] - ranks[0]
    exponents = old >> 7 & 255
    bits = 0.0
    for exponent in np.unique(exponents):
        here = steps[exponents == exponent]
        changed = here[here != 0]
        bits += _entropy(np.array([len(changed), len(here) - len(changed)]))
        bits += _entropy(np.bincount(changed))
    return bits / 8


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the bits that so many draws of each kind carry."""
    kept = counts[counts > 0]
    total = int(kept.sum())
    return float(-(kept * np.log2(kept / total)).sum()) if total and not math.isnan(total) else 0.0
