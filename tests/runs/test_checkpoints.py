"""What a checkpoint is, which are fetched and which go; whole on the shelf or not to be seen."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import PreflightError
from paceline.runs import checkpoints
from paceline.runs.checkpoints import (
    Checkpoint,
    FileEntry,
    listing_command,
    parse_listing,
    parse_manifest,
    plan_fetches,
    plan_prune,
    plan_resume,
    render_manifest,
    resume_path,
    roots_of,
)
from paceline.runs.shelf import MANIFEST, PARTIAL, Shelf, listed_here

ROOTS = roots_of(["checkpoints/", "model.pt"])


def checkpoint(name: str, changed_at: int, *, root: str = "work/checkpoints") -> Checkpoint:
    files = (FileEntry(path="model", size=3, changed_at=changed_at),)
    return Checkpoint(root=root, name=name, is_loose=False, files=files)


def test_a_listing_says_what_belongs_together() -> None:
    """A directory below a path is one checkpoint, loose files are another, the newest is first."""
    text = (
        "1000\n"
        "900 5 work/checkpoints/step-2/model\n"
        "901 7 work/checkpoints/step-2/deep/state\n"
        "950 5 work/checkpoints/step-4/model\n"
        "100 2 work/checkpoints/README.md\n"
        "800 9 work/model.pt\n"
        "850 1 out/final/model\n"
    )
    found = parse_listing(text, roots=ROOTS)
    assert [(one.source, one.is_loose, one.num_bytes) for one in found] == [
        ("work/checkpoints/step-4", False, 5),
        ("work/checkpoints/step-2", False, 12),
        ("out/final", False, 1),
        ("work", True, 9),
        ("work/checkpoints", True, 2),
    ]
    assert found[0].commit_name == "19700101T001550Z-step-4"


def test_what_is_being_written_is_left_alone() -> None:
    """Names that say so, and files that changed a moment ago."""
    lines = ["1000", "999 5 out/new/model"]
    lines += [f"900 5 out/{name}/model" for name in ("tmp-3", "a.tmp", ".b", "c.partial")]
    lines += ["900 5 out/ready/model", "900 5 out/mixed/old", "999 5 out/mixed/new"]
    assert [one.name for one in parse_listing("\n".join(lines), roots=("out",))] == ["ready"]


@given(st.text())
def test_no_listing_breaks_the_reader_or_leads_out(text: str) -> None:
    """What a machine says is read with care: no path of it leads elsewhere."""
    for one in parse_listing("1000\n" + text, roots=ROOTS):
        assert one.root in {*ROOTS, "work"}
        assert ".." not in one.source.split("/")


def test_a_working_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing has a limit, and passing it says what to do."""
    monkeypatch.setattr(checkpoints, "FILES_MAX", 3)
    with pytest.raises(PreflightError, match="narrower paths"):
        parse_listing("1000\n" + "1 1 out/a/b\n" * 4, roots=("out",))


SETS = st.lists(
    st.builds(
        checkpoint,
        st.sampled_from(["a", "b", "c", "d", "e"]),
        st.integers(1, 50),
        root=st.sampled_from(["out", "work/x"]),
    ),
    unique_by=lambda one: (one.root, one.commit_name),
)


@given(SETS, SETS, st.integers(1, 4))
def test_what_is_fetched_is_not_pruned_at_once(
    found: list[Checkpoint], before: list[Checkpoint], keep: int
) -> None:
    """Fetching and pruning agree: the newest `keep` of each root are there afterwards."""
    newest_first = sorted(found, key=lambda one: -one.changed_at)
    fetched = plan_fetches(newest_first, kept=before, keep=keep)
    assert not set(fetched) & set(before)
    assert [one.changed_at for one in fetched] == sorted(o.changed_at for o in fetched)[::-1]
    kept = {f"{one.root}/{one.commit_name}": one for one in (*before, *fetched)}
    gone = set(plan_prune(kept, keep=keep))
    for root in ("out", "work/x"):
        of_root = [key for key, one in kept.items() if one.root == root]
        assert len([key for key in of_root if key not in gone]) == min(keep, len(of_root))
    assert not set(plan_resume(kept)) & gone


