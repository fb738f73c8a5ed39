"""Whether a version's tensors are those that somebody holds. Pure."""

from collections.abc import Mapping, Sequence

from paceline.refit.errors import VerifyError
from paceline.refit.manifest.v1 import Lora, Manifest
from paceline.refit.model import TensorBuffer

_NAMES_SHOWN = 5


def check_layout(
    manifest: Manifest,
    live: Mapping[str, TensorBuffer],
    aliases: Mapping[str, str],
    *,
    lora: Lora | None = None,
) -> None:
    """Refuse a version whose tensors are not the live ones: names, dtypes, shapes, ties.

    ``lora`` is what the live tensors are a LoRA of; None: they are the model's own.

    Raises:
        VerifyError: naming what differs.
    """
    _check_kind(manifest.lora, lora)
    entries = {entry.name: entry for entry in manifest.tensors}
    refuse_names(sorted(entries.keys() - live.keys()), "in the version, not in the engine")
    refuse_names(sorted(live.keys() - entries.keys()), "in the engine, not in the version")
    for name, entry in entries.items():
        here = live[name]
        if (here.dtype, here.shape) != (entry.dtype, entry.shape):
            raise VerifyError(
                f"tensor {name!r} is {entry.dtype}{list(entry.shape)} in the version and "
                f"{here.dtype}{list(here.shape)} in the engine; nothing is cast or reshaped"
            )
        if len(here.data) != entry.num_bytes:
            raise VerifyError(f"tensor {name!r}: {len(here.data)} live, {entry.num_bytes} bytes")
    tied = {pair for pair in manifest.aliases if aliases.get(pair[0]) != pair[1]}
    tied |= set(aliases.items()) - set(manifest.aliases)
    refuse_names(
        sorted(f"{name} = {canonical}" for name, canonical in tied), "tied on one side only"
    )


def _check_kind(there: Lora | None, here: Lora | None) -> None:
    if there == here:
        return
    if here is None:
        raise VerifyError(
            "the version is a LoRA alone and the engine holds a whole model: publish merged "
            "weights for it, or let it serve LoRAs"
        )
    if there is None:
        raise VerifyError("the version is a whole model, and the engine takes LoRAs for its own")
    what = "weights" if there.model_root != here.model_root else "modules, rank or alpha"
    raise VerifyError(f"the version's LoRA is for other {what} than the engine's")


def refuse_names(names: Sequence[str], why: str) -> None:
    """Raise VerifyError if there are any."""
    if not names:
        return
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    raise VerifyError(f"{shown}{f' and {more} more' if more > 0 else ''}: {why}")
