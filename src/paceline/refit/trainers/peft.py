"""A PEFT model as the source of weight versions: merged into its base, or the LoRA alone.

Merged, every engine can serve it: the weights are those that PEFT's ``merge_and_unload`` would
leave, made by PEFT on a copy of one module at a time, while the live model stays as it is. Alone,
only the LoRA travels, with what an engine needs to add it to weights that it proves to be the same.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import MultiheadAttention
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from transformers.pytorch_utils import Conv1D

from paceline.refit.digest import root_digest
from paceline.refit.manifest.v1 import LORA_PARTS, Lora, LoraModule, alpha_problem
from paceline.refit.model import TrainerStagingMode, WeightPayloadFormat
from paceline.refit.trainers.exporting import collect_plain, wire_entry
from paceline.refit.trainers.protocol import Collected
from paceline.refit.trainers.torch_module import TorchModuleTrainer

_ADDABLE: Final = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
"""Modules to whose weight an engine adds scale x B x A, transposed for the last two."""


class Publishes(StrEnum):
    """What of a PEFT model travels."""

    MERGED = "merged"
    ALONE = "alone"


class PeftTrainer(TorchModuleTrainer):
    """Publishes a ``PeftModel``; everything but where tensors come from is the torch trainer's."""

    def __init__(self, *, publishes: str = Publishes.MERGED, **options: Any) -> None:
        """Take what travels, and the options of ``TorchModuleTrainer``.

        ``wire_dtypes`` name tensors as the version calls them; for a LoRA alone they also say in
        which dtypes engines hold the weights below it.
        """
        self._publishes = Publishes(publishes)
        super().__init__(**options)
        self._lora: Lora | None = None

    @property
    def supported_staging_modes(self) -> frozenset[TrainerStagingMode]:
        """The torch trainer's; merged weights lie nowhere and cannot be served in place."""
        known = super().supported_staging_modes
        if self._publishes is Publishes.MERGED:
            return known - {TrainerStagingMode.IN_PLACE}
        return known

    @property
    def supported_payload_formats(self) -> frozenset[WeightPayloadFormat]:
        """All three; a LoRA alone is no checkpoint of a model."""
        known = super().supported_payload_formats
        if self._publishes is Publishes.ALONE:
            return known - {WeightPayloadFormat.FULL_HF_CHECKPOINT}
        return known

    def bind_tensors(self, tensors: Any) -> str:
        """Take a PeftModel, once.

        Raises:
            ValueError: it is none, or it has more to it than engines can add.
        """
        if not isinstance(tensors, PeftModel):
            raise ValueError(  # noqa: TRY004 - like every other thing that cannot be bound
                f"a {type(tensors).__name__} is no PeftModel: use the torch trainer"
            )
        if self._publishes is Publishes.ALONE and self._lora is None:
            self._lora = describe_lora(tensors, model_root=self._root_below(tensors))
        return super().bind_tensors(tensors)

    def _collect(self, source: Any) -> Collected:
        if self._publishes is Publishes.MERGED:
            return collect_merged(source)
        return replace(collect_alone(source), lora=self._lora)

    def _root_below(self, model: Any) -> str:
        """Return the root digest of the weights that the LoRA changes, one tensor at a time."""
        below = self._exporter.export(collect_below(model))
        layout = self._exporter.plan(below, source_slot_id=self._slot)
        return root_digest(wire_entry(item, below.read(item.name)) for item in layout.tensors)


def collect_merged(model: Any) -> Collected:
    """Return the weights that ``merge_and_unload`` would leave; merged ones are made when read.

    Raises:
        ValueError: they cannot be had without changing the model.
    """
    wrapped = _wrapped_modules(model)
    below = collect_below(model)
    merging = _Merging(wrapped)
    made: dict[str, Callable[[], torch.Tensor]] = {}
    for path, module in wrapped.items():
        for name, tensor in _below(module).state_dict(prefix=f"{path}.").items():
            if not _unmerged(module):
                continue
            if not tensor.dtype.is_floating_point:
                raise ValueError(
                    f"{name!r} is {tensor.dtype}: merging into quantised weights is not exact, "
                    "publish the LoRA alone"
                )
            canonical = below.aliases.get(name, name)
            if canonical in made:
                raise ValueError(f"{name!r} is tied to {canonical!r} and both have a LoRA")
            made[canonical] = partial(merging.read, path, name)
    return replace(below, made=made)


def collect_below(model: Any) -> Collected:
    """Return the weights that a LoRA changes, as the model without it calls them."""
    base = model.get_base_model()
    wrapped = _wrapped_modules(model)
    buffers = frozenset(
        _name_below(name, wrapped) for name, _ in base.named_buffers(remove_duplicate=False)
    )
    return replace(collect_plain(dict(_named_tensors(base, wrapped))), buffers=buffers)


def collect_alone(model: Any) -> Collected:
    """Return the active LoRA's tensors, named as in a file that PEFT saves.

    Raises:
        ValueError: something in it is no part of a plain LoRA, and an engine would leave it out.
    """
    state = get_peft_model_state_dict(
        model, adapter_name=_active(model), save_embedding_layers=False
    )
    for name in state:
        if not any(name.endswith(part) for part in LORA_PARTS):
            raise _refused(f"{name!r} is more than a LoRA that engines can add")
    return collect_plain(state)


