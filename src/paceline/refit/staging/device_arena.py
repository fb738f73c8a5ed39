"""A ring of copies of weights on the devices that they live on.

A copy there takes a hundredth of the time that crossing to the host does. What crosses, and what
changed, is found out later, when training goes on.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.core.clock import Clock
from paceline.refit.staging.host import Arena, ArenaRing
from paceline.refit.staging.shard import ShardLayout
from paceline.refit.staging.torch_bytes import WORD_DTYPES

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArena:
    """Copies of tensors, owned by whoever holds them."""

    slot: Arena
    """Its place in the ring."""
    tensors: Mapping[str, torch.Tensor]
    """Dense, in the dtypes that are sent; each on the device of its original."""

    def read(self, name: str) -> torch.Tensor:
        """Return one."""
        return self.tensors[name]


class DeviceRing:
    """A fixed number of device arenas. Safe from several threads; memory is kept."""

    def __init__(self, *, capacity: int, clock: Clock) -> None:
        self._slots = ArenaRing(capacity=capacity, clock=clock)
        self._lock = threading.Lock()
        self._memory: dict[int, tuple[object, Mapping[str, torch.Tensor]]] = {}

    def take(self, layout: ShardLayout, tensors: Mapping[str, torch.Tensor]) -> DeviceArena:
        """Copy tensors, and return the copies, held once by the caller.

        Raises:
            NoFreeArenaError: all are held.
            torch.cuda.OutOfMemoryError: a device has no room.
        """
        slot = self._slots.take(0)
        try:
            with torch.no_grad():
                places = self._places(slot.index, layout, tensors)
                for name, place in places.items():
                    place.copy_(tensors[name], non_blocking=True)
        except BaseException:
            self._slots.drop(slot)
            raise
        return DeviceArena(slot, places)

    def drop(self, arena: DeviceArena) -> None:
        """Remove a holder; after the last one the copies may be overwritten at any time."""
        self._slots.drop(arena.slot)

    def forget(self) -> None:
        """Give memory back that nobody holds; the next ``take`` asks for it again."""
        with self._lock:
            self._memory.clear()

    def _places(
        self, index: int, layout: ShardLayout, tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        where = tuple((name, item.device) for name, item in tensors.items())
        with self._lock:
            known = self._memory.get(index)
        if known is not None and known[0] == where:
            return known[1]
        with self._lock:
            self._memory.pop(index, None)
        places = _allocated(layout, tensors)
        with self._lock:
            self._memory[index] = (where, places)
        return places


def _allocated(
    layout: ShardLayout, tensors: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return places for the tensors, in one stretch of memory per device."""
    wanted = [item for item in layout.tensors if item.name in tensors]
    ends: dict[torch.device, int] = {}
    starts: dict[str, int] = {}
    for item in wanted:
        device = tensors[item.name].device
        starts[item.name] = ends.get(device, 0)
        ends[device] = starts[item.name] + item.num_bytes + -item.num_bytes % _ALIGNMENT
    memory = {
        device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in ends.items()
    }
    return {
        item.name: memory[tensors[item.name].device][
            starts[item.name] : starts[item.name] + item.num_bytes
        ]
        .view(WORD_DTYPES[item.dtype])
        .view(item.shape)
        for item in wanted
    }
