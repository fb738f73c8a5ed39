"""How changes of one parameter reach it: in place, in place and packed again, or by a reload."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from paceline.refit.generators.vllm.recording import Recording

PLAIN_METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""What leaves a parameter as the loader wrote it, unless it packs a copy for the CPU."""


class Way(Enum):
    """Of one parameter."""

    ELEMENTS = "elements"
    """It is what the loader wrote: changed elements are written where they lie."""
    REPACK = "repack"
    """It is, and its layers hold a packed copy that is made again afterwards."""
    RELOAD = "reload"
    """It was turned into something else: its layer is loaded again, by the engine's own means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A parameter of the engine and the modules that hold it."""

    way: Way
    tensor: Any
    """The live parameter; for RELOAD whatever is there now."""
    modules: tuple[Any, ...]
    """More than one where weights are tied."""


def find_homes(model: Any, skeleton: Any, recording: Recording) -> Mapping[str, Home]:
    """Return every parameter of the skeleton by name, with the way its changes go.

    Args:
        model: the live model; wrappers around layers (LoRA) are looked through.
        skeleton: what ``recording`` was made with.
        recording: of the checkpoint that is served.
    """
    modules = {_plain_name(name): module for name, module in model.named_modules()}
    holders: dict[int, list[Any]] = {}
    for module in modules.values():
        for _, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    homes = {}
    for name, wanted in skeleton.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = modules[owner]
        live = getattr(module, leaf, None)
        held_by = tuple(holders.get(id(live), [module]))
        is_same = live is not None and _layout(live) == _layout(wanted)
        if not is_same or name in recording.indirect:
            way = Way.RELOAD
        else:
            way = max(map(_way_of, held_by), key=_GRAVITY.index)
        homes[name] = Home(way=way, tensor=live, modules=held_by)
    return homes


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.is_contiguous()


_GRAVITY = list(Way)


def _way_of(module: Any) -> Way:
    method = type(getattr(module, "quant_method", None)).__name__
    if method not in PLAIN_METHODS:
        return Way.RELOAD
    return Way.REPACK if hasattr(module, "cpu_linear") else Way.ELEMENTS


def _plain_name(name: str) -> str:
    """Return a module's name as it is without LoRA around it."""
    return name.replace(".base_layer", "")
