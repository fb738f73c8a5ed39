"""What changed in a tensor that lives on a device: only changed elements cross to the host."""

from dataclasses import dataclass

import torch

from paceline.refit.delta.codec import most_steps
from paceline.refit.delta.mixing import digest_change
from paceline.refit.delta.order import Positions, WordKind, Words, chunks, rank
from paceline.refit.delta.steps import Steps, steps_of
from paceline.refit.kernels.protocol import DeviceLoops

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundChunk:
    """The changes of one chunk, as they came from the device."""

    part: slice
    places: Positions
    words: Words
    steps: Steps


def find_on_device(
    old: torch.Tensor, new: torch.Tensor, kind: WordKind, loops: DeviceLoops
) -> list[FoundChunk] | None:
    """Return what turns ``old`` into ``new``, words of one device; chunks that stay are there too.

    None: so much changes that the tensor is better copied whole. No more than one chunk's changes
    have crossed when that is seen.

    Raises:
        ValueError: sizes or devices do not fit.
    """
    if len(old) != len(new) or old.device != new.device:
        raise ValueError("old and new differ in size or are on different devices")
    found = []
    for part in chunks(len(old), kind):
        compact = loops.compact(old[part], new[part])
        if len(compact.positions) > most_steps(part.stop - part.start, kind):
            return None
        # A chunk has fewer than 2**31 elements: half the bytes of the places cross.
        places = compact.positions.to(torch.int32).cpu().numpy().astype("int64")
        was, now = (
            item.cpu().numpy().view(f"<u{kind.width}") for item in (compact.old, compact.new)
        )
        steps = steps_of(
            places,
            rank(now, kind) - rank(was, kind),
            total=digest_change(places + part.start, was, now),
        )
        found.append(FoundChunk(part=part, places=places, words=now, steps=steps))
    return found


def words_of(tensor: torch.Tensor, kind: WordKind) -> torch.Tensor:
    """View a tensor as words where it is. Raises ValueError if it is not one dense block."""
    if not tensor.is_contiguous() or tensor.element_size() != kind.width:
        raise ValueError(f"not {kind.width}-byte elements in one dense block: {tensor.dtype}")
    return tensor.detach().reshape(-1).view(_SIGNED[kind.width])
