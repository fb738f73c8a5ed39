"""The weights that passes read and, where there is memory for it, a second set beside them.

A set is a model of its own, not a list of tensors that parameters are pointed at: to exchange two
sets is to replace one reference, whatever the size of the model, and what is tied in one is tied
in the other.
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.core.errors import PreflightError
from paceline.refit.generators.transformers.checkpoint_names import name_as_files
from paceline.refit.generators.transformers.tensors import LiveTensors, view_live_tensors
from paceline.refit.model import TensorBuffer

log = logging.getLogger(__name__)

SHARE_OF_MEMORY = 3
"""Auto holds weights twice where so many times their size is free: for the second set, for the
payload of a full version, and as much again for caches and everybody else."""


DRAFT = "draft."
"""Tensors of a version whose names begin so belong to the draft model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What one version is the weights of."""

    main: torch.nn.Module
    draft: torch.nn.Module | None = None
    """A small one that says what the main one may say next."""

    def view(self, names: str) -> LiveTensors:
        """Return views of all bytes. Raises PreflightError, see view_live_tensors."""
        live = view_named(self.main, names)
        if self.draft is None:
            return live
        other = view_named(self.draft, names)
        drafts = {
            f"{DRAFT}{name}": replace(each, name=f"{DRAFT}{name}")
            for name, each in other.buffers.items()
        }
        ties = {f"{DRAFT}{alias}": f"{DRAFT}{name}" for alias, name in other.aliases.items()}
        return LiveTensors(buffers={**live.buffers, **drafts}, aliases={**live.aliases, **ties})

    def num_bytes(self) -> int:
        """Return the size of all weights, tied ones once."""
        both = (self.main, *(() if self.draft is None else (self.draft,)))
        tensors = [each for model in both for each in (*model.parameters(), *model.buffers())]
        return sum(each.numel() * each.element_size() for each in tensors)


def view_named(module: torch.nn.Module, names: str) -> LiveTensors:
    """Return views of a module's bytes, named as it does or as its files do.

    Raises:
        PreflightError: see view_live_tensors and name_as_files.
    """
    live = view_live_tensors(module)
    return name_as_files(module, live) if names == "checkpoint" else live


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSet:
    """The models that are exchanged together, and the views of their bytes."""

    models: Models
    live: LiveTensors


class WeightSets:
    """Which set is live; signs SpareWeights where there are two."""

    def __init__(self, models: Models, *, names: str, is_twice: bool) -> None:
        """Take the first set, and copy it if weights are to be held twice.

        Raises:
            PreflightError: views of the model's bytes cannot be had, or the copy is not like it.
        """
        first = WeightSet(models=models, live=models.view(names))
        self._sets: tuple[WeightSet, ...] = (first, _copied(first, names)) if is_twice else (first,)
        """The live one first."""

    @property
    def is_twice(self) -> bool:
        """Whether there is a second set."""
        return len(self._sets) > 1

    def run(self, **arguments: Any) -> Any:
        """Run a pass of the live model; what is live does not change while one runs."""
        return self._sets[0].models.main(**arguments)

    def run_draft(self, **arguments: Any) -> Any:
        """Run a pass of the draft model that is live."""
        draft = self._sets[0].models.draft
        assert draft is not None  # noqa: S101 - asked for only where there is one
        return draft(**arguments)

    def live(self) -> LiveTensors:
        """Return the views of the live set."""
        return self._sets[0].live

    def tensors(self) -> Mapping[str, TensorBuffer]:
        """Return writable views of the spare set."""
        return self._sets[1].live.buffers

    def exchange(self) -> None:
        """Make the spare set the live one: one assignment, which nothing interrupts half-way."""
        self._sets = self._sets[::-1]


def is_held_twice(wanted: str, *, weight_bytes: int, memory_bytes: int) -> bool:
    """Decide how often weights are held, by what was wanted and what is free."""
    if wanted != "auto":
        return wanted == "twice"
    return memory_bytes >= SHARE_OF_MEMORY * weight_bytes


def hold_weights(models: Models, *, names: str, wanted: str, memory_bytes: int) -> WeightSets:
    """Return the sets of the models' weights, and say in the log how often they are held.

    Raises:
        PreflightError: see WeightSets.
    """
    size = models.num_bytes()
    is_twice = is_held_twice(wanted, weight_bytes=size, memory_bytes=memory_bytes)
    log.info(
        "weights of %d MiB are held %s (%s, %d MiB are free)",
        size >> 20,
        "twice" if is_twice else "once",
        wanted,
        memory_bytes >> 20,
    )
    return WeightSets(models, names=names, is_twice=is_twice)


def _copied(first: WeightSet, names: str) -> WeightSet:
    """Copy a set, which also touches all of its memory before anybody waits for that."""
    models = copy.deepcopy(first.models)
    live = models.view(names)
    shapes = {name: (each.dtype, each.shape) for name, each in first.live.buffers.items()}
    if live.aliases != first.live.aliases or shapes != {
        name: (each.dtype, each.shape) for name, each in live.buffers.items()
    }:
        raise PreflightError(
            "a copy of this model does not tie its tensors as the model does; hold its weights "
            "once (--weights once)"
        )
    return WeightSet(models=models, live=live)
