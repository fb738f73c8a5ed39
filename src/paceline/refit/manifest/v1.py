"""Shapes of manifest schema 1; ``docs/formats/manifest-v1.md`` is the specification."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.refit.model import FULL_FORMATS, TensorEntry, WeightPayloadFormat

SCHEMA = "paceline.manifest.v1"
TEXT_CHARS_MAX = 1024
DIMENSIONS_MAX = 32


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
class Manifest:
    """Everything a receiver needs to fetch and prove one shard, whoever serves it."""

    payload_format: WeightPayloadFormat
    source_slot_id: str
    base_root: str | None
    """Root digest over this slot's tensors that a delta applies to; None for a full payload."""
    root_digest: str
    """Root digest over this slot's tensors, changed or not."""
    tensors: tuple[TensorEntry, ...]
    """Sorted by name, every tensor of the slot; tensors without a segment did not change."""
    aliases: tuple[tuple[str, str], ...]
    """(further name, canonical name) of tied tensors, sorted."""
    objects: tuple[PayloadObject, ...]
    """Sorted by object id."""
    segments: tuple[Segment, ...]
    """Sorted by tensor name, at most one per tensor."""

    @property
    def is_full(self) -> bool:
        """Whether it says all of every tensor, so that readers can start from it."""
        return self.payload_format in FULL_FORMATS
