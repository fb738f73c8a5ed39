"""Seeded runs: faults, deaths, crashes at any effect; the books are right after every one."""

import pytest

from paceline.testing.simulator import Simulation, Story

NUM_SEEDS = 160
NUM_PARTS = 2
NUM_SEEDS_AT_NIGHT = 20_000


def live(seeds: range) -> list[Story]:
    stories = [Simulation(seed).run() for seed in seeds]
    assert [(story.seed, story.problems) for story in stories if story.problems] == []
    return stories


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_nothing_is_left_billing_and_no_cap_is_passed(part: int) -> None:
    """And the stories are worth telling: machines are made, processes die, and so do machines."""
    stories = live(range(part, NUM_SEEDS, NUM_PARTS))
    assert sum(story.num_created for story in stories) > 2 * len(stories)
    assert sum(story.num_crashes for story in stories) > len(stories) / 4
    assert sum(story.num_deaths for story in stories) > len(stories) / 5


def test_caps_are_reached() -> None:
    """Some stories are of runs that cost too much; their books are right as well."""
    assert any(story.is_capped for story in live(range(46, 69, 11)))


def test_a_seed_is_the_same_story_every_time() -> None:
    """Line by line, also for the seed in which the process dies twice."""
    for seed in range(12):
        first, second = (Simulation(seed, keeps_log=True).run() for _ in range(2))
        assert first == second
        assert first.log
    assert len({Simulation(seed).run().digest for seed in range(12)}) == 12


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_twenty_thousand_seeds(part: int) -> None:
    """The same at length."""
    live(range(part, NUM_SEEDS_AT_NIGHT, 20))
