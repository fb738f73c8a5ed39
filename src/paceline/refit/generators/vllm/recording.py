"""What a model's own loader does with a checkpoint, written down once without moving a byte.

The model and the checkpoint both live on the ``meta`` device: they have shapes and storages, but
no memory. Every copy from the one into the other passes by here as a pair of strided views.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.refit.errors import VerifyError
from paceline.refit.generators.vllm.pieces import Box, Piece, is_unambiguous
from paceline.refit.model import TensorEntry
from paceline.refit.staging.torch_bytes import WORD_DTYPES

_CAUSE_CHARS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a loader did."""

    pieces: Mapping[str, tuple[Piece, ...]]
    """Checkpoint tensor -> where its elements went, as far as they went by plain copies."""
    indirect: frozenset[str]
    """Parameters that got something computed from the checkpoint, or by strides that overlap."""
    used: frozenset[str]
    """Checkpoint tensors that the loader looked at; it passes over names that it does not want."""
    dtypes: Mapping[str, torch.dtype]
    """Of every parameter that was written."""


def record_loading(skeleton: Any, entries: Iterable[TensorEntry]) -> Recording:
    """Let ``skeleton`` load tensors of these names, dtypes and shapes, and return what it did.

    Args:
        skeleton: a model on the meta device with vLLM's ``load_weights``.
        entries: the checkpoint's tensors.

    Raises:
        VerifyError: the loader refuses a tensor; the model has no such parameter, or another shape.
    """
    watcher = _CopyWatcher(owners=_storages(dict(skeleton.named_parameters())))
    tensors: list[tuple[str, torch.Tensor]] = []
    for entry in entries:
        tensor = torch.empty(entry.shape, dtype=WORD_DTYPES[entry.dtype], device="meta")
        watcher.sources[_storage_of(tensor)] = entry.name
        tensors.append((entry.name, tensor))
    try:
        with torch.no_grad(), watcher:
            skeleton.load_weights(tensors)
    except Exception as exc:  # whatever a loader raises about a tensor that it does not know
        name, cause = _culprit(skeleton, tensors) or ("together", exc)
        raise VerifyError(
            f"tensor {name!r}: in the version, and the engine's own loader refuses it: "
            f"{type(cause).__name__}: {str(cause)[:_CAUSE_CHARS_MAX]}"
        ) from exc
    return Recording(
        pieces={name: tuple(found) for name, found in watcher.pieces.items()},
        indirect=frozenset(watcher.indirect),
        used=frozenset(watcher.used),
        dtypes=watcher.dtypes,
    )


def _culprit(
    skeleton: Any, tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[str, Exception] | None:
    """Return the first tensor that cannot be loaded by itself, and why."""
    for name, tensor in tensors:
        try:
            with torch.no_grad():
                skeleton.load_weights([(name, tensor)])
        except Exception as exc:  # noqa: BLE001 - returned, to be told
            return name, exc
    return None


def _storages(parameters: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Map a storage to the name of its parameter; the first of those that share one."""
    owners: dict[int, str] = {}
    for name, parameter in parameters.items():
        owners.setdefault(_storage_of(parameter), name)
    return owners


@dataclass(eq=False)
class _CopyWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd; only copies into parameters matter."""

    owners: dict[int, str]
    sources: dict[int, str] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    indirect: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                self.used.update(self._names(tensor))
        if func is torch.ops.aten.copy_.default:
            self._note_copy(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _names(self, tensor: torch.Tensor) -> tuple[str, ...]:
        name = self.sources.get(_storage_of(tensor))
        return () if name is None else (name,)

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        parameter = self.owners.get(_storage_of(target))
        if parameter is None:
            return
        self.dtypes[parameter] = target.dtype
        name = self.sources.get(_storage_of(source))
        piece = Piece(parameter=parameter, source=_box(source), target=_box(target))
        whole = source.shape == target.shape and is_unambiguous(piece.source)
        if name is None or not whole or not is_unambiguous(piece.target):
            self.indirect.add(parameter)
        if name is not None:
            self.pieces.setdefault(name, []).append(piece)


def _storage_of(tensor: torch.Tensor) -> int:
    """Return what tensors of one storage have in common; on meta there is no address."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - torch has no public name for it
    return key


def _box(view: torch.Tensor) -> Box:
    return Box(offset=int(view.storage_offset()), sizes=tuple(view.shape), strides=view.stride())
