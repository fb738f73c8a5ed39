"""Choosing tokens: one pass over the whole batch, one random stream per choice."""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.refit.errors import GenerationError
from paceline.refit.generators.protocol import Sampling


def make_streams(sampling: Sampling, *, fresh_seed: int) -> list[np.random.Generator]:
    """Return one random stream per choice, from the request's seed or else ``fresh_seed``.

    Not torch's generator: on CPU it looks at the low 32 bits of a seed only.
    """
    seed = fresh_seed if sampling.seed is None else sampling.seed
    return [np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(sampling.n)]


def sample_tokens(
    logits: torch.Tensor, samplings: Sequence[Sampling], streams: Sequence[np.random.Generator]
) -> tuple[list[int], list[float]]:
    """Return a token and its log-probability for every row of ``logits`` [rows, vocabulary].

    The log-probability is that of softmax(logits / temperature), before top_k and top_p cut
    anything off. A row consumes one number of its own stream per token, whoever is beside it.

    Raises:
        GenerationError: a row has no distribution (NaN).
    """
    temperatures = torch.tensor([each.temperature or 1.0 for each in samplings])
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    if bool(torch.isnan(logprobs).any()):
        raise GenerationError("the model produced NaN logits; its weights or inputs are broken")
    is_greedy = torch.tensor([each.temperature == 0 for each in samplings])
    # Double precision: in single, the cumulative sum of a large vocabulary drifts.
    picked = _draw(_truncated(logprobs.double().exp(), samplings), streams)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1), picked)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    return tokens.tolist(), chosen.tolist()


def _draw(probabilities: torch.Tensor, streams: Sequence[np.random.Generator]) -> torch.Tensor:
    """Invert each row's distribution at one uniform number; rows need not sum to 1."""
    uniform = torch.tensor([each.random() for each in streams], dtype=torch.float64)
    cumulative = probabilities.cumsum(dim=-1)
    wanted = uniform[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
    return found.clamp(max=probabilities.shape[1] - 1)


def _truncated(probabilities: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    for row, sampling in zip(probabilities, samplings, strict=True):
        if 0 < sampling.top_k < row.numel():
            _keep_most_likely(row, sampling.top_k)
        if sampling.top_p < 1:
            _keep_nucleus(row, sampling.top_p)
    return probabilities


def _keep_most_likely(row: torch.Tensor, top_k: int) -> None:
    """Zero, in place, all but ``top_k`` tokens."""
    kept, indices = row.topk(top_k, sorted=False)
    row.zero_()
    row[indices] = kept


def _keep_nucleus(row: torch.Tensor, top_p: float) -> None:
    """Zero, in place, all but the fewest most likely tokens whose share reaches ``top_p``."""
    ordered, indices = row.sort(descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    row[indices[before >= top_p * ordered.sum()]] = 0
