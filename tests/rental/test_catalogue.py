"""Canonical names and each provider's words say the same, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.rental.catalogue import (
    BOARDS,
    LAMBDA,
    NEBIUS,
    RUNPOD,
    VAST,
    GpuTarget,
    board_of,
    boards_of,
    boards_sold,
    lambda_types,
    lambda_width,
    parse_target,
    words_of,
)

_PROVIDERS = (VAST, RUNPOD, LAMBDA, NEBIUS)
_boards = st.sampled_from(BOARDS)


def test_names_are_unique_and_canonical() -> None:
    """No name stands twice, none shadows a family of others, each makes a target."""
    names = [board.name for board in BOARDS]
    assert len(set(names)) == len(names)
    families = {board.family for board in BOARDS}
    assert all(board.name not in families or board.family == board.name for board in BOARDS)
    for name in {*names, *families}:
        assert parse_target(f"{name}-1x").gpu == name


@given(_boards, st.sampled_from(_PROVIDERS))
def test_a_word_leads_back_to_its_board(board: object, provider: str) -> None:
    """With its memory, every word of a provider names the board that it stands for."""
    assert isinstance(board, type(BOARDS[0]))
    for word in board.tokens.get(provider, ()):
        assert board_of(provider, word, memory_mb=board.memory_gb * 1024) == board


@given(_boards, st.sampled_from(_PROVIDERS), st.integers(1, 16))
def test_what_is_sold_has_words_and_what_is_not_is_refused(
    board: object, provider: str, count: int
) -> None:
    """Exactly the widths of the table are sold."""
    assert isinstance(board, type(BOARDS[0]))
    target = GpuTarget(gpu=board.name, count=count)
    if board.is_sold(provider, count):
        assert set(words_of(target, provider)) == set(board.tokens[provider])
        assert boards_sold(target, provider) == (board,)
    else:
        with pytest.raises(UsageError, match=board.name):
            words_of(target, provider)


@given(st.text(max_size=30), st.sampled_from(_PROVIDERS), st.none() | st.floats())
def test_any_word_is_known_or_not(word: str, provider: str, memory_mb: float | None) -> None:
    """Looking up anything at all never raises."""
    found = board_of(provider, word, memory_mb=memory_mb)
    assert found is None or word in found.tokens[provider]
    assert boards_of(word) == tuple(b for b in BOARDS if word in (b.name, b.family))
    width = lambda_width(word)
    assert width is None or width > 0


@pytest.mark.parametrize(
    ("memory_mb", "name"),
    [(40_960, "a100-40gb-pcie"), (81_920, "a100-80gb-pcie"), (81_559, "a100-80gb-pcie")],
)
def test_memory_tells_boards_of_one_word_apart(memory_mb: int, name: str) -> None:
    """`A100 PCIE` is two boards, and without memory it is nobody knows which."""
    found = board_of(VAST, "A100 PCIE", memory_mb=memory_mb)
    assert found is not None
    assert found.name == name
    assert board_of(VAST, "A100 PCIE") is None


@pytest.mark.parametrize(
    ("word", "memory_mb", "name"),
    [
        ("RTX 4090", 24_564, "rtx4090"),
        ("H200", 143_771, "h200"),
        ("B200", 183_359, "b200"),
        ("B300", 275_040, "b300"),
    ],
)
def test_memory_as_it_was_seen_is_in_the_band(word: str, memory_mb: int, name: str) -> None:
    """Cards report a little less, or more, than is marketed."""
    board = board_of(VAST, word, memory_mb=memory_mb)
    assert board is not None
    assert board.name == name


@pytest.mark.parametrize(
    ("target", "types"),
    [
        ("a100-40gb-1x", {"gpu_1x_a100", "gpu_1x_a100_sxm4"}),
        ("a100-40gb-8x", {"gpu_8x_a100"}),
        ("a100-80gb-8x", {"gpu_8x_a100_80gb_sxm4"}),
        ("b200-2x", {"gpu_2x_b200_sxm6"}),
        ("h100-1x", {"gpu_1x_h100_pcie", "gpu_1x_h100_sxm5"}),
        ("h100-sxm-8x", {"gpu_8x_h100_sxm5"}),
    ],
)
def test_lambda_types_of_a_target(target: str, types: set[str]) -> None:
    """The widths and the 40 GB trap of the A100 are as in Lambda's own table."""
    assert set(lambda_types(parse_target(target))) == types


@pytest.mark.parametrize(
    ("target", "provider", "hint"),
    [
        ("b200-2x", NEBIUS, "b200-1x, b200-8x"),
        ("a100-80gb-1x", LAMBDA, "a100-80gb-8x"),
        ("gh200-1x", VAST, "sold by lambda"),
        ("h1000-1x", VAST, "known: a10,"),
    ],
)
def test_a_refusal_says_what_would_do(target: str, provider: str, hint: str) -> None:
    """Too wide, elsewhere only, or unknown: the message names what there is."""
    with pytest.raises(UsageError, match=hint):
        words_of(parse_target(target), provider)


@pytest.mark.parametrize("text", ["a100-1x", "v100-8x", "rtx6000-1x"])
def test_names_for_several_things_are_refused(text: str) -> None:
    """A bare name that is sold with different memory has to be said in full."""
    with pytest.raises(UsageError, match=" or "):
        parse_target(text)
