"""The choices that are generated together: their tokens, and the cache they share.

One row per choice. Rows are padded on the left to one width, so that the last column is every
row's newest token. A request joins after a prefill of its own; a row that is done leaves, and
columns that are padding for all who stay go with it. The cache is never recomputed: when the
weights change between two passes, keys and values of the old ones stay, and the row's spans say
which tokens came from which.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from paceline.refit.generators.protocol import (
    ChoicePiece,
    Generation,
    InstalledVersion,
    OnPiece,
    Sampling,
    VersionSpan,
)
from paceline.refit.generators.transformers.cache import new_cache
from paceline.refit.generators.transformers.sampling import sample_tokens
from paceline.refit.generators.transformers.text import GrowingText


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One prompt, its choices and who waits for them."""

    prompt: tuple[int, ...]
    sampling: Sampling
    streams: Sequence[np.random.Generator]
    future: "Future[Generation]"
    on_piece: OnPiece | None = None
    rows: "list[Row]" = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One choice while it grows."""

    job: Job
    stream: np.random.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str | None = None
    growing: GrowingText | None = None
    """Where somebody follows the text or it may be cut; otherwise it is decoded at the end."""
    num_told: int = 0
    """Tokens that whoever follows has been told."""

    def append(self, token_id: int, logprob: float, installed: InstalledVersion) -> None:
        """Add one token that ``installed`` produced."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        end = len(self.token_ids)
        if self.spans and self.spans[-1].installed == installed:
            start = self.spans.pop().start
        else:
            start = end - 1
        self.spans.append(VersionSpan(installed=installed, start=start, end=end))

    def new_piece(self, index: int) -> ChoicePiece:
        """Return what has come since the piece before."""
        start, self.num_told = self.num_told, len(self.token_ids)
        is_last = self.finish_reason is not None
        return ChoicePiece(
            index=index,
            token_ids=tuple(self.token_ids[start:]),
            logprobs=tuple(self.logprobs[start:]),
            text="" if self.growing is None else self.growing.take(is_last=is_last),
            spans=tuple(
                replace(span, start=max(span.start, start))
                for span in self.spans
                if span.end > start
            ),
            finish_reason=self.finish_reason,
        )


class RunningBatch:
    """Rows in flight and their cache; used by one thread, outside of any lock but the gate."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self.clear()

    def clear(self) -> None:
        """Forget every row and the cache."""
        self.rows: list[Row] = []
        self._cache = new_cache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    def prefill(self, jobs: Sequence[Job], installed: InstalledVersion) -> None:
        """Run the prompts, sample each choice's first token, and let them join."""
        width = max(len(job.prompt) for job in jobs)
        ids = torch.tensor([(0,) * (width - len(job.prompt)) + job.prompt for job in jobs])
        mask = torch.tensor([[0] * (width - len(j.prompt)) + [1] * len(j.prompt) for j in jobs])
        cache = new_cache()
        logits = self._forward(ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0), cache)
        for job in jobs:
            job.rows = [Row(job=job, stream=stream) for stream in job.streams]
        rows = [row for job in jobs for row in job.rows]
        origin = torch.tensor([at for at, job in enumerate(jobs) for _ in job.rows])
        _select_rows(cache, origin)
        _append_tokens(rows, logits[origin], installed)
        self._join(rows, cache, mask[origin])

    def step(self, installed: InstalledVersion) -> None:
        """Add one token to every row."""
        ids = torch.tensor([[row.token_ids[-1]] for row in self.rows])
        positions = self._mask.sum(dim=1, keepdim=True)
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        logits = self._forward(ids, self._mask, positions, self._cache)
        _append_tokens(self.rows, logits, installed)

    def drop(self, is_done: Callable[[Row], bool]) -> list[Row]:
        """Take out and return the rows that are done."""
        done = [is_done(row) for row in self.rows]
        if not any(done):
            return []
        gone = [row for row, is_gone in zip(self.rows, done, strict=True) if is_gone]
        kept = [at for at, is_gone in enumerate(done) if not is_gone]
        if not kept:
            self.clear()
            return gone
        self.rows = [self.rows[at] for at in kept]
        self._mask = self._mask[kept]
        _select_rows(self._cache, torch.tensor(kept))
        self._trim()
        return gone

    def split(self) -> "list[RunningBatch]":
        """Return a batch for each row, with a copy of its part of the cache."""
        parts = []
        for at, row in enumerate(self.rows):
            part = RunningBatch(self._model)
            part.rows, part._mask = [row], self._mask[at : at + 1]
            for number, layer in enumerate(self._cache.layers):
                keys, values = layer.keys[at : at + 1], layer.values[at : at + 1]
                part._cache.update(keys, values, number)
            parts.append(part)
        return parts

    def _forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
    ) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _join(self, rows: list[Row], cache: Cache, mask: torch.Tensor) -> None:
        if not self.rows:
            self.rows, self._cache, self._mask = rows, cache, mask
            return
        width = max(mask.shape[1], self._mask.shape[1])
        self.rows = self.rows + rows
        self._mask = torch.cat([_pad_mask(self._mask, width), _pad_mask(mask, width)])
        for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys = torch.cat([_pad_cache(mine.keys, width), _pad_cache(theirs.keys, width)])
            mine.values = torch.cat(
                [_pad_cache(mine.values, width), _pad_cache(theirs.values, width)]
            )

    def _trim(self) -> None:
        """Cut the columns that are padding in every row."""
        surplus = int(self._mask.argmax(dim=1).min())
        if surplus:
            self._mask = self._mask[:, surplus:]
            for layer in self._cache.layers:
                layer.keys = layer.keys[:, :, surplus:]
                layer.values = layer.values[:, :, surplus:]


class SoloBatches:
    """The same, each row in a batch of its own: nobody's numbers depend on who is beside.

    A matrix product of another shape may add up in another order, and a padded attention too.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self.clear()

    @property
    def rows(self) -> Sequence[Row]:
        """Every row."""
        return [row for batch in self._batches for row in batch.rows]

    def clear(self) -> None:
        """Forget every row."""
        self._batches: list[RunningBatch] = []

    def prefill(self, jobs: Sequence[Job], installed: InstalledVersion) -> None:
        """Run each prompt alone; its choices part after the first token."""
        for job in jobs:
            batch = RunningBatch(self._model)
            batch.prefill([job], installed)
            self._batches += batch.split()

    def step(self, installed: InstalledVersion) -> None:
        """Add one token to every row."""
        for batch in self._batches:
            batch.step(installed)

    def drop(self, is_done: Callable[[Row], bool]) -> list[Row]:
        """Take out and return the rows that are done."""
        gone = [row for batch in self._batches for row in batch.drop(is_done)]
        self._batches = [batch for batch in self._batches if batch.rows]
        return gone


def _append_tokens(rows: Sequence[Row], logits: torch.Tensor, installed: InstalledVersion) -> None:
    tokens, logprobs = sample_tokens(
        logits, [row.job.sampling for row in rows], [row.stream for row in rows]
    )
    for row, token_id, logprob in zip(rows, tokens, logprobs, strict=True):
        row.append(token_id, logprob, installed)


def _select_rows(cache: Cache, indices: torch.Tensor) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys[indices]
        layer.values = layer.values[indices]


def _pad_mask(mask: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (width - mask.shape[1], 0))


def _pad_cache(states: torch.Tensor, width: int) -> torch.Tensor:
    """Pad [rows, heads, columns, size] on the left to ``width`` columns."""
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))
