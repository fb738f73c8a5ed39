"""Megatron-Core: tensor, pipeline and expert parallel weights under the names of checkpoints.

How a parameter is cut is read from what Megatron puts on it (``tensor_model_parallel``,
``partition_dim``); where this process stands, from its process groups. Each publishes its own part,
nothing is gathered. Heads are interleaved in Megatron's fused projections, so queries, keys and
values are put in order while they are copied; all else is a view.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from paceline.refit.manifest.region import Box
from paceline.refit.trainers.megatron_names import (
    DECODER,
    EMBEDDING,
    HEAD,
    Fused,
    Named,
    Rule,
    count_experts,
    named,
)
from paceline.refit.trainers.protocol import Collected
from paceline.refit.trainers.topology import (
    Cut,
    MeshAxes,
    Ownership,
    TensorSpec,
    plan_ownership,
    region_of,
)
from paceline.refit.trainers.torch_module import TorchModuleTrainer

log = logging.getLogger(__name__)

_AXES: Final = ("dp", "ep", "tp")
_TP: Final = 2
_NOT_WEIGHTS: Final = "_extra_state"
"""Ends the names of what Transformer Engine keeps beside weights to scale with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where a process stands: (index, size) along each kind of parallelism."""

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    dp: tuple[int, int] = (0, 1)
    """Copies of one expert: data and context parallelism over expert parallelism."""

    @classmethod
    def here(cls) -> "Grid":
        """Ask Megatron.

        Raises:
            ValueError: experts are cut otherwise than the rest.
        """
        from megatron.core import parallel_state as state

        tp = (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size())
        if state.get_expert_tensor_parallel_world_size() != tp[1]:
            raise ValueError(
                "experts with another tensor parallel size than the rest are not known"
            )
        return cls(
            tp=tp,
            pp=(
                state.get_pipeline_model_parallel_rank(),
                state.get_pipeline_model_parallel_world_size(),
            ),
            ep=(
                state.get_expert_model_parallel_rank(),
                state.get_expert_model_parallel_world_size(),
            ),
            dp=(state.get_expert_data_parallel_rank(), state.get_expert_data_parallel_world_size()),
        )

    @property
    def at(self) -> tuple[int, int, int]:
        """The place within a pipeline stage."""
        return (self.dp[0], self.ep[0], self.tp[0])

    @property
    def axes(self) -> MeshAxes:
        """The axes within a pipeline stage."""
        return MeshAxes(names=_AXES, sizes=(self.dp[1], self.ep[1], self.tp[1]))

    @property
    def all_axes(self) -> MeshAxes:
        """The axes of all processes."""
        return MeshAxes(names=("pp", *_AXES), sizes=(self.pp[1], *self.axes.sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What a fused projection of attention consists of."""

    count: int
    groups: int
    """Heads for keys and for values."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor of a checkpoint, as far as this process has it."""

    name: str
    spec: TensorSpec
    """With the rows that were added to a vocabulary."""
    is_expert: bool
    is_vocabulary: bool
    template: torch.Tensor
    read: Callable[[], torch.Tensor] | None
    """Puts it in order; None: the template is it."""


