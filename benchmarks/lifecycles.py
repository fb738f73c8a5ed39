"""How many seeded lives of machines end with something off record, rented twice, or still billing.

`python benchmarks/lifecycles.py --json` lives as many as fit into half a minute; with
LIFECYCLES=10000 the full number, over all four clouds.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bars import Bar, at_least, at_most, run

from paceline.testing.lifecycles import Life, LifeStory, prepare

_BACKENDS = ("vast", "runpod", "lambda", "nebius")
_NUM_LIVES = 400


def measure() -> Sequence[Bar]:
    """Live, and count what must be zero."""
    logging.disable(logging.CRITICAL)
    num_lives = int(os.environ.get("LIFECYCLES", _NUM_LIVES))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(directory)
        stories = [
            Life(seed, backend=_BACKENDS[seed % len(_BACKENDS)], directory=directory).live()
            for seed in range(num_lives)
        ]
    return [
        at_least("lives", len(stories), num_lives),
        at_most("off record or billing in the end", _count(stories, "bills", " bill"), 0),
        at_most("two machines for one request", _count(stories, "for one request"), 0),
        at_least("machines that ran, per life", _per_life(stories, "num_rented"), 0.2),
        at_least("kills, per life", _per_life(stories, "num_crashes"), 0.2),
    ]


def _count(stories: Sequence[LifeStory], *words: str) -> int:
    texts = [text for story in stories for text in story.problems]
    is_double = "for one request" in words
    return sum(
        any(word in text for word in words) and ("for one request" in text) == is_double
        for text in texts
    )


def _per_life(stories: Sequence[LifeStory], name: str) -> float:
    return sum(int(getattr(story, name)) for story in stories) / len(stories)


if __name__ == "__main__":
    run(measure, "seeded lives of machines on the fake clouds")
