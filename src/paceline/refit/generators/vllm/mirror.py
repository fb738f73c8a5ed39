"""The checkpoint in this process's memory: deltas apply to it, failures are undone from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.refit.apply import StagedInstall
from paceline.refit.delta.order import Positions, Words, as_words, kind_of
from paceline.refit.delta.steps import Steps, positions_of
from paceline.refit.model import TensorBuffer, TensorEntry
from paceline.refit.staging.torch_bytes import WORD_DTYPES
from paceline.refit.writing import TensorWrite

Changes = Mapping[str, Positions | None]
"""Tensor -> which elements change, None for all."""

INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element width -> a dtype whose copies keep every bit."""


def allocate(entry: TensorEntry) -> TensorBuffer:
    """Return memory for one tensor; what is in it is undefined."""
    data = np.empty(entry.num_bytes, dtype=np.uint8).data
    return TensorBuffer(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=data)


def as_tensor(buffer: TensorBuffer) -> torch.Tensor:
    """View a buffer as the tensor that it holds."""
    dtype = WORD_DTYPES[buffer.dtype]
    if not len(buffer.data):
        return torch.empty(buffer.shape, dtype=dtype)
    return torch.frombuffer(buffer.data, dtype=dtype).view(buffer.shape)


def words_of(buffer: TensorBuffer) -> Words:
    """View a buffer as words."""
    return as_words(buffer.data, kind_of(buffer.dtype).width)


def changes_of(staged: StagedInstall) -> dict[str, Positions | None]:
    """Return which elements a staged version changes."""
    found: dict[str, list[Positions] | None] = {each.name: None for each in staged.scatters}
    for write in staged.writes:
        places, known = _positions(write), found.setdefault(write.name, [])
        if places is None or known is None:
            found[write.name] = None
        else:
            known.append(places)
    return {name: None if some is None else np.concatenate(some) for name, some in found.items()}


def _positions(write: TensorWrite) -> Positions | None:
    found: list[Positions] = []
    for update in write.steps or ():
        if not isinstance(update.new, Steps):
            return None
        found.append(positions_of(update.new.gaps) + update.part.start + write.first)
    return np.concatenate(found) if found else None


@dataclass(frozen=True, slots=True, eq=False)
class MemoryJournal:
    """Signs apply.Journal: the words that an install overwrites, to take it back later."""

    kept: list[tuple[str, int, Steps | None, Words]] = field(default_factory=list)

    def keep(self, name: str, start: int, steps: Steps | None, old: Words) -> None:
        """Keep the words of one chunk: those at the steps, or all from ``start`` on."""
        self.kept.append((name, start, steps, old))

    def seal(self) -> None:
        """Memory needs nothing to be safe from what this journal is for."""

    def finish(self) -> None:
        """Stay: another worker may fail where this one did not."""

    def restore(self, live: Mapping[str, TensorBuffer]) -> None:
        """Put every word back."""
        for name, start, steps, old in reversed(self.kept):
            words = words_of(live[name])
            if steps is None:
                words[start : start + len(old)] = old
            else:
                words[positions_of(steps.gaps) + start] = old

    def changes(self) -> dict[str, Positions | None]:
        """Return which elements ``restore`` writes."""
        found: dict[str, list[Positions]] = {}
        whole = {name for name, _, steps, _ in self.kept if steps is None}
        for name, start, steps, _ in self.kept:
            if steps is not None:
                found.setdefault(name, []).append(positions_of(steps.gaps) + start)
        changed: dict[str, Positions | None] = dict.fromkeys(sorted(whole))
        changed |= {name: np.concatenate(some) for name, some in found.items() if name not in whole}
        return changed