class MegatronSource:
    """What one process publishes of a model; made once, when the tensors are bound."""

    def __init__(
        self,
        model: Any,
        *,
        grid: Grid,
        heads: Heads,
        vocabulary: int,
        names: Sequence[Rule] = DECODER,
        is_tied: bool = False,
    ) -> None:
        """Find out who publishes what. Raises ValueError for what is not known."""
        self._model, self._grid, self._heads = model, grid, heads
        self._vocabulary, self._rules, self._is_tied = vocabulary, names, is_tied
        if heads.groups % grid.tp[1]:
            raise ValueError(
                f"{heads.groups} groups of heads over {grid.tp[1]} processes: keys and values that "
                "are copied between them are not known"
            )
        self._layers = _layers_of(model)
        self._first_expert = grid.ep[0] * count_experts(self._state(), names)
        parts = list(self._parts())
        self._dense = _owned(grid, [part for part in parts if not part.is_expert])
        own = Grid(tp=grid.tp, dp=grid.dp)
        self._experts = _owned(own, [part for part in parts if part.is_expert])
        self._own_at = own.at

    @property
    def slot(self) -> str:
        """This process's contribution."""
        return self._grid.all_axes.slot((self._grid.pp[0], *self._grid.at))

    @property
    def slots(self) -> tuple[str, ...]:
        """Everybody's: each process has a part, or refuses to be bound."""
        axes = self._grid.all_axes
        return tuple(sorted(axes.slot(at) for at in axes.coordinates()))

    def collect(self) -> Collected:
        """Return this process's parts as they are now; nothing is copied."""
        found = Collected(tensors={})
        for part in self._parts():
            box = self._box(part)
            if box is None:
                continue
            found.tensors[part.name] = part.template[tuple(slice(length) for length in box.shape)]
            if part.read is not None:
                found.made[part.name] = part.read
            region = region_of(box, self._shape(part))
            if region is not None:
                found.regions[part.name] = region
        if self._is_tied and EMBEDDING in found.tensors:
            found.aliases[HEAD] = EMBEDDING
        return found

    def _box(self, part: _Part) -> Box | None:
        """Return what this process publishes of a tensor, without rows that were added."""
        if part.is_expert:
            box = self._experts.part(part.name, self._own_at)
        else:
            box = self._dense.part(part.name, self._grid.at)
        shape = self._shape(part)
        return None if box is None else box.meet(Box((0,) * len(shape), shape))

    def _shape(self, part: _Part) -> tuple[int, ...]:
        shape = part.spec.shape
        return (self._vocabulary, *shape[1:]) if part.is_vocabulary else shape

    def _state(self) -> dict[str, torch.Tensor]:
        state = self._model.state_dict(keep_vars=True)
        return {name: each for name, each in state.items() if not name.endswith(_NOT_WEIGHTS)}

    def _parts(self) -> Iterator[_Part]:
        for name, tensor in self._state().items():
            found = named(name, self._rules, layers=self._layers, first_expert=self._first_expert)
            if self._is_tied and found.names == (HEAD,):
                continue
            for part_name, template, read in self._cut(found, tensor):
                spec = self._spec(tensor, template)
                yield _Part(
                    name=part_name,
                    spec=spec,
                    is_expert=found.is_expert,
                    is_vocabulary=found.fused is Fused.VOCABULARY,
                    template=template,
                    read=read,
                )

    def _cut(
        self, found: Named, tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor, Callable[[], torch.Tensor] | None]]:
        """Yield name, template and reader of every part of one of Megatron's tensors."""
        held = tensor.detach()
        if found.fused is Fused.GATE_UP:
            half = held.shape[0] // 2
            yield found.names[0], held[:half], None
            yield found.names[1], held[half:], None
        elif found.fused is Fused.QKV:
            heads = self._heads.count // self._heads.groups
            for name, (first, last) in zip(
                found.names, ((0, heads), (heads, heads + 1), (heads + 1, heads + 2)), strict=True
            ):
                rows = held.shape[0] // (heads + 2) * (last - first)
                yield name, held[:rows], partial(self._in_order, held, first, last)
        else:
            yield found.names[0], held, None

    def _in_order(self, held: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return the rows of some heads of every group, one group behind another."""
        heads = self._heads.count // self._heads.groups
        by_group = held.view(-1, heads + 2, self._heads.size, *held.shape[1:])
        return by_group[:, first:last].reshape(-1, *held.shape[1:])

    def _spec(self, tensor: torch.Tensor, part: torch.Tensor) -> TensorSpec:
        shape = list(part.shape)
        cuts: tuple[Cut, ...] = ()
        if getattr(tensor, "tensor_model_parallel", False) and self._grid.tp[1] > 1:
            dim = getattr(tensor, "partition_dim", 0)
            shape[dim] *= self._grid.tp[1]
            cuts = (Cut(axis=_TP, dim=dim),)
        size = part.element_size() * part.numel() * (self._grid.tp[1] if cuts else 1)
        return TensorSpec(shape=tuple(shape), num_bytes=size, cuts=cuts)


class MegatronTrainer(TorchModuleTrainer):
    """Signs what TorchModuleTrainer signs, and SupportsSlots."""

    def __init__(
        self,
        *,
        vocabulary: int,
        grid: Grid | None = None,
        names: Sequence[Rule] = DECODER,
        **options: Any,
    ) -> None:
        """Set up; tensors come with ``bind_tensors``.

        Args:
            vocabulary: rows that the checkpoint's embedding has; Megatron adds some.
            grid: where this process stands; None asks Megatron.
            names: what tensors are called in a checkpoint.
            options: of TorchModuleTrainer.
        """
        super().__init__(**options)
        self._vocabulary, self._grid, self._names = vocabulary, grid, names
        self._shards: MegatronSource | None = None

    @property
    def expected_source_slots(self) -> tuple[str, ...]:
        """The slots of all processes, sorted. Raises ValueError before tensors are bound."""
        if self._shards is None:
            raise ValueError("bind_tensors was not called")
        return self._shards.slots

    def bind_tensors(self, tensors: Any) -> str:
        """Take one of Megatron's models, once; call it on every process.

        Raises:
            ValueError: bound already, a layout or a name that is not known, or no part is here.
        """
        if self._shards is None:
            model = _unwrapped(tensors)
            config = model.config
            grid = self._grid or Grid.here()
            is_tied = bool(getattr(model, "share_embeddings_and_output_weights", False))
            if is_tied and grid.pp[1] > 1:
                raise ValueError("an embedding tied over pipeline stages is not known: untie it")
            self._shards = MegatronSource(
                model,
                grid=grid,
                heads=Heads(
                    count=config.num_attention_heads,
                    groups=config.num_query_groups or config.num_attention_heads,
                    size=config.kv_channels,
                ),
                vocabulary=self._vocabulary,
                names=self._names,
                is_tied=is_tied,
            )
            self._slot = self._shards.slot
        return super().bind_tensors(tensors)

    def _collect(self, source: Any) -> Collected:
        assert self._shards is not None  # noqa: S101 - bound first
        return self._shards.collect()


def _owned(grid: Grid, parts: Sequence[_Part]) -> Ownership:
    return plan_ownership(grid.axes, {part.name: part.spec for part in parts})


def _layers_of(model: Any) -> Sequence[int]:
    """Return the number among all of each layer that is here, counted from 0."""
    found = {
        int(match[1]): module.layer_number - 1
        for name, module in model.named_modules()
        if (match := re.fullmatch(r"decoder\.layers\.(\d+)", name))
    }
    return [found[index] for index in range(len(found))]


def _unwrapped(model: Any) -> Any:
    """Return the model below Megatron's wrappers for precision and gradients."""
    while hasattr(model, "module"):
        model = model.module
    return model
