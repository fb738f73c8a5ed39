"""What engines get of a trainer's tensors: their names, ties, wire dtypes, codes and scales.

Every adapter of torch tensors stands on this; what differs between them is where tensors come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from paceline.refit.model import Region
from paceline.refit.staging.shard import ShardLayout, plan_layout
from paceline.refit.staging.torch_bytes import DTYPE_WORDS, WORD_DTYPES
from paceline.refit.trainers.protocol import Collected, Quantise


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported:
    """What engines get: the bound tensors, or the codes and scales instead of them."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    as_they_are: set[str]
    """Codes and scales, which are never cast."""
    regions: dict[str, Region]


class Exporter:
    """Turns bound tensors into named tensors of wire dtypes; writes none of them."""

    def __init__(
        self, *, source_slot_id: str, wire_dtypes: Mapping[str, str], quantise: Quantise | None
    ) -> None:
        """Take the policy. Raises ValueError for a wire dtype that no float can be rounded to."""
        self._slot = source_slot_id
        self._wire_dtypes = _checked(wire_dtypes)
        self._quantise = quantise

    @property
    def keeps_bits(self) -> bool:
        """Whether everything is sent as it lies in memory."""
        return not self._wire_dtypes and self._quantise is None

    def export(self, collected: Collected) -> Exported:
        """Return what engines get of the tensors as they are now. Raises ValueError."""
        tensors, aliases = collected.tensors, collected.aliases
        exported = Exported(
            tensors={}, aliases=aliases, as_they_are=set(), regions=collected.regions
        )
        for name, tensor in tensors.items():
            codes = None if self._quantise is None else self._quantise(name, tensor)
            if codes is not None and name in exported.regions:
                raise ValueError(
                    f"tensor {name!r} is split over processes and cannot be quantised in parts; "
                    "leave it out of what is quantised"
                )
            if codes is not None and name in aliases.values():
                raise ValueError(
                    f"tensor {name!r} is tied, its codes would have one name only; leave it out of "
                    "what is quantised"
                )
            for part, item in ({name: tensor} if codes is None else codes).items():
                if part in exported.tensors or (part != name and part in tensors):
                    raise ValueError(f"quantising {name!r} gives {part!r}, which is there already")
                exported.tensors[part] = item
            exported.as_they_are.update(codes or ())
        return exported

    def plan(self, exported: Exported) -> ShardLayout:
        """Return where each tensor goes. Raises ValueError for one without a wire form."""
        return plan_layout(
            (
                (name, self._word(name, item, exported), tuple(item.shape))
                for name, item in exported.tensors.items()
            ),
            aliases=exported.aliases,
            source_slot_id=self._slot,
            regions=exported.regions,
        )

    def _word(self, name: str, tensor: torch.Tensor, exported: Exported) -> str:
        if tensor.dtype.is_floating_point and name not in exported.as_they_are:
            for pattern, word in self._wire_dtypes.items():
                if fnmatchcase(name, pattern):
                    return word
        if tensor.dtype not in DTYPE_WORDS:
            raise ValueError(f"tensor {name!r} is {tensor.dtype}, which has no wire dtype")
        return DTYPE_WORDS[tensor.dtype]


def collect_plain(source: Any) -> Collected:
    """Return all tensors of a module or a mapping, whole; tied ones once.

    Raises:
        ValueError: something is no plain tensor.
    """
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, value in state.items():
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not is_plain or value.is_meta:
            raise ValueError(
                f"{name!r} is a {type(value).__name__}, not a plain tensor with data of its own"
            )
        item = value.detach()
        where = (item.device, item.data_ptr(), item.dtype, tuple(item.shape), item.stride())
        if item.numel() and where in seen:
            aliases[name] = seen[where]
        else:
            seen[where] = name
            tensors[name] = item
    return Collected(tensors=tensors, aliases=aliases)


def _checked(wire_dtypes: Mapping[str, str]) -> dict[str, str]:
    for pattern, word in wire_dtypes.items():
        if word not in WORD_DTYPES or not WORD_DTYPES[word].is_floating_point:
            floats = sorted(
                known for known, dtype in WORD_DTYPES.items() if dtype.is_floating_point
            )
            raise ValueError(f"wire dtype {word!r} of {pattern!r}: one of {', '.join(floats)}")
    return dict(wire_dtypes)
