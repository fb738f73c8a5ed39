"""States of a machine on our record, and which moves between them are legal. Nothing else.

A record is written before anything is created, and it is over only when a read has shown that
nothing bills. Two moves lead back from the end, because providers answer late: a machine that
was thought never to have been created turns up, or one that was seen gone is seen again.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Final

from paceline.rental.errors import IllegalMoveError


class MachineState(StrEnum):
    """Where a machine is in its life, as far as we can prove it."""

    INTENDED = "intended"
    """The create call is about to be made, or its answer was lost: it may exist and bill."""
    CREATED = "created"
    """It exists and bills; its id is known."""
    RUNNING = "running"
    """It has been seen usable."""
    ENDING = "ending"
    """It was told to go, or is about to be; it bills until it is seen gone."""
    GONE = "gone"
    """A read after the order to go said that it does not exist."""
    NEVER_CREATED = "never_created"
    """Nothing under its label exists, and long enough has passed to believe it. One that was
    created and vanished before anybody could look is not told apart, and its cost not known."""


MOVES: Final = MappingProxyType(
    {
        MachineState.INTENDED: frozenset({MachineState.CREATED, MachineState.NEVER_CREATED}),
        MachineState.CREATED: frozenset(
            {MachineState.RUNNING, MachineState.ENDING, MachineState.GONE}
        ),
        MachineState.RUNNING: frozenset({MachineState.ENDING, MachineState.GONE}),
        MachineState.ENDING: frozenset({MachineState.GONE}),
        MachineState.GONE: frozenset({MachineState.ENDING}),
        MachineState.NEVER_CREATED: frozenset({MachineState.CREATED}),
    }
)

OVER: Final = frozenset({MachineState.GONE, MachineState.NEVER_CREATED})


def is_over(state: MachineState) -> bool:
    """Return whether nothing can bill any more, by all that was read."""
    return state in OVER


def move(old: MachineState, new: MachineState, *, label: str) -> MachineState:
    """Return ``new``.

    Raises:
        IllegalMoveError: the table has no such move; somebody else moved the machine meanwhile.
    """
    if new not in MOVES[old]:
        raise IllegalMoveError(
            f"machine {label} is {old} and cannot become {new}; look at it again"
        )
    return new
