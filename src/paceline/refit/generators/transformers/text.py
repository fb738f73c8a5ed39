"""A choice's text while it grows: cut at a stop text, and shown as soon as it is certain."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What decoding gives for the beginning of a character."""


class GrowingText:
    """The text of one choice. Decodes a few tokens at a time, however long the choice is."""

    def __init__(self, decode: Callable[[Sequence[int]], str], *, stops: Sequence[str]) -> None:
        """Begin empty; ``stops`` end the text, and are no part of it."""
        self._decode = decode
        self._stops = stops
        self._text = ""
        self._shown = 0
        # Tokens from ``_context`` on are decoded together, because some tokenizers write a token
        # differently at the beginning of a text; up to ``_read`` they are in the text already.
        self._context = 0
        self._read = 0

    @property
    def text(self) -> str:
        """What there is, up to the stop text."""
        return self._text

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> bool:
        """Take in what ``token_ids``, the whole choice so far, has more; True at a stop text."""
        before = self._decode(token_ids[self._context : self._read])
        after = self._decode(token_ids[self._context :])
        if after.endswith(UNFINISHED) and not is_last:
            return False
        known = len(self._text)
        self._text += after[len(before) :]
        self._context, self._read = self._read, len(token_ids)
        return self._cut(known)

    def take(self, *, is_last: bool) -> str:
        """Return what may be shown and was not yet: nothing that may be the start of a stop."""
        end = len(self._text) - (0 if is_last else self._held())
        shown, self._shown = self._text[self._shown : end], max(end, self._shown)
        return shown

    def _cut(self, known: int) -> bool:
        """Look for stop texts that end behind ``known``."""
        found = [self._text.find(stop, max(0, known - len(stop) + 1)) for stop in self._stops]
        cuts = [at for at in found if at >= 0]
        if cuts:
            self._text = self._text[: min(cuts)]
        return bool(cuts)

    def _held(self) -> int:
        """Return the length of the longest end of the text that a stop begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stops):
                return size
        return 0
