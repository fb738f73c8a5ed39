"""The changes of one chunk as three streams of numbers: where, how far, and the far ones.

A change is a gap (unchanged elements since the change before it, or since the start of the
chunk) and a code (the zigzag of the step from the old word to the new one in the order of
values, see ``order``). Gaps are written as bytes: 255 says "255 more and the gap goes on", any
smaller byte ends it. Codes are one byte each; 255 says that the code is the next of the escapes.

Steps are differences, so they can be taken back (``inverse``) and added (``compose``) without
the weights. ``total`` is what they do to the additive digest of the tensor (``mixing``), and it
adds in the same way.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.refit.delta.order import Positions, Words, unzigzag, zigzag

ESCAPE = 0xFF
"""The byte that stands for more: in the gaps, and in the codes."""
_TOTAL_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """What happens to one chunk; elements that are not named stay."""

    gaps: npt.NDArray[np.uint8]
    codes: npt.NDArray[np.uint8]
    escapes: Words
    """Codes of 255 and more, in element order; the item size is the element width."""
    total: int
    """New additive digest - old one, modulo 2**64."""
    after: Words | None = None
    """The words that they lead to where they were checked, if those were kept."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def num_bytes(self) -> int:
        """Memory that the streams take."""
        return self.gaps.nbytes + self.codes.nbytes + self.escapes.nbytes


def positions_of(gaps: npt.NDArray[np.uint8]) -> Positions:
    """Return the changed elements; as many as the stream has bytes below 255."""
    ends = np.flatnonzero(gaps != ESCAPE)
    sums: Positions = np.cumsum(gaps, dtype=np.int64)[ends]
    sums += np.arange(len(ends))
    return sums


def differences_of(steps: Steps) -> Words:
    """Return the steps as words modulo the word size; as many escapes as codes ask for."""
    codes = steps.codes.astype(steps.escapes.dtype)
    codes[steps.codes == ESCAPE] = steps.escapes
    return unzigzag(codes)


def gap_bytes(positions: Positions) -> npt.NDArray[np.uint8]:
    """Write positions as gaps."""
    gaps = np.diff(positions, prepend=-1) - 1
    if not len(gaps) or gaps.max() < ESCAPE:
        return gaps.astype(np.uint8)
    full = gaps // ESCAPE
    stream = np.full(len(gaps) + int(full.sum()), ESCAPE, dtype=np.uint8)
    stream[np.arange(len(gaps)) + np.cumsum(full)] = gaps % ESCAPE
    return stream


def code_bytes(differences: Words) -> tuple[npt.NDArray[np.uint8], Words]:
    """Write steps as codes and escapes."""
    codes = zigzag(differences)
    escapes = codes[codes >= ESCAPE]
    return np.minimum(codes, ESCAPE).astype(np.uint8), escapes


def steps_of(positions: Positions, differences: Words, *, total: int) -> Steps:
    """Return the steps at these positions of a chunk, none of them zero."""
    codes, escapes = code_bytes(differences)
    return Steps(gaps=gap_bytes(positions), codes=codes, escapes=escapes, total=total & _TOTAL_MASK)


def inverse(steps: Steps) -> Steps:
    """Return what takes the steps back."""
    return steps_of(
        positions_of(steps.gaps), np.negative(differences_of(steps)), total=-steps.total
    )


def compose(first: Steps, second: Steps) -> Steps:
    """Return the steps that equal ``first`` and then ``second``.

    Raises:
        ValueError: the two are of elements of different widths.
    """
    if first.escapes.dtype != second.escapes.dtype:
        raise ValueError("steps of elements of different widths do not compose")
    pair = (first, second)
    positions = np.concatenate([positions_of(steps.gaps) for steps in pair])
    differences = np.concatenate([differences_of(steps) for steps in pair])
    order = np.argsort(positions, kind="stable")
    positions, differences = positions[order], differences[order]
    twice = np.flatnonzero(positions[1:] == positions[:-1])
    differences[twice] += differences[twice + 1]
    kept = np.ones(len(positions), dtype=bool)
    kept[twice + 1] = False
    kept &= differences != 0
    return steps_of(positions[kept], differences[kept], total=first.total + second.total)
