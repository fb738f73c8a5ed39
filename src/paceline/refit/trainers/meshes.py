"""Modules whose tensors lie on a mesh of processes: DTensors of any layout, and copies beside them.

FSDP2 (``fully_shard``), tensor parallelism, both together, and replicas of plain modules (DDP) are
all this. A process publishes its own local tensors as the parts that they are; nothing is gathered.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Replicate, Shard

from paceline.refit.trainers.protocol import Collected
from paceline.refit.trainers.topology import (
    Coordinate,
    Cut,
    MeshAxes,
    Ownership,
    TensorSpec,
    plan_ownership,
    region_of,
)

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What ``torch.compile`` and others put into names."""


class MeshSource:
    """What one process publishes of a module; made once, when the tensors are bound."""

    def __init__(self, source: Any, *, mesh: Any = None) -> None:
        """Find out who publishes what.

        Args:
            source: a module, or a mapping name -> tensor.
            mesh: the ``DeviceMesh`` of all processes; None finds it from the tensors.

        Raises:
            ValueError: a tensor's layout cannot be told from here.
        """
        self._source = source
        state, _ = _distinct(source)
        self._grid = _Grid(mesh or _largest_mesh(state))
        axes, self._at = self._grid.axes, self._grid.at
        specs = {name: self._grid.spec(name, value) for name, value in state.items()}
        self._ownership = plan_ownership(axes, specs)
        self._check_local(state)

    @property
    def slot(self) -> str:
        """This process's contribution."""
        return self._grid.axes.slot(self._at)

    @property
    def slots(self) -> tuple[str, ...]:
        """Everybody's."""
        return self._ownership.slots()

    @property
    def ownership(self) -> Ownership:
        """Who publishes what."""
        return self._ownership

    def collect(self) -> Collected:
        """Return this process's parts as they are now; nothing is copied."""
        state, names = _distinct(self._source)
        found = Collected(tensors={})
        for name, value in state.items():
            box = self._ownership.part(name, self._at)
            if box is None:
                continue
            found.tensors[name] = _local(value)
            region = region_of(box, tuple(value.shape))
            if region is not None:
                found.regions[name] = region
        found.aliases.update((a, name) for a, name in names.items() if name in found.tensors)
        return found

    def _check_local(self, state: Mapping[str, torch.Tensor]) -> None:
        """Prove on this process's own tensors that the layout is what it was taken for."""
        for name, value in state.items():
            box = self._ownership.specs[name].box_at(self._at, self._grid.axes.sizes)
            found = tuple(_local(value).shape)
            if found != box.shape and not (box.size == 0 == _local(value).numel()):
                raise ValueError(
                    f"tensor {name!r} is {list(found)} here where its placements make "
                    f"{list(box.shape)} of it; this layout is not known"
                )


class _Grid:
    """All processes of a job as a mesh, and this one's place in it."""

    def __init__(self, mesh: Any) -> None:
        if mesh is None:
            world = distributed.get_world_size() if distributed.is_initialized() else 1
            rank = distributed.get_rank() if distributed.is_initialized() else 0
            self.axes = MeshAxes(names=("rank",), sizes=(world,))
            self.at: Coordinate = (rank,)
            self._places: dict[int, Coordinate] = {each: (each,) for each in range(world)}
            return
        sizes = tuple(mesh.mesh.shape)
        names = mesh.mesh_dim_names or (
            ("rank",) if len(sizes) == 1 else tuple(f"axis{i}-" for i in range(len(sizes)))
        )
        self.axes = MeshAxes(names=tuple(names), sizes=sizes)
        ranks = mesh.mesh.flatten().tolist()
        self._places = dict(zip(ranks, self.axes.coordinates(), strict=True))
        here = mesh.get_coordinate()
        if here is None:
            raise ValueError("this process is not in the mesh; give the mesh of all processes")
        self.at = tuple(here)

    def spec(self, name: str, value: torch.Tensor) -> TensorSpec:
        """Return how a tensor lies on the mesh. Raises ValueError."""
        cuts: Sequence[Cut] = ()
        if isinstance(value, DTensor):
            cuts = self._cuts(name, value)
        size = value.numel() * value.element_size()
        return TensorSpec(shape=tuple(value.shape), num_bytes=size, cuts=tuple(cuts))

    def _cuts(self, name: str, value: DTensor) -> Sequence[Cut]:
        outer: list[Cut] = []
        inner: list[Cut] = []
        for index, placement in enumerate(value.placements):
            if value.device_mesh.size(index) == 1 or isinstance(placement, Replicate):
                continue
            is_strided = hasattr(placement, "split_factor")
            if not (is_strided or isinstance(placement, Shard)):
                raise ValueError(f"tensor {name!r} is {placement}: its values are not final yet")
            dim = getattr(placement, "dim", 0) % value.ndim
            cut = Cut(axis=self._axis(name, value.device_mesh, index), dim=dim)
            (inner if is_strided else outer).append(cut)
        return [*outer, *reversed(inner)]  # a strided one divides what the others have left

    def _axis(self, name: str, mesh: Any, index: int) -> int:
        """Return the axis of the whole mesh that a dimension of a tensor's mesh runs along."""
        ranks = mesh.mesh.movedim(index, 0).reshape(mesh.size(index), -1)[:, 0].tolist()
        places = [self._places.get(rank) for rank in ranks]
        if None not in places:
            differing = {
                axis
                for place in places
                for axis, (a, b) in enumerate(zip(place or (), places[0] or (), strict=True))
                if a != b
            }
            axis = next(iter(differing), -1)
            if len(differing) == 1 and self.axes.sizes[axis] == len(ranks):
                return axis
        raise ValueError(
            f"tensor {name!r} lies along processes {ranks}, which is no axis of the mesh "
            f"{dict(zip(self.axes.names, self.axes.sizes, strict=True))}; give the mesh of all "
            "processes that has this axis"
        )


def clean_name(name: str) -> str:
    """Return a tensor's name without what wrappers of modules add to it."""
    for word in _WRAPPERS:
        name = name.replace(word, "")
    return name


def _distinct(source: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the distinct tensors by canonical name, and alias -> canonical name."""
    is_module = isinstance(source, torch.nn.Module)
    state = source.state_dict(keep_vars=True) if is_module else source
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for raw, value in state.items():
        name = clean_name(raw)
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not is_plain or value.is_meta:
            raise ValueError(f"{name!r} is a {type(value).__name__}, not a tensor with data")
        known = seen.get(id(value)) or seen.get(_place(value))
        if known is not None:
            aliases[name] = known
            continue
        tensors[name] = value.detach()
        seen[id(value)] = name
        if _local(value).numel():
            seen[_place(value)] = name
    return tensors, aliases


def _place(value: torch.Tensor) -> tuple[object, ...]:
    item = _local(value)
    return (item.device, item.data_ptr(), item.dtype, tuple(value.shape), item.stride())


def _local(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        item = value.to_local() if isinstance(value, DTensor) else value
    return item.detach()


def _largest_mesh(state: Mapping[str, torch.Tensor]) -> Any:
    """Return the mesh of all processes that some tensor lies on; None if all are plain."""
    meshes = [value.device_mesh for value in state.values() if isinstance(value, DTensor)]
    if not meshes:
        return None
    found = max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim))
    if found.size() != distributed.get_world_size():
        raise ValueError(
            f"the tensors lie on meshes of {found.size()} processes of "
            f"{distributed.get_world_size()}; give the mesh of all processes"
        )
    return found
