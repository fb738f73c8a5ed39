"""A growing choice's text equals what decoding the whole gives, and nothing is shown too early."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.generators.transformers.text import GrowingText


def decode(token_ids: Sequence[int]) -> str:
    """Bytes as tokens: a character may need several of them."""
    return bytes(token_ids).decode("utf-8", "replace")


TEXT = st.text(st.sampled_from("ab\u00e9\u20ac\U0001f600"), max_size=20)


@given(text=TEXT)
def test_pieces_are_the_text(text: str) -> None:
    """Pieces joined are the text, and none holds half a character."""
    tokens = list(text.encode())
    growing, shown = GrowingText(decode, stops=()), ""
    for end in range(1, len(tokens) + 1):
        is_last = end == len(tokens)
        growing.add(tokens[:end], is_last=is_last)
        shown += growing.take(is_last=is_last)
        assert text.startswith(shown)
    assert shown == growing.text == text


@given(text=TEXT, stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=2))
def test_a_stop_ends_the_text(text: str, stops: list[str]) -> None:
    """The text ends before the first stop, and no part of a stop was shown."""
    tokens = list(text.encode())
    growing, shown, is_over = GrowingText(decode, stops=stops), "", False
    for end in range(1, len(tokens) + 1):
        is_last = end == len(tokens)
        is_over = growing.add(tokens[:end], is_last=is_last)
        shown += growing.take(is_last=is_last or is_over)
        if is_over:
            break
    ends = [at for at in map(text.find, stops) if at >= 0]
    assert is_over == bool(ends)
    assert shown == growing.text
    if not ends:
        assert shown == text
    else:
        # The stop that is complete first; of those that end together, the one that begins first.
        first_end = min(text.find(s) + len(s) for s in stops if s in text)
        begins = [text.find(s) for s in stops if s in text and text.find(s) + len(s) == first_end]
        assert shown == text[: min(begins)]


def test_half_a_character_at_the_end_is_shown() -> None:
    """A choice that ends inside a character shows what decoding the whole shows."""
    growing = GrowingText(decode, stops=())
    tokens = [97, 0xE2, 0x82]
    for end in (1, 2, 3):
        growing.add(tokens[:end], is_last=end == 3)
    assert growing.take(is_last=True) == growing.text == decode(tokens)
