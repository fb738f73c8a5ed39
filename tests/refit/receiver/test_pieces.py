"""A piece is proven by all of its bytes, at once or in stretches, and kept only then."""

from dataclasses import replace

import pytest

from paceline.refit.errors import NoRoomError, VerifyError
from paceline.refit.model import TensorBuffer
from paceline.refit.receiver.pieces import Piece, Stretches, pieces_of
from paceline.testing.payloads import full_payload

MANIFEST, WHOLE = full_payload(
    [TensorBuffer(name="w", dtype="U8", shape=(1000,), data=memoryview(bytes(1000)))]
)


def piece(*, by_content: bool = True) -> tuple[Piece, memoryview]:
    """The piece that has the tensor, and memory with its bytes."""
    found = max(pieces_of(MANIFEST, by_content=by_content), key=lambda each: each.wanted.size)
    start = found.wanted.offset
    return found, memoryview(bytearray(WHOLE[start : start + found.wanted.size]))


@pytest.mark.parametrize("size", [1, 7, 333, 999, 1000, 5000])
@pytest.mark.parametrize("by_content", [True, False])
def test_a_piece_in_stretches_is_proven_as_one(size: int, *, by_content: bool) -> None:
    """A stretch that is begun anew counts once, in its place."""
    item, data = piece(by_content=by_content)
    kept = bytearray(item.wanted.offset + len(data))

    def keep(offset: int, found: memoryview) -> None:
        kept[offset : offset + len(found)] = found

    for flip in (-1, 0, 450, len(data) - 1):
        stretches = Stretches(replace(item, keep=keep), size)
        for each in stretches:
            start = each.wanted.offset - item.wanted.offset
            part = memoryview(bytearray(data[start : start + each.wanted.size]))
            each.begin().update(part)  # of a source that went away
            if start <= flip < start + each.wanted.size:
                part[flip - start] ^= 1
            each.settle(part)
        if flip < 0:
            stretches.finish()
            assert kept[item.wanted.offset :] == data
        else:
            with pytest.raises(VerifyError):
                stretches.finish()


def test_only_proven_bytes_are_kept() -> None:
    """Wrong bytes go nowhere; right ones do once, and a full disk is told of as what it is."""
    item, data = piece()
    kept: list[bytes] = []

    def keep(offset: int, found: memoryview) -> None:
        assert offset == item.wanted.offset
        if kept:
            raise NoRoomError("the disk is full")
        kept.append(bytes(found))

    keeping = replace(item, keep=keep)
    data[7] ^= 1
    with pytest.raises(VerifyError):
        keeping.settle(data)
    assert kept == []
    data[7] ^= 1
    keeping.settle(data)
    assert kept == [bytes(data)]
    with pytest.raises(NoRoomError):
        keeping.settle(data)
