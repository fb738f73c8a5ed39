"""What is shown of text from outside."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.text import printable, told_by


@given(st.text())
def test_nothing_shown_drives_a_terminal(text: str) -> None:
    """No control character but line breaks and tabs comes through; the length stays."""
    shown = printable(text)
    assert all(char.isprintable() or char.isspace() or not char.isascii() for char in shown)
    assert not {chr(code) for code in (*range(9), *range(11, 32), 127, 0x9B)} & set(shown)
    assert len(shown) == len(text)
    shown.encode()


def test_ordinary_text_is_left_alone() -> None:
    """Letters of any script, line breaks and tabs are not touched."""
    assert printable("line\n\tÄ 漢 é") == "line\n\tÄ 漢 é"
    assert (
        printable("\x1b[31mred\u202e")
        == "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}"
    )


def test_a_name_is_told_once() -> None:
    """Errors of backends begin with the backend; who tells of them does not say it again."""
    assert told_by("vast", "vast: no key") == "vast: no key"
    assert told_by("vast", "vast machine 7 is gone") == "vast machine 7 is gone"
    assert told_by("vast", "vastly too dear") == "vast: vastly too dear"
