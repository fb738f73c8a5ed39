"""What engines get of a trainer's tensors: their names, ties, wire dtypes, codes and scales.

Every adapter of torch tensors stands on this; what differs between them is where tensors come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.refit.digest import content_digest
from paceline.refit.model import TensorEntry
from paceline.refit.staging.shard import PlacedTensor, ShardLayout, plan_layout
from paceline.refit.staging.torch_bytes import DTYPE_WORDS, WORD_DTYPES, byte_view
from paceline.refit.trainers.dtypes import DtypePolicy, Sent, WireDtypes
from paceline.refit.trainers.protocol import Collected, Quantise


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported(Collected):
    """What engines get: what was collected, or the codes and scales instead of it."""

    as_they_are: set[str] = field(default_factory=set)
    """Codes and scales, which are never cast."""

    @property
    def at_hand(self) -> dict[str, torch.Tensor]:
        """Those whose content need not be made."""
        return {name: item for name, item in self.tensors.items() if name not in self.made}


class Exporter:
    """Turns bound tensors into named tensors of wire dtypes; writes none of them."""

    def __init__(self, *, wire_dtypes: WireDtypes, quantise: Quantise | None) -> None:
        """Take the policy. Raises ValueError for a wire dtype that no float can be rounded to."""
        self._dtypes = DtypePolicy.of(wire_dtypes)
        self._quantise = quantise

    @property
    def keeps_bits(self) -> bool:
        """Whether everything is sent as it lies in memory."""
        return self._dtypes.keeps_bits and self._quantise is None

    def export(self, collected: Collected) -> Exported:
        """Return what engines get of the tensors as they are now. Raises ValueError."""
        tensors, aliases = collected.tensors, collected.aliases
        exported = Exported(
            tensors={},
            aliases=aliases,
            regions=collected.regions,
            made=dict(collected.made),
            buffers=collected.buffers,
            lora=collected.lora,
        )
        for name, tensor in tensors.items():
            codes = self._codes(name, collected)
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
            if codes is not None:
                exported.as_they_are.update(codes)
                exported.made.pop(name, None)
        return exported

    def _codes(self, name: str, collected: Collected) -> Mapping[str, torch.Tensor] | None:
        """Return what engines serve instead of a tensor; one that is made is made for it."""
        if self._quantise is None:
            return None
        found = self._quantise(name, collected.tensors[name])
        if found is None or name not in collected.made:
            return found
        return self._quantise(name, collected.read(name))

    def plan(self, exported: Exported, *, source_slot_id: str) -> ShardLayout:
        """Return where each tensor goes. Raises ValueError for one without a wire form."""
        return plan_layout(
            (
                (row.name, row.sent, tuple(exported.tensors[row.name].shape))
                for row in self.report(exported)
            ),
            aliases=exported.aliases,
            source_slot_id=source_slot_id,
            regions=exported.regions,
            lora=exported.lora,
        )

    def report(self, exported: Exported) -> tuple[Sent, ...]:
        """Return how every tensor travels. Raises ValueError for one without a wire form."""
        return tuple(
            self._sent(name, tensor, exported) for name, tensor in exported.tensors.items()
        )

    def _sent(self, name: str, tensor: torch.Tensor, exported: Exported) -> Sent:
        if tensor.dtype not in DTYPE_WORDS:
            raise ValueError(f"tensor {name!r} is {tensor.dtype}, which has no wire dtype")
        held = DTYPE_WORDS[tensor.dtype]
        sent, decided_by = held, "quantised"
        if name not in exported.as_they_are:
            is_buffer = name in exported.buffers
            sent, decided_by = self._dtypes.decide(name, held=held, is_buffer=is_buffer)
        return Sent(
            name=name,
            held=held,
            sent=sent,
            decided_by=decided_by,
            num_elements=tensor.numel(),
        )


def wire_entry(item: PlacedTensor, tensor: torch.Tensor) -> TensorEntry:
    """Return what a tensor is in a version, from a copy in its wire dtype."""
    there = tensor.to(device="cpu", dtype=WORD_DTYPES[item.dtype]).contiguous()
    return TensorEntry(
        name=item.name,
        dtype=item.dtype,
        shape=item.shape,
        digest=content_digest(byte_view(item.name, there).data),
        num_bytes=item.num_bytes,
        region=item.region,
    )


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
        _refuse_without_bytes(name, value)
        item = value.detach()
        where = (item.device, item.data_ptr(), item.dtype, tuple(item.shape), item.stride())
        if item.numel() and where in seen:
            aliases[name] = seen[where]
        else:
            seen[where] = name
            tensors[name] = item
    return Collected(tensors=tensors, aliases=aliases, buffers=buffer_names(source))


def _refuse_without_bytes(name: str, value: Any) -> None:
    """Refuse what is no plain tensor with data of its own. Raises ValueError."""
    what = f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            what = "on the meta device: load the weights first; it"
        elif value.layout is not torch.strided:
            what = f"a tensor of layout {value.layout}"
        else:
            return
    raise ValueError(f"{name!r} is {what}, not a plain tensor with data of its own")


def buffer_names(source: Any) -> frozenset[str]:
    """Return the names of a module's buffers; a mapping does not tell."""
    if not isinstance(source, torch.nn.Module):
        return frozenset()
    return frozenset(name for name, _ in source.named_buffers(remove_duplicate=False))
