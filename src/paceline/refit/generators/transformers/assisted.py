"""Choices that a draft model helps with: it guesses, the model judges several guesses in one pass.

Tokens are drawn as without it, from the model's own distribution and from the choice's own stream,
position by position, until one differs from the guess. So a seed gives what it gives without a
draft, but for rounding in a pass over several tokens, whatever the draft's weights are; those only
decide how many tokens a pass brings.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from paceline.refit.generators.protocol import InstalledVersion
from paceline.refit.generators.transformers.batch import Job, Row, RunModel, RunningBatch
from paceline.refit.generators.transformers.cache import crop_cache, new_cache
from paceline.refit.generators.transformers.sampling import sample_tokens

GUESSES = 4
"""Tokens that are guessed for one pass."""

Found = tuple[int, float, InstalledVersion]


class AssistedBatches:
    """Rows with two caches each; signs what RunningBatch does."""

    def __init__(self, run_model: RunModel, run_draft: RunModel, *, draft_tokens: int) -> None:
        """Take both models; the draft knows tokens below ``draft_tokens``."""
        self._run_model = run_model
        self._run_draft = run_draft
        self._draft_tokens = draft_tokens
        self.clear()

    @property
    def rows(self) -> Sequence[Row]:
        """Every row."""
        return [each.row for each in self._lines]

    def clear(self) -> None:
        """Forget every row."""
        self._lines: list[_Line] = []

    def prefill(self, jobs: Sequence[Job], installed: InstalledVersion) -> None:
        """Run each prompt; the draft reads it when it is first asked."""
        for job in jobs:
            batch = RunningBatch(self._run_model)
            batch.prefill([job], installed)
            for part in batch.split():
                guesser = _Guesser(self._run_draft, self._draft_tokens)
                self._lines.append(_Line(part.rows[0], part.cache, guesser))

    def step(self, installed: InstalledVersion) -> None:
        """Add one token to every row; some were found in a pass before, and name its version."""
        for line in self._lines:
            line.step(self._run_model, installed)

    def drop(self, is_done: Callable[[Row], bool]) -> list[Row]:
        """Take out and return the rows that are done."""
        gone = [line.row for line in self._lines if is_done(line.row)]
        self._lines = [line for line in self._lines if line.row not in gone]
        return gone


class _Guesser:
    """The draft model's side of one row."""

    def __init__(self, run_draft: RunModel, num_tokens: int) -> None:
        self._run_draft = run_draft
        self._num_tokens = num_tokens
        self._cache = new_cache()
        self._heard = 0

    def guess(self, sequence: Sequence[int], count: int) -> list[int]:
        """Return the tokens that the draft thinks come next."""
        guesses: list[int] = []
        for _ in range(count):
            new = [*sequence, *guesses][self._heard :]
            known = [min(token_id, self._num_tokens - 1) for token_id in new]
            logits = _forward(self._run_draft, known, self._heard, self._cache, keep=1)
            self._heard += len(new)
            guesses.append(int(logits[0].argmax()))
        return guesses

    def keep(self, length: int) -> None:
        """Forget what was heard behind the first ``length`` tokens."""
        self._heard = min(self._heard, length)
        crop_cache(self._cache, self._heard)


class _Line:
    """One row, and tokens of it that were found and are not told yet."""

    def __init__(self, row: Row, cache: Cache, guesser: _Guesser) -> None:
        self.row = row
        self._guesser = guesser
        self._cache = cache
        self._found: deque[Found] = deque()

    def step(self, run_model: RunModel, installed: InstalledVersion) -> None:
        if not self._found:
            self._found.extend(self._round(run_model, installed))
        self.row.append(*self._found.popleft())

    def _round(self, run_model: RunModel, installed: InstalledVersion) -> list[Found]:
        """Run one pass over the newest token and guesses behind it; at least one token is found."""
        job, told = self.row.job, self.row.token_ids
        sequence = [*job.prompt, *told]
        guesses = self._guesser.guess(
            sequence, min(GUESSES, job.sampling.max_tokens - len(told) - 1)
        )
        ids = [sequence[-1], *guesses]
        logits = _forward(run_model, ids, len(sequence) - 1, self._cache, keep=len(ids))
        found: list[Found] = []
        for here, guessed in zip(logits, [*guesses, None], strict=True):
            tokens, logprobs = sample_tokens(here[None], [job.sampling], [self.row.stream])
            found.append((tokens[0], logprobs[0], installed))
            if tokens[0] != guessed:
                break
        right = len(sequence) + len(found) - 1
        crop_cache(self._cache, right)
        self._guesser.keep(right)
        return found


def _forward(run: RunModel, ids: Sequence[int], start: int, cache: Cache, *, keep: int) -> Any:
    """Run tokens from position ``start`` on and return the logits of the last ``keep``."""
    end = start + len(ids)
    output = run(
        input_ids=torch.tensor([list(ids)]),
        attention_mask=torch.ones(1, end, dtype=torch.long),
        position_ids=torch.arange(start, end)[None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    )
    return output.logits[0, -keep:]
