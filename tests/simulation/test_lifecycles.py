"""Seeded lives of machines on the fake clouds end with nothing off record and nothing billing."""

from pathlib import Path

import pytest

from paceline.testing.lifecycles import Life, LifeStory, prepare

_NUM_LIVES = {"lambda": 120, "nebius": 30, "runpod": 120, "vast": 120}
"""As many as fit into a few seconds; benchmarks/lifecycles.py lives ten thousand."""


@pytest.mark.parametrize("backend", sorted(_NUM_LIVES))
def test_nothing_bills_that_is_on_no_record(backend: str, tmp_path: Path) -> None:
    """Lost answers, hidden creates, vanished offers, late listings, kills: nothing is left."""
    prepare(tmp_path)
    stories = [
        Life(seed, backend=backend, directory=tmp_path).live()
        for seed in range(_NUM_LIVES[backend])
    ]
    assert _problems(stories) == []
    # the weather must let some through, or nothing was tried
    assert sum(story.num_rented for story in stories) > len(stories) / 5
    assert sum(story.num_crashes for story in stories) > len(stories) / 5


def _problems(stories: list[LifeStory]) -> list[str]:
    return [f"seed {story.seed}: {text}" for story in stories for text in story.problems]