def test_a_manifest_comes_back_equal_and_a_strange_one_is_refused() -> None:
    """Round trip; and no path of a manifest that others may have written leads out."""
    one = checkpoint("step-2", 900)
    text = render_manifest(one, digests={"model": "abc"})
    assert parse_manifest(text) == (one, {"model": "abc"})
    for bad in ("", "{}", "[]", text.replace('"model"', '"../model"'), text.replace("work", "/w")):
        with pytest.raises(ValueError, match=r"."):
            parse_manifest(bad)


def test_where_a_role_finds_what_it_goes_on_from() -> None:
    """The same path as below its working directory."""
    assert resume_path(checkpoint("step-2", 1)) == "checkpoints/step-2"
    assert resume_path(checkpoint("final", 1, root="out")) == "final"
    loose = replace(checkpoint("files", 1), is_loose=True)
    assert resume_path(loose) == "checkpoints"


def make(base: Path, path: str, text: str, *, at: int = 900) -> None:
    target = base / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    os.utime(target, (at, at))


def test_the_shell_lists_what_python_lists(tmp_path: Path) -> None:
    """The line for the machine's shell and our own walk find the same checkpoints."""
    base = tmp_path / "run"
    (base / "state").mkdir(parents=True)
    make(base, "work/checkpoints/step 2/model's", "abc")
    make(base, "work/model.pt", "x", at=800)
    make(base, "out/a/b/c", "de", at=700)
    command = listing_command("run", ROOTS, into="state/list")
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=True)
    by_shell = parse_listing((base / "state/list").read_text(), roots=ROOTS)
    assert by_shell == listed_here(base, ROOTS, now_s=1000)
    assert [one.name for one in by_shell] == ["step 2", "files", "a"]


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    """A copy that breaks off, is short, or changed meanwhile is not to be seen; then it is."""
    shelf = Shelf(tmp_path)
    one = checkpoint("step-2", 900)

    def broken(into: Path) -> None:
        (into / "model").write_text("ab")
        raise PreflightError("the connection broke")

    with pytest.raises(PreflightError):
        shelf.fetch(one, broken, is_still=lambda: True)
    assert shelf.kept() == {}

    def short(into: Path) -> None:
        assert (into / "model").read_text() == "ab", "what was fetched before is gone on with"

    assert shelf.fetch(one, short, is_still=lambda: True) is None

    def whole(into: Path) -> None:
        (into / "model").write_text("abc")
        (into / "stale").write_text("of an earlier try")

    assert shelf.fetch(one, whole, is_still=lambda: False) is None
    assert shelf.kept() == {}
    kept = shelf.fetch(one, whole, is_still=lambda: True)
    assert kept is not None
    assert list(shelf.kept().values()) == [one]
    assert {path.name for path in kept.iterdir()} == {"model", MANIFEST}
    assert not (tmp_path / PARTIAL / "work/checkpoints/step-2").exists()


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    """Old ones go by one rename; what is no checkpoint of ours stays."""
    shelf = Shelf(tmp_path)
    for step in range(5):

        def copy(into: Path) -> None:
            (into / "model").write_text("abc")

        shelf.fetch(checkpoint(f"step-{step}", 900 + step), copy, is_still=lambda: True)
    make(tmp_path, f"work/mine/{MANIFEST}", "not ours")
    assert len(shelf.prune(keep=2)) == 3
    assert sorted(one.name for one in shelf.kept().values()) == ["step-3", "step-4"]
    assert [path.name for path in shelf.newest().values()] == ["19700101T001504Z-step-4"]
    assert (tmp_path / "work/mine" / MANIFEST).exists()
