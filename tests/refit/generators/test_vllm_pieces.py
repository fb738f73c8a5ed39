"""Where elements go: the arithmetic agrees with the copies that a loader really makes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.errors import VerifyError
from paceline.refit.generators.vllm.pieces import Box, Piece, is_unambiguous
from paceline.refit.generators.vllm.recording import record_loading
from paceline.refit.model import TensorEntry


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.Tensor]:
    """Draw a shape, and a view into a dense tensor of it that holds each element's index."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    view = torch.arange(int(np.prod(shape))).view(shape)
    for axis, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        step = draw(st.sampled_from((1, 1, 2)))
        view = view[(slice(None),) * axis + (slice(start, None, step),)]
    if draw(st.booleans()):
        view = view.movedim(0, -1)
    return shape, view


def box_of(view: torch.Tensor) -> Box:
    return Box(
        offset=int(view.storage_offset()), sizes=tuple(view.shape), strides=tuple(view.stride())
    )


@given(views(), st.data())
def test_elements_go_where_the_copy_puts_them(
    pair: tuple[tuple[int, ...], torch.Tensor], data: st.DataObject
) -> None:
    """For any strided source and target, changed elements arrive as by a copy of everything."""
    shape, source = pair
    total = int(np.prod(shape))
    wide = torch.full((source.numel() + 5,), -1)
    target = wide.as_strided(
        source.shape, torch.empty(source.shape).stride(), data.draw(st.integers(0, 5))
    )
    piece = Piece(parameter="p", source=box_of(source), target=box_of(target))
    assert is_unambiguous(piece.source)
    chosen = data.draw(st.sets(st.integers(0, total - 1)))
    positions = np.array(sorted(chosen), dtype=np.int64)
    mask, goes = piece.place(positions)
    found = wide.clone()
    found[torch.from_numpy(goes)] = torch.from_numpy(positions[mask])
    target.copy_(source)
    wanted = torch.where(torch.isin(wide, torch.from_numpy(positions)), wide, -1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("box", "is_fine"),
    [
        (Box(offset=0, sizes=(2, 3), strides=(3, 1)), True),
        (Box(offset=4, sizes=(2, 3), strides=(1, 2)), True),
        (Box(offset=0, sizes=(2, 3), strides=(0, 1)), False),
        (Box(offset=0, sizes=(2, 3), strides=(2, 1)), False),
        (Box(offset=0, sizes=(), strides=()), True),
        (Box(offset=0, sizes=(1, 4), strides=(0, 1)), True),
    ],
)
def test_ambiguous_boxes_are_seen(box: Box, is_fine: bool) -> None:
    """Views that expand or overlap have no one place per element."""
    assert is_unambiguous(box) is is_fine


class Loader(torch.nn.Module):
    """Fuses, shards, transposes and converts, as engines do."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.empty(6, 4, device="meta"))
        self.shard = torch.nn.Parameter(torch.empty(4, 2, device="meta"))
        self.turned = torch.nn.Parameter(torch.empty(4, 3, device="meta"))
        self.computed = torch.nn.Parameter(torch.empty(4, device="meta"))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                self.fused.data[:2].copy_(tensor)
            elif name == "b":
                self.fused.data[2:].copy_(tensor)
            elif name == "c":
                self.shard.data.copy_(tensor.narrow(1, 2, 2))
            elif name == "d":
                self.turned.data.copy_(tensor.t())
            elif name == "e":
                self.computed.data.copy_(tensor + 1)
            elif name != "skipped":
                raise KeyError(name)


def entry(name: str, *shape: int) -> TensorEntry:
    return TensorEntry(
        name=name, dtype="F32", shape=shape, digest="", num_bytes=4 * int(np.prod(shape))
    )


ENTRIES = [entry("a", 2, 4), entry("b", 4, 4), entry("c", 4, 4), entry("d", 3, 4), entry("e", 4)]


def test_recording() -> None:
    """Fused, sharded and transposed tensors are views; what is computed has no place."""
    found = record_loading(Loader(), [*ENTRIES, entry("skipped", 1)])
    (second,) = found.pieces["b"]
    assert (second.parameter, second.target.offset) == ("fused", 8)
    (shard,) = found.pieces["c"]
    assert shard.source == Box(offset=2, sizes=(4, 2), strides=(4, 1))
    (turned,) = found.pieces["d"]
    assert turned.source.strides == (1, 4)
    assert found.indirect == {"computed"}
    assert found.used == {"a", "b", "c", "d", "e"}


def test_recording_names_what_the_loader_refuses() -> None:
    """The reason names the tensor, however little the loader says."""
    with pytest.raises(VerifyError, match="'stranger'"):
        record_loading(Loader(), [*ENTRIES, entry("stranger", 1)])
