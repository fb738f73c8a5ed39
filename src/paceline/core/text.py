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


def told_by(name: str, text: str) -> str:
    """Return what ``name`` says, with its name in front once: many of its errors begin with it."""
    return text if text.startswith((f"{name}: ", f"{name} ")) else f"{name}: {text}"
