"""Types of what the loops take, and their compilation for exactly these."""

from collections.abc import Callable
from typing import Any

from numba import njit, types

BYTES = types.Array(types.uint8, 1, "C", readonly=True)
OUT_BYTES = types.Array(types.uint8, 1, "C")

OPEN, COUNTS, OUTSIDE, NOTHING = range(1, 5)
"""Why steps are refused."""


def compile_for(loop: Callable[..., Any], *arguments: Any) -> Any:
    """Compile for exactly these arguments; memory that may be read only is taken as such.

    What is compiled is kept on disk, under the time of the file that the loop is in: a loop that
    calls a compiled function of another file would go on with the old one after a change there.
    """
    return njit(arguments, nogil=True, cache=True)(loop)


def words_type(width: int, *, readonly: bool = True) -> Any:
    """Return the type of words of that width."""
    return types.Array(getattr(types, f"uint{8 * width}"), 1, "C", readonly=readonly)
