"""A model whose weights come from its files and stay, and LoRAs of it that come as versions.

Two sets of a LoRA's tensors are held: one that passes add, and a spare one that the next version
is written into. Nothing is merged, so the weights below stay what they were proven to be, and to
exchange two LoRAs is to replace one reference, also when they have other ranks or other modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import embedding, linear
from transformers.pytorch_utils import Conv1D

from paceline.refit.digest import content_digest, root_digest
from paceline.refit.errors import VerifyError
from paceline.refit.generators.transformers.tensors import LiveTensors, view_live_tensors
from paceline.refit.manifest.v1 import LORA_PREFIX, Lora, LoraModule
from paceline.refit.model import TensorBuffer, TensorEntry
from paceline.refit.staging.torch_bytes import WORD_DTYPES, byte_view

PARTS = {
    torch.nn.Linear: (".lora_A.weight", ".lora_B.weight"),
    Conv1D: (".lora_A.weight", ".lora_B.weight"),
    torch.nn.Embedding: (".lora_embedding_A", ".lora_embedding_B"),
}
"""Kind of module -> how the names of its two tensors end. Not what is derived from one: it may do
more to what it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addend:
    """What is added to what one module returns: ``scale x B x A`` of what it was given."""

    first: torch.Tensor
    second: torch.Tensor
    scale: float

    def added_to(self, output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the sum, rounded in the order of PEFT, in the dtype of the module's own output."""
        if given.dtype.is_floating_point:
            inner = linear(given.to(self.first.dtype), self.first)
        else:
            inner = embedding(given, self.first.T)
        return (output + linear(inner, self.second) * self.scale).to(output.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSet:
    """The tensors of one LoRA."""

    lora: Lora | None = None
    """None before the first one."""
    addends: Mapping[str, Addend] = field(default_factory=dict)
    """By the name of the module."""
    live: LiveTensors = field(default_factory=lambda: LiveTensors(buffers={}, aliases={}))


class LoraSets:
    """Signs SpareWeights and TakesLoras for a model that has its weights."""

    is_twice = True

    def __init__(self, model: torch.nn.Module) -> None:
        """Take a model, and hash its weights."""
        self._model = model
        self._modules = {
            name: module for name, module in model.named_modules() if type(module) in PARTS
        }
        for name, module in self._modules.items():
            module.register_forward_hook(self._hook(name))
        below = view_live_tensors(model).buffers.values()
        self._model_root = root_digest(map(_entry_of, below))
        self._sets = (LoraSet(), LoraSet())
        """The live one first."""

    @property
    def model_root(self) -> str:
        """The root digest of the weights below."""
        return self._model_root

    def run(self, **arguments: Any) -> Any:
        """Run a pass with the live LoRA."""
        return self._model(**arguments)

    def live(self) -> LiveTensors:
        """Return the views of the live LoRA."""
        return self._sets[0].live

    def tensors(self) -> Mapping[str, TensorBuffer]:
        """Return writable views of the spare LoRA."""
        return self._sets[1].live.buffers

    def exchange(self) -> None:
        """Make the spare LoRA the live one; the other becomes a spare one like it."""
        live, spare = self._sets[::-1]
        if _layout(live) != _layout(spare):
            spare = _like(live)
        self._sets = (live, spare)

    def make_room(self, lora: Lora | None, tensors: Sequence[TensorEntry]) -> bool:
        """Make the spare set one for such a LoRA, see TakesLoras."""
        if lora is None:
            raise VerifyError(
                "the version is a whole model, and this engine takes LoRAs for the weights of its "
                "--model: start it without --lora"
            )
        if lora.model_root != self._model_root:
            raise VerifyError(
                f"the version is a LoRA for weights with the root {lora.model_root}, this engine "
                f"has {self._model_root}: give --model the files that the trainer began with, and "
                "--dtype as it holds them"
            )
        self._check(lora, {entry.name: entry for entry in tensors})
        wanted = {entry.name: (entry.dtype, entry.shape) for entry in tensors}
        if (lora, wanted) == _layout(self._sets[1]):
            return False
        self._sets = (self._sets[0], _new_set(lora, wanted))
        return True

    def _hook(self, name: str) -> Any:
        def add(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
            addend = self._sets[0].addends.get(name)
            return output if addend is None else addend.added_to(output, given[0])

        return add

    def _check(self, lora: Lora, entries: Mapping[str, TensorEntry]) -> None:
        """Refuse modules that are not there, and tensors that do not fit them. No memory is taken.

        Raises:
            VerifyError: naming the module.
        """
        wanted = set[str]()
        for each in lora.modules:
            module = self._modules.get(each.name)
            if module is None:
                raise VerifyError(
                    f"the LoRA changes {each.name!r}, which is no linear or embedding module here"
                )
            sizes = _sizes(module)
            if each.rank > min(sizes):
                raise VerifyError(f"the LoRA of {each.name!r} has rank {each.rank} in {sizes}")
            shapes = ((each.rank, sizes[0]), (sizes[1], each.rank))
            for name, shape in zip(_names(each, module), shapes, strict=True):
                entry = entries.get(name)
                if entry is None or entry.shape != shape or entry.dtype not in FLOATS:
                    found = "missing" if entry is None else f"{entry.dtype}{list(entry.shape)}"
                    raise VerifyError(f"{name!r} is {found}, the module wants {list(shape)}")
                wanted.add(name)
        if surplus := sorted(entries.keys() - wanted):
            raise VerifyError(f"{surplus[0]!r} is of no module that the LoRA names")


FLOATS = frozenset({"BF16", "F16", "F32"})


def _names(part: LoraModule, module: torch.nn.Module) -> tuple[str, str]:
    first, second = PARTS[type(module)]
    return f"{LORA_PREFIX}{part.name}{first}", f"{LORA_PREFIX}{part.name}{second}"


def _sizes(module: torch.nn.Module) -> tuple[int, int]:
    """Return the size of what goes into a module and of what comes out."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)  # noqa: S101 - all of PARTS have one
    out, inner = weight.shape if isinstance(module, torch.nn.Linear) else weight.shape[::-1]
    return int(inner), int(out)


def _new_set(lora: Lora, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> LoraSet:
    """Return tensors of zeros: a LoRA that adds nothing. Their memory is touched here."""
    tensors = {
        name: torch.zeros(shape, dtype=WORD_DTYPES[dtype]).fill_(0)
        for name, (dtype, shape) in shapes.items()
    }
    addends = {}
    for each in lora.modules:
        pair = [
            tensors[f"{LORA_PREFIX}{each.name}{part}"]
            for part in dict.fromkeys(end for ends in PARTS.values() for end in ends)
            if f"{LORA_PREFIX}{each.name}{part}" in tensors
        ]
        scale = each.scale(is_rank_stabilised=lora.is_rank_stabilised)
        addends[each.name] = Addend(first=pair[0], second=pair[1], scale=scale)
    buffers = {name: byte_view(name, tensor) for name, tensor in tensors.items()}
    return LoraSet(lora=lora, addends=addends, live=LiveTensors(buffers=buffers, aliases={}))


def _layout(one: LoraSet) -> tuple[Lora | None, dict[str, tuple[str, tuple[int, ...]]]]:
    return one.lora, {name: (each.dtype, each.shape) for name, each in one.live.buffers.items()}


def _like(one: LoraSet) -> LoraSet:
    lora, shapes = _layout(one)
    return one if lora is None else _new_set(lora, shapes)


def _entry_of(buffer: TensorBuffer) -> TensorEntry:
    return TensorEntry(
        name=buffer.name,
        dtype=buffer.dtype,
        shape=buffer.shape,
        digest=content_digest(buffer.data),
        num_bytes=len(buffer.data),
    )
