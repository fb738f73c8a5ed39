"""Patterns mean what rsync's manual says; the comparison with rsync itself is in test_copy.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.rental.remote.argv import is_usable_rsync, rsync_argv
from paceline.rental.remote.rules import compile_rules, is_excluded

_TEXT = st.text(st.sampled_from("ab/*?[]!-^\\.:\u00e9\n"), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("pattern", "path", "is_dir", "matches"),
    [
        ("*.log", "x.log", False, True),
        ("*.log", "deep/x.log", False, True),
        ("/x", "x", False, True),
        ("/x", "deep/x", False, False),
        ("x/", "x", True, True),
        ("x/", "x", False, False),
        ("a/b", "a/b", False, True),
        ("a/b", "deep/a/b", False, True),
        ("a/b", "xa/b", False, False),
        ("a/*", "a/b/c", False, False),
        ("a/**", "a/b/c", False, True),
        ("**/c", "c", False, True),
        ("**/c", "a/b/c", False, True),
        ("a/***", "a", True, True),
        ("a/***", "a", False, False),
        ("a/***", "a/b", False, True),
        ("[ab]?", "bz", False, True),
        ("[!ab]", "c", False, True),
        ("[!ab]", "a", False, False),
        ("[[:digit:]]", "7", False, True),
        ("[z", "[z", False, False),
        (r"\*x*", "*xy", False, True),
        (r"a\b", r"a\b", False, True),
        (".", "a", False, False),
    ],
)
def test_a_pattern_speaks_of_a_path(pattern: str, path: str, is_dir: bool, matches: bool) -> None:
    """Each line of the table is a sentence of the manual."""
    rules = compile_rules(includes=[], excludes=[pattern])
    assert is_excluded(rules, path, is_dir=is_dir) is matches


@given(st.lists(_TEXT), st.lists(_TEXT), _TEXT, st.booleans())
def test_no_pattern_crashes_and_includes_win(
    includes: list[str], excludes: list[str], path: str, is_dir: bool
) -> None:
    """Any text compiles, and what an include matches is never excluded."""
    rules = compile_rules(includes=includes, excludes=excludes)
    alone = compile_rules(includes=[], excludes=includes)
    if is_excluded(alone, path, is_dir=is_dir):
        assert not is_excluded(rules, path, is_dir=is_dir)


def test_an_empty_pattern_is_refused_by_both_ways_of_copying() -> None:
    """An rsync would stop with a syntax error; ours says what to write."""
    with pytest.raises(UsageError, match="empty"):
        compile_rules(includes=[""], excludes=[])
    with pytest.raises(UsageError, match="empty"):
        rsync_argv("rsync", "/a", "/b", excludes=[""])


@given(st.lists(_TEXT, max_size=3), st.lists(_TEXT, max_size=3), st.booleans())
def test_paths_come_last_behind_a_double_dash(
    includes: list[str], excludes: list[str], delete: bool
) -> None:
    """No pattern can become an option or a path, and includes come before excludes."""
    argv = rsync_argv("rsync", "-src", "-dst", includes=includes, excludes=excludes, delete=delete)
    assert argv[-3:] == ["--", "-src", "-dst"]
    filters = [word for word in argv if word.startswith("--filter=")]
    assert filters == [f"--filter=+ {p}" for p in includes] + [f"--filter=- {p}" for p in excludes]
    assert ("--delete" in argv) is delete
    assert len(argv) == 6 + len(filters) + delete


@pytest.mark.parametrize(
    ("text", "is_usable"),
    [
        ("rsync  version 3.2.7  protocol version 31\n", True),
        ("rsync  version 3.4.1  protocol version 32\n", True),
        ("rsync  version 2.6.9  protocol version 29\n", False),
        ("openrsync: protocol version 29\nrsync version 2.6.9 compatible\n", False),
        ("", False),
    ],
)
def test_old_and_other_rsyncs_are_not_used(text: str, is_usable: bool) -> None:
    """Only an rsync that compares times to the nanosecond copies as ours does."""
    assert is_usable_rsync(text) is is_usable
