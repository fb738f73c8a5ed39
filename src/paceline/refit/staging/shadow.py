"""The weights of the last committed version, kept on the device that the weights live on.

A delta is found there, against this copy, and only changed elements come to the host, where they
are put into a copy of the base. Memory on the device: one copy of the weights in the dtypes they
are sent in, from the first delta on, and the newest changes until they are committed.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.refit.delta.choice import Link
from paceline.refit.delta.codec import EncodedTensor, encode_found
from paceline.refit.delta.order import as_words, kind_of
from paceline.refit.kernels.protocol import DeviceLoops
from paceline.refit.kernels.registry import PickLoops, loops_on, process_tools
from paceline.refit.staging.device import FoundChunk, find_on_device, words_of
from paceline.refit.staging.host import Arena
from paceline.refit.staging.shard import Capture, PlacedTensor
from paceline.refit.staging.torch_bytes import WORD_DTYPES

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """What was found on the device; the arena holds the new words of these tensors already."""

    base: Capture
    encoded: Mapping[str, EncodedTensor | None]
    """None: it stays as it was."""
    found: Mapping[str, list[FoundChunk]]


class DeviceShadow:
    """Finds deltas on the device; safe from several threads."""

    def __init__(self, *, pick: PickLoops = loops_on) -> None:
        """Take no memory yet. ``pick`` says which kinds of devices are compared on."""
        self._pick = pick
        self._of: Capture | None = None
        self._words: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._has_room = True

    def find(
        self, base: Capture, arena: Arena, tensors: Mapping[str, torch.Tensor], *, link: Link
    ) -> Change:
        """Find what changed since ``base`` in tensors on a device, and put it into ``arena``.

        Tensors in host memory are left to the caller, and so are those in which most changes, and
        all once the device has no room for a copy of the weights.
        """
        encoded: dict[str, EncodedTensor | None] = {}
        chunked: dict[str, list[FoundChunk]] = {}
        with self._lock, torch.no_grad():
            if self._of is not base:
                self._words.clear()
                self._of = base
            for item in base.layout.tensors:
                found = self._found(item, base, tensors[item.name])
                if found is None:
                    self._words.pop(item.name, None)
                    continue
                chunked[item.name] = found
                encoded[item.name] = _placed(item, base, arena, found, link)
        return Change(base=base, encoded=encoded, found=chunked)

    def commit(self, change: Change, new: Capture) -> None:
        """Make ``new``, which ``change`` leads to, the base; other bases are read from the host."""
        with self._lock, torch.no_grad():
            if self._of is not change.base:
                return
            self._of = new
            for name in self._words.keys() - change.found.keys():
                del self._words[name]
            for name in self._words.keys() & change.found.keys():
                for chunk in change.found[name]:
                    self._words[name][chunk.part].index_copy_(0, chunk.at, chunk.new)

    def _found(
        self, item: PlacedTensor, base: Capture, tensor: torch.Tensor
    ) -> list[FoundChunk] | None:
        loops = self._pick(tensor.device.type) if self._has_room and item.num_bytes else None
        if loops is None:
            return None
        try:
            return self._compared(item, base, tensor, loops)
        except torch.cuda.OutOfMemoryError:
            log.warning(
                "no room on %s for a copy of the weights: from now on all of them cross to the "
                "host for every version",
                tensor.device,
            )
            self._has_room = False
            self._words.clear()
            return None

    def _compared(
        self, item: PlacedTensor, base: Capture, tensor: torch.Tensor, loops: DeviceLoops
    ) -> list[FoundChunk] | None:
        kind = kind_of(item.dtype)
        new = words_of(tensor.detach().to(WORD_DTYPES[item.dtype]).contiguous(), kind)
        old = self._words.get(item.name)
        if old is None or old.device != new.device:
            whole = torch.frombuffer(base.arena.data, dtype=torch.uint8)
            raw = whole[item.offset : item.offset + item.num_bytes]
            old = self._words[item.name] = raw.to(new.device, copy=True).view(new.dtype)
        return find_on_device(old, new, kind, loops)


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
