"""Text from outside, made fit to be shown."""

import unicodedata

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNFIT = frozenset({"Cc", "Cf", "Cs"})
"""Control characters, with which escape sequences begin; invisible ones that reorder; halves."""


def printable(text: str) -> str:
    """Return ``text`` without what would drive a terminal; line breaks and tabs stay."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _UNFIT else _REPLACEMENT
        for char in text
    )
