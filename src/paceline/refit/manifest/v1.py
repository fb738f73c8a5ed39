"""Shapes of manifest schema 1; ``docs/formats/manifest-v1.md`` is the specification."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.refit.model import FULL_FORMATS, TensorEntry, WeightPayloadFormat

SCHEMA = "paceline.manifest.v1"
TEXT_CHARS_MAX = 1024
DIMENSIONS_MAX = 32
RANK_MAX = 2**20
LORA_PREFIX = "base_model.model."
"""Stands before the name of a module in the names of a LoRA's tensors."""
LORA_PARTS = {
    ".lora_A.weight": 0,
    ".lora_B.weight": 1,
    ".lora_embedding_A": 0,
    ".lora_embedding_B": 1,
}
"""How such a name ends -> the dimension that is the rank."""

_ALPHA = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")


def text_problem(text: str) -> str:
    """Return why ``text`` cannot stand in a manifest; empty if it can."""
    if not 0 < len(text) <= TEXT_CHARS_MAX:
        return f"{len(text)} characters"
    if text.isascii():  # as good as every text is, and a manifest has thousands
        return ""
    return "half of a surrogate pair" if any("\ud800" <= char <= "\udfff" for char in text) else ""


def shape_problem(shape: Sequence[int]) -> str:
    """Return why a tensor of this shape cannot stand in a manifest; empty if it can."""
    return f"{len(shape)} dimensions" if len(shape) > DIMENSIONS_MAX else ""


def alpha_problem(text: str) -> str:
    """Return why ``text`` is no alpha of a LoRA: digits, perhaps a point and more; above zero."""
    if not _ALPHA.fullmatch(text):
        return "not digits, or digits, a point and digits"
    return "" if float(text) > 0 else "not above zero"


class Scheme(StrEnum):
    """How one tensor's bytes are represented in a payload object."""

    RAW = "raw"
    """The tensor's bytes as they are."""
    GAP = "gap"
    """Gaps between changed elements and their ulp differences: fast, and composes."""
    CLASSED = "classed"
    """The same in groups by the exponent of the base: for slow links."""
    DENSE = "dense"
    """Byte planes of every element, compressed: for tensors where most elements changed."""
    XOR = "xor"
    """The whole XOR against the base as one zstd frame: what the canonical format carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadObject:
    """One immutable byte string that readers fetch in chunks and prove chunk by chunk."""

    object_id: str
    """SHA-256 hex over the concatenated binary chunk hashes, so that the id proves them."""
    num_bytes: int
    chunk_bytes: int
    chunk_sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where one changed (or full) tensor is inside an object."""

    tensor: str
    scheme: Scheme
    object_id: str
    offset: int
    num_bytes: int
    changed_elements: int
    """Elements of the tensor whose bits differ from the base; all of them in a full payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """A module of the model that a LoRA changes by ``scale x B x A``."""

    name: str
    """As the model without LoRA calls it."""
    rank: int
    alpha: str
    """A decimal number, see ``alpha_problem``."""

    def scale(self, *, is_rank_stabilised: bool) -> float:
        """Return what ``B x A`` is multiplied with."""
        return float(self.alpha) / (math.sqrt(self.rank) if is_rank_stabilised else self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """What a version is a LoRA of; its tensors are named as in a published LoRA's file."""

    model_root: str
    """Root digest of the weights that it changes, in the dtypes in which engines hold them."""
    is_rank_stabilised: bool
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank."""
    modules: tuple[LoraModule, ...]
    """Sorted by name, at least one."""

    @property
    def rank_max(self) -> int:
        """The largest rank: what engines that reserve room for it want to know."""
        return max(module.rank for module in self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a receiver needs to fetch and prove one shard, whoever serves it."""

    payload_format: WeightPayloadFormat
    source_slot_id: str
    base_root: str | None
    """Root digest over this slot's tensors that a delta applies to; None for a full payload."""
    root_digest: str
    """Root digest over this slot's tensors, changed or not."""
    tensors: tuple[TensorEntry, ...]
    """Sorted by name, every tensor of the slot; tensors without a segment did not change. A tensor
    that several slots share is here as this slot's part of it."""
    aliases: tuple[tuple[str, str], ...]
    """(further name, canonical name) of tied tensors, sorted."""
    objects: tuple[PayloadObject, ...]
    """Sorted by object id."""
    segments: tuple[Segment, ...]
    """Sorted by tensor name, at most one per tensor."""
    lora: Lora | None = None
    """The tensors are those of a LoRA; None: they are a model's own."""

    @property
    def is_full(self) -> bool:
        """Whether it says all of every tensor, so that readers can start from it."""
        return self.payload_format in FULL_FORMATS
