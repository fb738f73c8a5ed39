"""Whether a version's tensors are those that somebody holds. Pure."""

from collections.abc import Mapping, Sequence

from paceline.refit.errors import VerifyError
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import TensorBuffer

_NAMES_SHOWN = 5


def check_layout(
    manifest: Manifest, live: Mapping[str, TensorBuffer], aliases: Mapping[str, str]
) -> None:
    """Refuse a version whose tensors are not the live ones: names, dtypes, shapes, ties.

    Raises:
        VerifyError: naming what differs.
    """
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


def refuse_names(names: Sequence[str], why: str) -> None:
    """Raise VerifyError if there are any."""
    if not names:
        return
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    raise VerifyError(f"{shown}{f' and {more} more' if more > 0 else ''}: {why}")
