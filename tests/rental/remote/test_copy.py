"""Copying in Python gives what rsync gives: same trees, same patterns, same result."""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.rental.remote.argv import rsync_argv
from paceline.rental.remote.local import usable_rsync
from paceline.rental.remote.tree import copy_tree

_T0 = 1_600_000_000_000_000_000


@dataclass(frozen=True)
class Leaf:
    """A file or link to be made."""

    content: str
    mode: int = 0o644
    mtime_ns: int = _T0
    is_link: bool = False


Tree = Mapping[str, "Leaf | Tree"]

_names = st.sampled_from(["a", "b", "ab", "x.log", "y.log", "[z]", "\u00e9", "sp ace", "*"])
_leaves = st.builds(
    Leaf,
    content=st.sampled_from(["", "one", "two", "a/b", "three3"]),
    mode=st.sampled_from([0o644, 0o600, 0o755]),
    mtime_ns=st.sampled_from([_T0, _T0 + 1, _T0 + 5_000_000_000]),
    is_link=st.booleans(),
).map(lambda leaf: Leaf("nowhere", is_link=True) if leaf.is_link and not leaf.content else leaf)
_trees = st.recursive(
    st.dictionaries(_names, _leaves, max_size=4),
    lambda inner: st.dictionaries(_names, _leaves | inner, max_size=4),
    max_leaves=8,
)
_patterns = st.lists(
    st.sampled_from(
        ["*", "a", "/a", "a/", "*.log", "a/b", "/a/*", "a/**", "**/b", "b/***", "?", "[ab]",
         "[!a]*", "\u00e9", "sp ace", r"\[z\]", "[[]z]", "[z]", "**", "/*/", "x.log", "*/a/", "a*b",
         "**a", "/**/a", "a**"]
    )
    | st.text(st.sampled_from("ab/*?[]!\u00e9"), min_size=1, max_size=5),
    max_size=3,
)  # fmt: skip


def make(root: Path, tree: Tree) -> None:
    root.mkdir(exist_ok=True)
    for name, node in tree.items():
        path = root / name
        if not isinstance(node, Leaf):
            make(path, node)
        elif node.is_link:
            path.symlink_to(node.content)
        else:
            path.write_text(node.content)
            path.chmod(node.mode)
        if isinstance(node, Leaf):
            os.utime(path, ns=(_T0, node.mtime_ns), follow_symlinks=False)
    os.utime(root, ns=(_T0, _T0))


def describe(root: Path) -> dict[str, tuple[str, object, int]]:
    found: dict[str, tuple[str, object, int]] = {}
    for path in [root, *root.rglob("*")]:
        facts = path.lstat()
        content: object = None
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (
            stat.filemode(facts.st_mode),
            content,
            # Directories that only the destination had were touched now, at no time of ours.
            facts.st_mtime_ns if facts.st_mtime_ns < _T0 + 10**10 else 0,
        )
    return found


def copy_by_rsync(
    src: Path, dst: Path, includes: list[str], excludes: list[str], *, delete: bool
) -> bool:
    program = usable_rsync()
    assert program is not None
    argv = rsync_argv(
        program, f"{src}/", f"{dst}/", includes=includes, excludes=excludes, delete=delete
    )
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.returncode in (0, 23), done.stderr
    return done.returncode == 0


def copy_by_python(
    src: Path, dst: Path, includes: list[str], excludes: list[str], *, delete: bool
) -> bool:
    try:
        copy_tree(src, dst, includes=includes, excludes=excludes, delete=delete)
    except OSError:
        return False
    return True


@pytest.mark.skipif(usable_rsync() is None, reason="needs rsync: apt-get install rsync")
@settings(max_examples=60, deadline=None)
@given(src=_trees, dst=_trees, includes=_patterns, excludes=_patterns, delete=st.booleans())
@example(src={}, dst={"a": {"x.log": Leaf("kept")}}, includes=[], excludes=["*.log"], delete=True)
@example(src={"a": Leaf("f")}, dst={"a": {"b": Leaf("x")}}, includes=[], excludes=[], delete=True)
@example(src={"a": Leaf("new")}, dst={"a": Leaf("old")}, includes=[], excludes=[], delete=False)
def test_python_and_rsync_agree(
    src: Tree, dst: Tree, includes: list[str], excludes: list[str], delete: bool
) -> None:
    """On any two trees and any patterns both succeed with one result, or both fail."""
    home = Path(tempfile.mkdtemp(prefix="paceline-copy-"))
    try:
        make(home / "src", src)
        make(home / "one", dst)
        make(home / "two", dst)
        one = copy_by_rsync(home / "src", home / "one", includes, excludes, delete=delete)
        two = copy_by_python(home / "src", home / "two", includes, excludes, delete=delete)
        assert one == two
        if one:
            assert describe(home / "two") == describe(home / "one")
    finally:
        shutil.rmtree(home)


def test_a_copy_leaves_no_draft_and_replaces_whole_files(tmp_path: Path) -> None:
    """A reader that has the old file open keeps the old bytes."""
    make(tmp_path / "src", {"a": Leaf("new bytes", mtime_ns=_T0 + 9)})
    make(tmp_path / "dst", {"a": Leaf("old")})
    with (tmp_path / "dst" / "a").open() as reader:
        copy_tree(tmp_path / "src", tmp_path / "dst")
        assert reader.read() == "old"
    assert [path.name for path in (tmp_path / "dst").iterdir()] == ["a"]
    assert (tmp_path / "dst" / "a").read_text() == "new bytes"


def test_pipes_are_passed_over(tmp_path: Path) -> None:
    """A named pipe in the source neither blocks the copy nor arrives."""
    make(tmp_path / "src", {"a": Leaf("x")})
    os.mkfifo(tmp_path / "src" / "pipe")
    copy_tree(tmp_path / "src", tmp_path / "dst")
    assert [path.name for path in (tmp_path / "dst").iterdir()] == ["a"]
