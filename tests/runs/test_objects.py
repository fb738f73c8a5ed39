"""Checkpoints in an object store: committed whole, verified when fetched, pruned in order."""

import os
from collections.abc import Sequence
from pathlib import Path

import obstore
import pytest
from obstore.store import from_url

from paceline.core.errors import PreflightError, UsageError
from paceline.runs.objects import FETCHING, CheckpointStore
from paceline.runs.shelf import listed_here

ROOTS = ("out", "work/checkpoints")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{tmp_path}/bucket", run_id="job-1", slot="trainer-0")


def make(base: Path, path: str, text: str, *, at: int = 900) -> None:
    target = base / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    os.utime(target, (at, at))


def push(store: CheckpointStore, base: Path, *, keep: int = 4) -> Sequence[str]:
    return store.push(listed_here(base, ROOTS, now_s=10_000), base=base, keep=keep).sent


def test_what_was_sent_comes_back(tmp_path: Path, store: CheckpointStore) -> None:
    """Files, folders and loose files, equal bytes, under the paths a role looks for them."""
    base, into = tmp_path / "run", tmp_path / "resume"
    make(base, "work/checkpoints/step-2/model", "two")
    make(base, "work/checkpoints/step-4/deep/model", "four", at=950)
    make(base, "work/checkpoints/notes.txt", "loose")
    make(base, "out/final/model", "final")
    assert len(push(store, base)) == 4
    assert push(store, base) == [], "what is there is not sent again"
    assert len(store.fetch_newest(into)) == 3
    found = {str(p.relative_to(into)): p.read_text() for p in into.rglob("*") if p.is_file()}
    assert found == {
        "checkpoints/step-4/deep/model": "four",
        "checkpoints/notes.txt": "loose",
        "final/model": "final",
    }


def test_what_has_no_manifest_does_not_exist(tmp_path: Path, store: CheckpointStore) -> None:
    """A sending that broke off in the middle leaves bytes that nobody sees, and is gone on with."""
    base = tmp_path / "run"
    make(base, "out/a/model", "first", at=100)
    push(store, base)
    make(base, "out/b/model", "second", at=200)
    bucket = from_url(f"file://{tmp_path}/bucket")
    half = "job-1/trainer-0/data/out/19700101T000320Z-b/model"
    obstore.put(bucket, half, b"sec")
    assert [one.name for one in store.kept().values()] == ["a"]
    store.fetch_newest(tmp_path / "resume")
    assert (tmp_path / "resume/a/model").read_text() == "first"
    push(store, base)
    assert bytes(obstore.get(bucket, half).bytes()) == b"second"


def test_files_that_change_meanwhile_are_not_committed(
    tmp_path: Path, store: CheckpointStore
) -> None:
    """What was listed is what is committed, or nothing is."""
    base = tmp_path / "run"
    make(base, "out/a/model", "old", at=100)
    found = listed_here(base, ROOTS, now_s=10_000)
    make(base, "out/a/model", "newer", at=200)
    assert not store.push(found, base=base, keep=4).sent
    (base / "out/a/model").unlink()
    pushed = store.push(found, base=base, keep=4)
    assert (pushed.sent, [key.rpartition("-")[2] for key in pushed.skipped]) == ([], ["a"])
    assert store.kept() == {}


def test_damage_is_found_and_nothing_appears(tmp_path: Path, store: CheckpointStore) -> None:
    """Bytes that are not what the manifest says, fewer or more, never reach a role."""
    base, into = tmp_path / "run", tmp_path / "resume"
    make(base, "out/a/model", "right")
    push(store, base)
    (data,) = (tmp_path / "bucket").rglob("model")
    for wrong in ("wrong", "right and more"):
        data.write_text(wrong)
        with pytest.raises(PreflightError, match=r"is damaged|is larger"):
            store.fetch_newest(into)
        assert not (into / "a").exists()
    data.write_text("right")
    store.fetch_newest(into)
    assert (into / "a/model").read_text() == "right"
    assert not (into / FETCHING).exists()


def test_pruning_takes_the_commit_first_and_all_bytes(
    tmp_path: Path, store: CheckpointStore
) -> None:
    """Only `keep` of each root stay, and nothing of the others is paid for."""
    base = tmp_path / "run"
    for step in range(5):
        make(base, f"work/checkpoints/step-{step}/model", "x", at=100 + step)
        push(store, base, keep=2)
    assert sorted(one.name for one in store.kept().values()) == ["step-3", "step-4"]
    assert len(list((tmp_path / "bucket").rglob("model"))) == 2


def test_somebody_elses_objects_are_left_alone(tmp_path: Path, store: CheckpointStore) -> None:
    """A bucket may be shared: strange manifests are no checkpoints, and lead nowhere."""
    bucket = from_url(f"file://{tmp_path}/bucket", mkdir=True)
    evil = '{"schema":1,"root":"out","name":"a","is_loose":false,"files":[{"path":"../../x",'
    evil += '"size":1,"changed_at":1,"digest":"0"}]}'
    for name, text in (("a", "not json"), ("b", evil), ("c", '{"schema":9}')):
        obstore.put(bucket, f"job-1/trainer-0/commits/out/{name}.json", text.encode())
    assert store.kept() == {}
    assert store.fetch_newest(tmp_path / "resume") == []


def test_a_url_that_names_no_store_is_refused() -> None:
    """With what is wrong, before anything is sent."""
    with pytest.raises(UsageError, match=r"artifacts\.to names no object store"):
        CheckpointStore("nonsense://x/y", run_id="r", slot="s-0")
