"""Choosing tokens: support, probabilities and independence from neighbours."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.errors import GenerationError
from paceline.refit.generators.protocol import Sampling
from paceline.refit.generators.transformers.sampling import make_streams, sample_tokens

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 8),
    top_p=st.floats(0.05, 1.0),
    seed=st.integers(0, 2**63 - 1),
)
# Apart from each other: tokens that are equally likely in single precision may change places.
LOGITS = st.lists(
    st.integers(-64, 64).map(lambda eighths: eighths / 8), min_size=6, max_size=6, unique=True
)


def allowed(logits: list[float], sampling: Sampling) -> set[int]:
    """Say which tokens may come out, by plain arithmetic."""
    order = sorted(range(len(logits)), key=lambda at: -logits[at])
    if sampling.temperature == 0:
        return {order[0]}
    weights = [math.exp((each - max(logits)) / sampling.temperature) for each in logits]
    kept = order[: sampling.top_k] if sampling.top_k else order
    total, reached, nucleus = sum(weights[at] for at in kept), 0.0, set()
    for at in kept:
        # A token on the very edge may fall either way.
        if reached < sampling.top_p * total + 1e-6:
            nucleus.add(at)
        reached += weights[at]
    return nucleus


@given(rows=st.lists(st.tuples(LOGITS, SAMPLINGS), min_size=1, max_size=4))
def test_rows_are_independent_and_in_bounds(rows: list[tuple[list[float], Sampling]]) -> None:
    """Each row gets a token that may come out, the one it would get alone."""
    logits = torch.tensor([row for row, _ in rows])
    samplings = [sampling for _, sampling in rows]
    tokens, logprobs = sample_tokens(logits, samplings, [stream(each) for each in samplings])
    for at, (row, sampling) in enumerate(rows):
        assert tokens[at] in allowed(row, sampling)
        scaled = torch.tensor(row) / (sampling.temperature or 1.0)
        expected = torch.log_softmax(scaled, -1)[tokens[at]].item()
        assert logprobs[at] == pytest.approx(expected, abs=1e-4)
        alone, _ = sample_tokens(logits[at : at + 1], [sampling], [stream(sampling)])
        assert alone == [tokens[at]]


def stream(sampling: Sampling) -> np.random.Generator:
    return make_streams(sampling, fresh_seed=0)[0]


def test_frequencies() -> None:
    """Over many draws tokens come as often as their probability says."""
    probabilities = [0.5, 0.25, 0.2, 0.05]
    logits = torch.tensor([probabilities]).log().repeat(4000, 1)
    sampling = Sampling(seed=1, n=4000)
    tokens, _ = sample_tokens(logits, [sampling] * 4000, make_streams(sampling, fresh_seed=0))
    for token, probability in enumerate(probabilities):
        assert tokens.count(token) / 4000 == pytest.approx(probability, abs=0.03)


def test_fresh_seed() -> None:
    """Without a seed of its own a request takes the fresh one."""
    first = [one.random() for one in make_streams(Sampling(), fresh_seed=5)]
    assert first == [one.random() for one in make_streams(Sampling(seed=5), fresh_seed=6)]


def test_nan() -> None:
    """Logits without a distribution are an error, not a token."""
    with pytest.raises(GenerationError):
        sample_tokens(torch.tensor([[math.nan, 0.0]]), [Sampling()], [stream(Sampling(seed=0))])
