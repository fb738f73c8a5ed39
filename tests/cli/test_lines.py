"""A log as JSON lines: nothing lost, nothing doubled, however its bytes come."""

import json

from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.lines import PIECE_BYTES, JsonLines
from paceline.runs.model import Slot

SLOT = Slot(role="trainer", index=2)


def lines_of(pieces: list[bytes]) -> list[dict[str, object]]:
    written: list[str] = []
    lines = JsonLines(SLOT, written.append)
    for piece in pieces:
        lines.take(piece)
    lines.close()
    assert all(text.count("\n") == 1 and text.endswith("\n") for text in written)
    return [json.loads(text) for text in written]


@given(st.lists(st.text("ab\n\N{SNOWMAN}").map(str.encode)))
def test_each_line_comes_once_with_where_it_begins(pieces: list[bytes]) -> None:
    """Whatever a read ends in the middle of."""
    whole = b"".join(pieces)
    expected, offset = [], 0
    for line in whole.splitlines(keepends=True):
        expected.append((offset, line.removesuffix(b"\n").decode()))
        offset += len(line)
    found = lines_of(pieces)
    assert [(one["offset"], one["text"]) for one in found] == expected
    assert all((one["role"], one["index"]) == ("trainer", 2) for one in found)


def test_a_line_without_end_is_no_memory_without_end() -> None:
    """It comes in pieces, each where it begins; what is no UTF-8 is shown as such."""
    found = lines_of([b"x" * PIECE_BYTES, b"y\xff\n"])
    assert [one["offset"] for one in found] == [0, PIECE_BYTES]
    assert found[1]["text"] == "y\N{REPLACEMENT CHARACTER}"
