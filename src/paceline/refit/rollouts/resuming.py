"""A choice that is put together from several engines: what has come, and what is still to ask."""

from dataclasses import replace

from paceline.refit.generators.protocol import VersionSpan
from paceline.refit.rollouts.model import Piece, Want


class Progress:
    """One streamed choice."""

    def __init__(self, want: Want) -> None:
        """Begin with nothing."""
        self._whole = want
        self._token_ids: list[int] = []
        self._offset = 0
        """How many tokens engines before the present one gave."""
        self._text = ""
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether the choice has ended."""
        return self._is_done

    def next_want(self) -> Want:
        """Return what the next engine is to be asked: the rest, behind what is there.

        A stop text that would span the break is found by ``take``.
        """
        self._offset = len(self._token_ids)
        if not self._token_ids:
            return self._whole
        sampling = self._whole.sampling
        seed = sampling.seed
        rest = replace(
            sampling,
            max_tokens=sampling.max_tokens - len(self._token_ids),
            # Another stream of numbers: the same one again would repeat the beginning's draws.
            seed=None if seed is None else (seed + len(self._token_ids)) % 2**63,
        )
        return replace(self._whole, prompt=(*self._whole.prompt, *self._token_ids), sampling=rest)

    def take(self, piece: Piece) -> Piece:
        """Add a piece; returns it as part of the whole choice."""
        self._token_ids += piece.token_ids
        shown = replace(piece, spans=tuple(_moved(span, self._offset) for span in piece.spans))
        if self._offset:
            shown = self._cut(shown)
        self._text += shown.text
        if shown.finish_reason is None and len(self._token_ids) >= self._whole.sampling.max_tokens:
            shown = replace(shown, finish_reason="length")
        self._is_done = shown.finish_reason is not None
        return shown

    def _cut(self, piece: Piece) -> Piece:
        """End the choice where a stop text began at one engine and ended at the next."""
        text = self._text + piece.text
        cuts = [at for at in map(text.find, self._whole.sampling.stop) if at >= 0]
        if not cuts or piece.finish_reason is not None:
            return piece
        return replace(
            piece,
            text=text[len(self._text) : max(min(cuts), len(self._text))],
            finish_reason="stop",
        )


def _moved(span: VersionSpan, offset: int) -> VersionSpan:
    return replace(span, start=span.start + offset, end=span.end + offset)
