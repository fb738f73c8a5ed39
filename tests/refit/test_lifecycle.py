"""The table of a weight version's states."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit import lifecycle
from paceline.refit.errors import PreconditionError
from paceline.refit.model import VersionState

LEGAL = {("STAGING", "READY"), ("STAGING", "RELEASING"), ("READY", "RELEASING")}


@pytest.mark.parametrize(
    ("before", "after"), list(product(VersionState, VersionState)), ids=lambda state: state.value
)
def test_moves_are_exactly_the_protocols(before: VersionState, after: VersionState) -> None:
    """Staying is fine, three moves are legal, everything else raises and says what would be."""
    if before is after or (before.value, after.value) in LEGAL:
        assert lifecycle.move("v", before, after) is after
    else:
        with pytest.raises(PreconditionError, match=f"'v' is {before} and cannot become {after}"):
            lifecycle.move("v", before, after)


@given(st.lists(st.sampled_from(VersionState)))
def test_no_walk_goes_back(wanted: list[VersionState]) -> None:
    """However moves are tried, the states that were reached only go forward."""
    order = list(VersionState)
    state = VersionState.STAGING
    for after in wanted:
        try:
            moved = lifecycle.move("v", state, after)
        except PreconditionError:
            continue
        assert order.index(moved) >= order.index(state)
        state = moved


def test_what_may_be_leased_cannot_be_evicted() -> None:
    """No state lets a reader begin while a source may take its bytes away."""
    assert not lifecycle.LEASABLE & lifecycle.EVICTABLE
    assert lifecycle.LEASABLE < lifecycle.RENEWABLE


def test_the_specification_shows_the_table() -> None:
    """The diagram in the docs is what is drawn from the table."""
    page = Path(__file__).parents[2] / "docs" / "formats" / "control-v1.md"
    assert f"```mermaid\n{lifecycle.render_mermaid()}```" in page.read_text("utf8")


def test_the_diagram_has_every_move() -> None:
    """Beginnings, moves and the end, each on its line."""
    assert lifecycle.render_mermaid() == (
        "stateDiagram-v2\n"
        "    [*] --> STAGING\n"
        "    [*] --> READY\n"
        "    STAGING --> READY\n"
        "    STAGING --> RELEASING\n"
        "    READY --> RELEASING\n"
        "    RELEASING --> [*]\n"
    )
