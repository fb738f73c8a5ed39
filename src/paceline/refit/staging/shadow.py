"""The weights of the last committed version, kept on the device that the weights live on.

A delta is found there, against this copy, and only changed elements come to the host, where they
are put into a copy of the base. Both sides stand still: training goes on while they are compared.
So the copy that a version was captured in is what the next one is compared with, and memory on the
device is two copies of the weights in the dtypes they are sent in.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.core.clock import Clock
from paceline.refit.delta.choice import Link
from paceline.refit.delta.codec import EncodedTensor, encode_found
from paceline.refit.delta.order import as_words, kind_of
from paceline.refit.errors import NoFreeArenaError, StagingError
from paceline.refit.kernels.protocol import DeviceLoops
from paceline.refit.kernels.registry import PickLoops, loops_on, process_tools
from paceline.refit.staging.device import FoundChunk, find_on_device, words_of
from paceline.refit.staging.device_arena import DeviceArena, DeviceRing
from paceline.refit.staging.host import Arena
from paceline.refit.staging.shard import Capture, PlacedTensor, ShardLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """What was found on the device; the arena holds the new words of these tensors already."""

    base: Capture
    encoded: Mapping[str, EncodedTensor | None]
    """None: it stays as it was."""


class DeviceShadow:
    """Captures on devices, and finds deltas there."""

    def __init__(self, *, clock: Clock, pick: PickLoops = loops_on, copies: int = 2) -> None:
        """Take no memory yet.

        Args:
            clock: of the ring.
            pick: says which kinds of devices are compared on.
            copies: of the weights on a device: the base, and the one being compared with it.
        """
        self._pick = pick
        self._ring = DeviceRing(capacity=copies, clock=clock)
        self._has_room = True

    def capture_comparable(
        self, layout: ShardLayout, tensors: Mapping[str, torch.Tensor]
    ) -> DeviceArena | None:
        """Copy what can be compared on its device; None if there is nothing, or no room."""
        mine = {name: item for name, item in tensors.items() if self._pick(item.device.type)}
        if not mine or not self._has_room:
            return None
        try:
            return self._ring.take(layout, mine)
        except NoFreeArenaError:
            return None  # an earlier version is still being compared: this one goes by the host
        except torch.cuda.OutOfMemoryError:
            self._give_up()
            return None

    def capture(self, layout: ShardLayout, tensors: Mapping[str, torch.Tensor]) -> DeviceArena:
        """Copy everything where it is.

        Raises:
            NoFreeArenaError: all copies are needed.
            StagingError: a device has no room.
        """
        try:
            return self._ring.take(layout, tensors)
        except torch.cuda.OutOfMemoryError as exc:
            self._ring.forget()
            raise StagingError(
                "there is no room on the device for a copy of the weights; stage with COPY_TO_HOST"
            ) from exc

    def drop(self, arena: DeviceArena | None) -> None:
        """Give a copy back; None is none."""
        if arena is not None:
            self._ring.drop(arena)

    def find(
        self,
        base: Capture,
        before: DeviceArena | None,
        now: DeviceArena,
        arena: Arena,
        *,
        link: Link,
    ) -> Change:
        """Find what changed since ``base`` and put it into ``arena``.

        Left to the caller are tensors without loops on their device, those in which most changes,
        and all once the device has no room.

        Args:
            base: in host memory.
            before: the same on the devices; what is not there is read from the host.
            now: the new weights there.
            arena: where they are to be in host memory.
            link: the way to the slowest engine.
        """
        encoded: dict[str, EncodedTensor | None] = {}
        with torch.no_grad():
            for item in base.layout.tensors:
                if item.name not in now.tensors:
                    continue
                old = None if before is None else before.tensors.get(item.name)
                found = self._found(item, base, old, now.tensors[item.name])
                if found is not None:
                    encoded[item.name] = _placed(item, base, arena, found, link)
        return Change(base=base, encoded=encoded)

    def _found(
        self, item: PlacedTensor, base: Capture, old: torch.Tensor | None, new: torch.Tensor
    ) -> list[FoundChunk] | None:
        loops = self._pick(new.device.type) if self._has_room and item.num_bytes else None
        if loops is None:
            return None
        try:
            return _compared(item, base, old, new, loops)
        except torch.cuda.OutOfMemoryError:
            self._give_up()
            return None

    def _give_up(self) -> None:
        log.warning(
            "no room on the device for copies of the weights: from now on all of them cross to "
            "the host for every version"
        )
        self._has_room = False
        self._ring.forget()


def _compared(
    item: PlacedTensor,
    base: Capture,
    old: torch.Tensor | None,
    new: torch.Tensor,
    loops: DeviceLoops,
) -> list[FoundChunk] | None:
    kind = kind_of(item.dtype)
    now = words_of(new, kind)
    if old is None or old.device != new.device:
        whole = torch.frombuffer(base.arena.data, dtype=torch.uint8)
        raw = whole[item.offset : item.offset + item.num_bytes]
        return find_on_device(raw.to(now.device).view(now.dtype), now, kind, loops)
    return find_on_device(words_of(old, kind), now, kind, loops)


def _placed(
    item: PlacedTensor, base: Capture, arena: Arena, found: list[FoundChunk], link: Link
) -> EncodedTensor | None:
    """Write the new words over a copy of the base, and encode them."""
    stop = item.offset + item.num_bytes
    before, after = (each.data[item.offset : stop] for each in (base.arena, arena))
    after[:] = before
    words = as_words(after, kind_of(item.dtype).width)
    for chunk in found:
        words[chunk.part][chunk.places] = chunk.words
    steps = [chunk.steps for chunk in found]
    return encode_found(steps, before, after, dtype=item.dtype, tools=process_tools(), link=link)
