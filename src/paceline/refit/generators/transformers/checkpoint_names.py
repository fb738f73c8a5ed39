"""Live tensors under the names that the library's own files have for them.

Where files have a tensor for each expert of a mixture, memory has one for all; other names differ
too. The library knows how to turn one into the other. It is asked to do so with numbers that say
where they came from, and each tensor that comes out must be one block of a live one.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from transformers.core_model_loading import revert_weight_conversion

from paceline.core.errors import PreflightError
from paceline.refit.generators.transformers.tensors import LiveTensors
from paceline.refit.model import TensorBuffer

PROBE_COLUMNS = 2
"""Instead of a row's length; with one the library would take it for a dimension to drop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A tensor in memory and the first of the numbers that stand for it."""

    name: str
    shape: tuple[int, ...]
    first: int

    @property
    def probe(self) -> torch.Tensor:
        shape = (*self.shape[:-1], PROBE_COLUMNS) if self._has_rows else self.shape
        return torch.arange(self.first, self.first + prod(shape)).reshape(shape)

    @property
    def _has_rows(self) -> bool:
        return len(self.shape) > 1

    def place_of(self, probe: torch.Tensor) -> tuple[int, tuple[int, ...]] | None:
        """Return a block's first element in this tensor, and its shape; None: it is no block."""
        numbers, shape = probe.reshape(-1), tuple(probe.shape)
        start = int(numbers[0]) - self.first
        is_block = bool(torch.equal(numbers, torch.arange(len(numbers)) + int(numbers[0])))
        if not self._has_rows:
            return (start, shape) if is_block else None
        if not is_block or shape[-1:] != (PROBE_COLUMNS,) or start % PROBE_COLUMNS:
            return None
        return start // PROBE_COLUMNS * self.shape[-1], (*shape[:-1], self.shape[-1])


def name_as_files(model: torch.nn.Module, live: LiveTensors) -> LiveTensors:
    """Return views of the same bytes, named and cut as ``save_pretrained`` would do it.

    Raises:
        PreflightError: a tensor of the files is not one block of memory.
    """
    sources = list(_sources(live))
    probes = {each.name: each.probe for each in sources}
    try:
        named = revert_weight_conversion(model, probes)
    except Exception as exc:  # what a conversion raises that was made for weights
        raise _unnameable(f"the library cannot convert its names ({exc})") from exc
    firsts = [each.first for each in sources]
    buffers, names = dict[str, TensorBuffer](), dict[str, list[str]]()
    for name, probe in named.items():
        source = sources[bisect_right(firsts, int(probe.reshape(-1)[0])) - 1]
        names.setdefault(source.name, []).append(name)
        if source.name in live.buffers:
            buffers[name] = _cut(live.buffers[source.name], source, name, probe)
    return LiveTensors(buffers=buffers, aliases=_renamed(live.aliases, names))


def _sources(live: LiveTensors) -> Iterator[_Source]:
    first = 0
    shapes = {name: each.shape for name, each in live.buffers.items()}
    shapes |= {alias: live.buffers[name].shape for alias, name in live.aliases.items()}
    for name, shape in shapes.items():
        if prod(shape):  # an empty one has no place, and no file wants it
            source = _Source(name=name, shape=shape, first=first)
            first += source.probe.numel()
            yield source


def _cut(buffer: TensorBuffer, source: _Source, name: str, probe: torch.Tensor) -> TensorBuffer:
    place = source.place_of(probe)
    if place is None:
        raise _unnameable(f"{name} is not one block of {source.name}")
    start, shape = place
    width = len(buffer.data) // prod(buffer.shape)
    data = buffer.data[start * width : (start + prod(shape)) * width]
    return replace(buffer, name=name, shape=shape, data=data)


def _renamed(aliases: Mapping[str, str], names: Mapping[str, list[str]]) -> dict[str, str]:
    found = {}
    for alias, name in aliases.items():
        pair = (*names[alias], *names[name])
        if len(pair) != 2:  # noqa: PLR2004 - one name for each
            raise _unnameable(f"{alias} is tied to {name}, and files cut them up")
        found[pair[0]] = pair[1]
    return found


def _unnameable(why: str) -> PreflightError:
    return PreflightError(
        f"tensors of this model cannot be named as its files are: {why}; let the trainer publish "
        "them as its state_dict names them (--tensor-names memory)"
    )
