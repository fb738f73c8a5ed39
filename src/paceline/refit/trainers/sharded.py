"""A model that several processes hold together, each publishing what is its own.

One version has a slot for every process that owns something. No tensor is gathered and nothing is
sent between processes: who owns what follows from the layout, which all of them see alike.
"""

from dataclasses import replace
from typing import Any, Protocol

from torch.nn.parallel import DistributedDataParallel

from paceline.refit.model import WeightPayloadFormat
from paceline.refit.trainers.exporting import buffer_names
from paceline.refit.trainers.flat import FlatSource, has_flat
from paceline.refit.trainers.meshes import MeshSource, clean_name
from paceline.refit.trainers.protocol import Collected
from paceline.refit.trainers.torch_module import TorchModuleTrainer


class _Source(Protocol):
    @property
    def slot(self) -> str: ...

    @property
    def slots(self) -> tuple[str, ...]: ...

    def collect(self) -> Collected: ...


class ShardedTrainer(TorchModuleTrainer):
    """Signs what TorchModuleTrainer signs, and SupportsSlots.

    Takes DDP, FSDP1, FSDP2 (``fully_shard``), tensor-parallel DTensors, and meshes of these.
    """

    def __init__(self, *, mesh: Any = None, **options: Any) -> None:
        """Set up; tensors come with ``bind_tensors``.

        Args:
            mesh: the ``DeviceMesh`` of all processes; None finds it from the tensors, which is
                possible where some tensor lies on all of it.
            options: of TorchModuleTrainer.
        """
        super().__init__(**options)
        self._mesh = mesh
        self._shards: _Source | None = None

    @property
    def expected_source_slots(self) -> tuple[str, ...]:
        """The slots of all processes, sorted. Raises ValueError before tensors are bound."""
        if self._shards is None:
            raise ValueError("bind_tensors was not called")
        return self._shards.slots

    @property
    def supported_payload_formats(self) -> frozenset[WeightPayloadFormat]:
        """All; of several processes all but checkpoints, whose files have whole tensors."""
        formats = super().supported_payload_formats
        if self._shards is not None and len(self._shards.slots) > 1:
            formats -= {WeightPayloadFormat.FULL_HF_CHECKPOINT}
        return formats

    def bind_tensors(self, tensors: Any) -> str:
        """Take a module or a mapping name -> tensor, once; call it on every process.

        Raises:
            ValueError: bound already, a layout that is not known, or nothing is this process's.
        """
        if self._shards is None:
            inner = tensors.module if isinstance(tensors, DistributedDataParallel) else tensors
            if has_flat(inner):
                self._shards = FlatSource(inner)
            else:
                self._shards = MeshSource(inner, mesh=self._mesh)
            self._slot = self._shards.slot
            if self._slot not in self._shards.slots:
                raise ValueError(
                    f"nothing of the model is for {self._slot} to publish: it has fewer tensors, "
                    "or rows, than there are processes; publish it from one process, alone"
                )
        return super().bind_tensors(tensors)

    def _collect(self, source: Any) -> Collected:
        assert self._shards is not None  # noqa: S101 - bound first
        inner = source.module if isinstance(source, DistributedDataParallel) else source
        names = frozenset(map(clean_name, buffer_names(inner)))
        return replace(self._shards.collect(), buffers=names)
