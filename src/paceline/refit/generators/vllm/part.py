"""One model inside the worker, and the ways by which changed elements get into it."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from paceline.refit.delta.order import Positions
from paceline.refit.errors import ApplyError, VerifyError
from paceline.refit.generators.vllm.mirror import INT_DTYPES, Changes, as_tensor, words_of
from paceline.refit.generators.vllm.pieces import Piece
from paceline.refit.generators.vllm.recording import Recording, record_loading
from paceline.refit.generators.vllm.skeleton import build_skeleton
from paceline.refit.generators.vllm.strategy import Home, Way, find_homes
from paceline.refit.model import TensorBuffer, TensorEntry
from paceline.refit.staging.torch_bytes import WORD_DTYPES, byte_view

log = logging.getLogger(__name__)

_NAMES_SHOWN = 5


class ModelPart:
    """A model whose parameters follow a checkpoint.

    Names are the checkpoint's own. ``bind`` comes first, then ``load_whole`` once, then ``push``.
    """

    def __init__(self, model: Any, *, vllm_config: Any, model_config: Any) -> None:
        """Take a loaded model; its values do not matter yet."""
        self._model = model
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._recording: Recording | None = None
        self._homes: dict[str, Home] = {}
        self._aliased: set[tuple[str, Piece]] = set()
        self._tensors: tuple[str, ...] = ()

    def bind(self, entries: Sequence[TensorEntry]) -> None:
        """Find out where the tensors of a version go; nothing of the model is touched.

        Raises:
            VerifyError: tensors are missing or unknown, or of a shape or dtype that would be cast.
        """
        if self._vllm_config.quant_config is not None and current_platform.is_cpu():
            # Its kernels keep the address of scales that vLLM's own reload then frees.
            raise VerifyError(
                "vLLM's build for the CPU cannot load quantised layers a second time: what it "
                "answers afterwards is noise; serve this model unquantised, or on a GPU"
            )
        skeleton = build_skeleton(self._vllm_config, self._model_config)
        recording = record_loading(skeleton, entries)
        _check_used(entries, recording)
        if self._vllm_config.quant_config is None:
            _check_dtypes(entries, recording)
            _check_complete(skeleton, recording)
        self._homes = dict(find_homes(self._model, skeleton, recording))
        self._recording, self._aliased = recording, set()
        self._tensors = tuple(entry.name for entry in entries)

    @property
    def ways(self) -> Mapping[str, str]:
        """Return how each parameter is reached: for people."""
        return {name: home.way.value for name, home in self._homes.items()}

    def load_whole(self, live: Mapping[str, TensorBuffer]) -> None:
        """Load everything by the engine's own means, then prove where it went.

        Parameters whose bytes are not what the recording says are reloaded from then on.
        """
        self._reload_all(live)
        for name in self._tensors:
            for piece in self._pieces(name):
                home = self._homes[piece.parameter]
                if home.way is not Way.RELOAD and not _is_there(home.tensor, piece, live[name]):
                    log.info("%s is not as its loader wrote it; it will be reloaded", name)
                    self._homes[piece.parameter] = replace(home, way=Way.RELOAD)

    def adopt(self, live: Mapping[str, TensorBuffer]) -> dict[str, TensorBuffer]:
        """Return views of live parameters for tensors that lie in host memory in one piece.

        They hold the same bytes as ``live``; who writes there writes the model itself.
        """
        found = {}
        for name in self._tensors:
            pieces = self._pieces(name)
            if len(pieces) != 1 or self._homes[pieces[0].parameter].way is Way.RELOAD:
                continue
            home = self._homes[pieces[0].parameter]
            view = _whole_view(home.tensor, pieces[0], live[name])
            if view is not None:
                found[name] = view
                self._aliased.add((name, pieces[0]))
        return found

    def push(self, changes: Changes, live: Mapping[str, TensorBuffer]) -> None:
        """Bring changed elements of ``live`` into the model; afterwards they are proven there.

        Raises:
            ApplyError: the model did not take them.
        """
        stale, packed = set[Any](), set[Any]()
        for name, positions in changes.items():
            if not self._pieces(name) or self._reloads_whole():
                self._reload_all(live)
                return
            for piece in self._pieces(name):
                home = self._homes[piece.parameter]
                if home.way is Way.RELOAD:
                    stale.update(home.modules)
                    continue
                if (name, piece) not in self._aliased:
                    _write(home.tensor, piece, live[name], positions)
                packed.update(home.modules)
        if stale:
            self._reload(list(stale), self._names_in(stale), live)
        self._repack(packed)

    def _pieces(self, name: str) -> tuple[Piece, ...]:
        return () if self._recording is None else self._recording.pieces.get(name, ())

    def _reloads_whole(self) -> bool:
        """Say whether the model derives something from several layers at once."""
        derives = hasattr(self._model, "process_weights_after_loading")
        return derives or bool(getattr(self._model_config, "use_mla", False))

    def _names_in(self, modules: Iterable[Any]) -> list[str]:
        """Return every tensor that goes into one of the modules: a layer is loaded whole."""
        wanted = set(map(id, modules))
        return [
            name
            for name in self._tensors
            if any(
                id(module) in wanted
                for piece in self._pieces(name)
                for module in self._homes[piece.parameter].modules
            )
        ]

    def _reload_all(self, live: Mapping[str, TensorBuffer]) -> None:
        """Load every layer that a tensor goes into; the others have nothing that could change.

        Not the model as one: vLLM would also prepare attention again, whose scales a checkpoint
        need not have.
        """
        filled = {piece.parameter for name in self._tensors for piece in self._pieces(name)}
        modules = {each for name in filled for each in self._homes[name].modules}
        if self._reloads_whole() or not all(map(self._pieces, self._tensors)):
            modules = {self._model}
        self._reload(list(modules), self._tensors, live)
        self._repack({each for home in self._homes.values() for each in home.modules})

    def _reload(
        self, modules: Sequence[Any], names: Iterable[str], live: Mapping[str, TensorBuffer]
    ) -> None:
        for module in modules:
            initialize_layerwise_reload(module)
        # Kernels for quantised layers are made for the default dtype, which vLLM's loader sets.
        with set_default_torch_dtype(self._model_config.dtype), _packing_experts(modules):
            try:
                self._model.load_weights((name, as_tensor(live[name])) for name in names)
            finally:
                for module in modules:
                    finalize_layerwise_reload(module, self._model_config)

    def _repack(self, modules: Iterable[Any]) -> None:
        for module in modules:
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)


@contextmanager
def _packing_experts(modules: Iterable[Any]) -> Iterator[None]:
    """Let vLLM pack experts for the CPU again: it does only while a layer has no kernel yet."""
    methods: list[Any] = [
        getattr(each, "quant_method", None) for one in modules for each in one.modules()
    ]
    kernels = [
        (method, method.moe_kernel)
        for method in methods
        if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None
    ]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # nothing was loaded into it
                method.moe_kernel = kernel


def _check_used(entries: Sequence[TensorEntry], recording: Recording) -> None:
    unknown = [entry.name for entry in entries if entry.name not in recording.used]
    if unknown:
        raise VerifyError(f"{_some(unknown)}: in the version, not in the engine")


def _check_dtypes(entries: Sequence[TensorEntry], recording: Recording) -> None:
    for entry in entries:
        dtype = WORD_DTYPES[entry.dtype]
        for piece in recording.pieces.get(entry.name, ()):
            here = recording.dtypes[piece.parameter]
            if torch.promote_types(dtype, here) != here:
                raise VerifyError(
                    f"tensor {entry.name!r} is {dtype} in the version and {here} in the engine, "
                    "which would round it; start the engine with that dtype, or let the trainer "
                    "publish the engine's (wire_dtypes)"
                )


def _check_complete(skeleton: Any, recording: Recording) -> None:
    """Refuse a version that leaves a parameter, or a part of a fused one, as it was."""
    filled: dict[str, int] = {}
    for pieces in recording.pieces.values():
        for piece in pieces:
            filled[piece.parameter] = filled.get(piece.parameter, 0) + piece.target.num_elements
    missing = [
        name
        for name, parameter in skeleton.named_parameters()
        if name not in recording.indirect
        and filled.get(name, 0) < _num_needed(skeleton, name, parameter)
    ]
    if missing:
        raise VerifyError(f"{_some(missing)}: in the engine, not (or not whole) in the version")


def _num_needed(skeleton: Any, name: str, parameter: torch.Tensor) -> int:
    """Return how many elements a checkpoint has for a parameter; vocabularies are padded."""
    owner = skeleton.get_submodule(name.rpartition(".")[0])
    if hasattr(owner, "org_vocab_size") or "MoE" in type(owner).__name__:
        return 1
    return parameter.numel()


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _flat(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a dense parameter as one row of words; nothing is copied."""
    return tensor.detach().view(-1).view(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INT_DTYPES[tensor.element_size()])


