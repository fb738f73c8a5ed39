"""The choices that are generated together: their tokens, and the cache they share.

One row per choice. Rows are padded on the left to one width, so that the last column is every
row's newest token. A request joins after a prefill of its own; a row that is done leaves, and
columns that are padding for all who stay go with it. The cache is never recomputed: when the
weights change between two passes, keys and values of the old ones stay, and the row's spans say
which tokens came from which.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache

from paceline.refit.generators.protocol import Generation, InstalledVersion, Sampling, VersionSpan
from paceline.refit.generators.transformers.sampling import sample_tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One prompt, its choices and who waits for them."""

    prompt: tuple[int, ...]
    sampling: Sampling
    streams: Sequence[np.random.Generator]
    future: "Future[Generation]"
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
    text: str | None = None
    """Set when a stop text cut it; otherwise the text of all its tokens."""

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


class RunningBatch:
    """Rows in flight and their cache; used by one thread, outside of any lock but the gate."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.clear()

    def clear(self) -> None:
        """Forget every row and the cache."""
        self.rows: list[Row] = []
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    def prefill(self, jobs: Sequence[Job], installed: InstalledVersion) -> None:
        """Run the prompts, sample each choice's first token, and let them join."""
        width = max(len(job.prompt) for job in jobs)
        ids = torch.tensor([(0,) * (width - len(job.prompt)) + job.prompt for job in jobs])
        mask = torch.tensor([[0] * (width - len(j.prompt)) + [1] * len(j.prompt) for j in jobs])
        cache = DynamicCache()
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

    def _forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache,
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

    def _join(self, rows: list[Row], cache: DynamicCache, mask: torch.Tensor) -> None:
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


def _append_tokens(rows: Sequence[Row], logits: torch.Tensor, installed: InstalledVersion) -> None:
    tokens, logprobs = sample_tokens(
        logits, [row.job.sampling for row in rows], [row.stream for row in rows]
    )
    for row, token_id, logprob in zip(rows, tokens, logprobs, strict=True):
        row.append(token_id, logprob, installed)


def _select_rows(cache: DynamicCache, indices: torch.Tensor) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys[indices]
        layer.values = layer.values[indices]


def _pad_mask(mask: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (width - mask.shape[1], 0))


def _pad_cache(states: torch.Tensor, width: int) -> torch.Tensor:
    """Pad [rows, heads, columns, size] on the left to ``width`` columns."""
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))