def describe_lora(model: Any, *, model_root: str) -> Lora:
    """Return what an engine needs to know of the active LoRA.

    Raises:
        ValueError: it is of a kind that engines do not add exactly.
    """
    active = _active(model)
    modules, stabilised = list[LoraModule](), set[bool]()
    for path, layer in _wrapped_modules(model).items():
        if not isinstance(layer, LoraLayer):
            raise _refused(f"module {path!r} is a {type(layer).__name__}, no LoRA")
        if active not in layer.scaling:
            continue
        modules.append(_module(path, layer, active))
        stabilised.add(layer.use_rslora[active])
    if len(stabilised) != 1:
        raise _refused("some modules scale by the root of their rank and some do not")
    return Lora(
        model_root=model_root,
        is_rank_stabilised=stabilised.pop(),
        modules=tuple(sorted(modules, key=lambda module: module.name)),
    )


def _module(path: str, layer: Any, active: str) -> LoraModule:
    kind = type(layer.get_base_layer())
    if not issubclass(kind, _ADDABLE):
        raise _refused(f"module {path!r} is a {kind.__name__}, which engines do not add to")
    if active in layer.lora_variant or layer.lora_bias.get(active):
        raise _refused(f"the LoRA of {path!r} is no plain product of two matrices")
    alpha = str(layer.lora_alpha[active]).removesuffix(".0")
    found = LoraModule(name=path, rank=layer.r[active], alpha=alpha)
    scale = layer.scaling[active]
    if alpha_problem(alpha) or found.scale(is_rank_stabilised=layer.use_rslora[active]) != scale:
        raise _refused(f"{path!r} has the scale {scale}, which alpha {alpha} does not give")
    return found


class _Merging:
    """Merges copies of modules; keeps the last one, since its tensors are asked for in a row."""

    def __init__(self, wrapped: Mapping[str, torch.nn.Module]) -> None:
        self._wrapped = wrapped
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def read(self, path: str, name: str) -> torch.Tensor:
        """Return a tensor of the merged module."""
        if self._last[0] != path:
            self._last = ("", {})  # the old copy goes before the next one comes
            self._last = (path, _merged(self._wrapped[path]).state_dict(prefix=f"{path}."))
        return self._last[1][name]


def _merged(module: torch.nn.Module) -> torch.nn.Module:
    """Return what PEFT leaves of a module when it merges a copy of it.

    Hooks stay behind: they may hold on to the whole model.
    """
    hooks = {
        id(value): type(value)()
        for part in module.modules()
        for name, value in vars(part).items()
        if "hook" in name and isinstance(value, dict)
    }
    twin: Any = copy.deepcopy(module, hooks)
    with torch.no_grad():
        if hasattr(twin, "unload_and_optionally_merge_module"):
            unloaded = twin.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
        else:
            twin.merge()
            unloaded = twin.get_base_layer()
    kept: torch.nn.Module = unloaded
    return kept


def _wrapped_modules(model: Any) -> dict[str, torch.nn.Module]:
    """Return the outermost modules that PEFT put in the place of others, by path."""
    found: dict[str, torch.nn.Module] = {}
    inside = ""
    for path, module in model.get_base_model().named_modules():
        if inside and path.startswith(inside):
            continue
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            inside = f"{path}."
            found[path] = module
    if several := [
        path for path, module in found.items() if isinstance(module, MultiheadAttention)
    ]:
        raise ValueError(f"module {several[0]!r} cannot be merged beside the live model")
    return found


def _named_tensors(
    base: torch.nn.Module, wrapped: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the unloaded model's ``state_dict`` holds before merging, in its order."""
    done = set[str]()
    for name, tensor in base.state_dict().items():
        path = _path_of(name, wrapped)
        if path is None:
            yield name, tensor
        elif path not in done:
            done.add(path)
            yield from _below(wrapped[path]).state_dict(prefix=f"{path}.").items()


def _path_of(name: str, wrapped: Mapping[str, torch.nn.Module]) -> str | None:
    """Return the wrapped module that a tensor is in."""
    parts = name.split(".")
    paths = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((path for path in paths if path in wrapped), None)


def _name_below(name: str, wrapped: Mapping[str, torch.nn.Module]) -> str:
    path = _path_of(name, wrapped)
    return name if path is None else f"{path}.{name.rpartition('.')[2]}"


def _below(module: Any) -> torch.nn.Module:
    """Return the module that stays when PEFT unloads this one."""
    if isinstance(module, ModulesToSaveWrapper):
        active = module.active_adapters
        module = module.modules_to_save[active[0]] if active else module.original_module
    elif isinstance(module, AuxiliaryTrainingWrapper):
        module = module.token_adapter
    found: torch.nn.Module = module
    if isinstance(module, BaseTunerLayer):
        found = module.get_base_layer()
    return found


def _unmerged(module: Any) -> bool:
    """Say whether merging would change the weights below."""
    return any(
        set(part.active_adapters) - set(part.merged_adapters)
        for part in module.modules()
        if isinstance(part, BaseTunerLayer)
    )


def _active(model: Any) -> str:
    """Return the one LoRA that is trained."""
    active: list[str] = model.active_adapters
    if len(active) != 1:
        raise _refused(f"{len(active)} LoRAs are active, and a version is one")
    return active[0]


def _refused(problem: str) -> ValueError:
    return ValueError(f"{problem}: publish it merged")