def _boxes(
    tensor: torch.Tensor, piece: Piece, buffer: TensorBuffer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the piece in the parameter and in the checkpoint, as views."""
    source, target = piece.source, piece.target
    there = (
        tensor.detach()
        .view(-1)
        .as_strided(target.sizes, target.strides, tensor.storage_offset() + target.offset)
    )
    flat = as_tensor(buffer).view(-1)
    return there, flat.as_strided(source.sizes, source.strides, source.offset)


def _write(
    tensor: torch.Tensor, piece: Piece, buffer: TensorBuffer, positions: Positions | None
) -> None:
    """Copy what changed and read it back. Raises ApplyError if it is not there."""
    if positions is None:
        there, here = _boxes(tensor, piece, buffer)
        there.copy_(here)
        if not _is_there(tensor, piece, buffer):
            raise ApplyError(f"{piece.parameter} does not hold what was written")
        return
    mask, targets = piece.place(positions)
    if not len(targets):
        return
    words = words_of(buffer)[positions[mask]]
    values = torch.from_numpy(words.view(f"i{words.itemsize}" if words.itemsize > 1 else "u1"))
    values = values.view(WORD_DTYPES[buffer.dtype]).to(tensor.dtype).to(tensor.device)
    row = _flat(tensor, INT_DTYPES[tensor.element_size()])
    index = torch.from_numpy(targets).to(tensor.device)
    row.index_copy_(0, index, _bits(values))
    if not torch.equal(row.index_select(0, index), _bits(values)):
        raise ApplyError(f"{piece.parameter} does not hold what was written")


def _is_there(tensor: torch.Tensor, piece: Piece, buffer: TensorBuffer) -> bool:
    """Say whether the parameter holds the piece, bit by bit."""
    there, here = _boxes(tensor, piece, buffer)
    found = there.to("cpu")
    return torch.equal(_bits(found.contiguous()), _bits(here.to(found.dtype).contiguous()))


def _whole_view(tensor: torch.Tensor, piece: Piece, buffer: TensorBuffer) -> TensorBuffer | None:
    """Return the live bytes of a checkpoint tensor, if they lie together in host memory."""
    source, target = piece.source, piece.target
    elements = len(words_of(buffer))
    same = tensor.dtype == WORD_DTYPES[buffer.dtype] and tensor.device.type == "cpu"
    if not same or not source.is_dense or source.num_elements != elements or not target.is_dense:
        return None
    row = tensor.detach().view(-1)[target.offset : target.offset + elements]
    return replace(byte_view(buffer.name, row), shape=buffer.shape)
