"""Proofs run where the bytes are cheapest to read: at once, beside the reads, or in the read."""

import threading
from dataclasses import replace

import pytest

from paceline.refit.errors import NoRoomError, VerifyError
from paceline.refit.model import TensorBuffer
from paceline.refit.receiver.pieces import Piece, Proof, Stretches, pieces_of
from paceline.refit.receiver.prover import Proofs, Prover
from paceline.testing.payloads import full_payload

MANIFEST, WHOLE = full_payload(
    [TensorBuffer(name="w", dtype="U8", shape=(1000,), data=memoryview(bytes(1000)))]
)


def refuse() -> None:
    raise VerifyError("wrong bytes")


def test_a_piece_that_nobody_is_free_for_is_proven_at_once() -> None:
    """Every thread is busy: the caller proves, and none waits behind another."""
    go_on, by = threading.Event(), list[str]()

    def hold() -> None:
        assert go_on.wait(20)
        by.append(threading.current_thread().name)

    with Prover(1) as prover:
        first = prover.submit(hold)
        second = prover.submit(lambda: by.append(threading.current_thread().name))
        assert second.done()
        third = prover.submit(refuse)
        assert third.done()
        go_on.set()
        first.result(20)
    assert by[0] == threading.current_thread().name
    assert by[1].startswith("paceline-prover")
    with pytest.raises(VerifyError, match="wrong bytes"):
        third.result()


def test_what_a_thread_finds_wrong_is_told_and_the_thread_goes_on() -> None:
    """A failed proof frees its thread for the next."""
    with Prover(1) as prover:
        found = []
        for _ in range(3):
            check = prover.submit(refuse)
            found.append(check.exception(20))
    assert [str(each) for each in found] == ["wrong bytes"] * 3


def piece(*, by_content: bool = True) -> tuple[Piece, memoryview]:
    """The piece that has the tensor, and memory with its bytes."""
    found = max(pieces_of(MANIFEST, by_content=by_content), key=lambda each: each.wanted.size)
    start = found.wanted.offset
    return found, memoryview(bytearray(WHOLE[start : start + found.wanted.size]))


def test_what_this_core_has_moved_is_hashed_at_once_and_once() -> None:
    """Told of all its bytes in their order, nobody reads them a second time."""
    item, data = piece()
    begun: list[Proof] = []

    def begin() -> Proof:
        begun.append(item.begin())
        return begun[-1]

    with Prover(1) as prover:
        proofs = Proofs(prover, [(replace(item, begin=begin), data)])
        proofs.on_bytes(0, 0, 400)
        proofs.on_bytes(0, 400, len(data))
        assert proofs.found == {}
        proofs.on_part(0)
        assert proofs.found[0].done()
    assert proofs.found[0].result() is None
    assert len(begun) == 1


@pytest.mark.parametrize("size", [1, 7, 333, 999, 1000, 5000])
@pytest.mark.parametrize("by_content", [True, False])
def test_a_piece_in_stretches_is_proven_as_one(size: int, *, by_content: bool) -> None:
    """Whoever moved a stretch, and however often it was begun, it counts once, in its place."""
    item, data = piece(by_content=by_content)
    kept = bytearray(item.wanted.offset + len(data))

    def keep(offset: int, found: memoryview) -> None:
        kept[offset : offset + len(found)] = found

    for flip in (-1, 0, 450, len(data) - 1):
        stretches = Stretches(replace(item, keep=keep), size)
        for number, each in enumerate(stretches):
            start = each.wanted.offset - item.wanted.offset
            part = memoryview(bytearray(data[start : start + each.wanted.size]))
            if start <= flip < start + each.wanted.size:
                part[flip - start] ^= 1
            with Prover(1) as prover:
                proofs = Proofs(prover, [(each, part)])
                if number % 2:
                    proofs.on_bytes(0, 0, len(part) - number % 3)  # or not to its end
                proofs.on_part(0)
                proofs.found[0].result(20)
        if flip < 0:
            stretches.finish()
            assert kept[item.wanted.offset :] == data
        else:
            with pytest.raises(VerifyError):
                stretches.finish()


@pytest.mark.parametrize("stretches", [[], [(0, 400)], [(400, 1000)], [(0, 400), (500, 1000)]])
@pytest.mark.parametrize("by_content", [True, False])
def test_what_came_in_another_way_is_read_again(
    stretches: list[tuple[int, int]], *, by_content: bool
) -> None:
    """Where bytes are missing in what was told, the whole piece is proven."""
    item, data = piece(by_content=by_content)
    for flip in (0, 450, len(data) - 1):
        with Prover(1) as prover:
            proofs = Proofs(prover, [(item, data)])
            for start, stop in stretches:
                proofs.on_bytes(0, start, stop)
            data[flip] ^= 1  # not there yet, when what is told of was there
            proofs.on_part(0)
            with pytest.raises(VerifyError):
                proofs.found[0].result(20)
            data[flip] ^= 1


@pytest.mark.parametrize("is_told", [True, False])
def test_only_proven_bytes_are_kept(*, is_told: bool) -> None:
    """Wrong bytes go nowhere; right ones do once, and a full disk is told of as what it is."""
    item, data = piece()
    kept: list[bytes] = []

    def keep(offset: int, found: memoryview) -> None:
        assert offset == item.wanted.offset
        if kept:
            raise NoRoomError("the disk is full")
        kept.append(bytes(found))

    def come(*, flip: int) -> Proofs:
        with Prover(1) as prover:
            proofs = Proofs(prover, [(replace(item, keep=keep), data)])
            data[7] ^= flip
            if is_told:
                proofs.on_bytes(0, 0, len(data))
            proofs.on_part(0)
            data_proven = proofs.found[0]
            data_proven.exception(20)
            data[7] ^= flip
        return proofs

    with pytest.raises(VerifyError):
        come(flip=1).found[0].result()
    assert kept == []
    assert come(flip=0).found[0].result() is None
    assert kept == [bytes(data)]
    with pytest.raises(NoRoomError):
        come(flip=0).found[0].result()
