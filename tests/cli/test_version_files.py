"""``paceline versions diff | compose | apply | verify`` on checkpoints and version folders."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from paceline.cli.versions import versions
from paceline.refit.delta.canonical import FullTensor, render_full_shard, versions_of
from paceline.refit.errors import VerifyError
from paceline.refit.inspection import read_checkpoint


def checkpoints(folder: Path, count: int = 3) -> list[Path]:
    """Consecutive states of a small model: one layer moves, one tensor stays."""
    random = np.random.default_rng(2)
    state = {
        name: random.integers(0x3C00, 0x3D00, 4000, dtype=np.uint16)
        for name in ("model.layers.0.a", "model.layers.0.b", "norm")
    }
    found = []
    for i in range(count):
        path = folder / f"v{i}.safetensors"
        save_file(state, path)
        found.append(path)
        state = {name: words.copy() for name, words in state.items()}
        state["model.layers.0.a"][i :: 100 + i] += np.uint16(1 + i)
    return found


def run(*args: object) -> str:
    done = CliRunner().invoke(versions, [str(arg) for arg in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_diff_compose_verify(tmp_path: Path) -> None:
    """Two deltas compose to the direct one; each is proven against the checkpoint before it."""
    v0, v1, v2 = checkpoints(tmp_path)
    text = run("diff", v0, v1, "--write", tmp_path / "d1")
    assert "model.layers.0: 0.5000% of 8000 changed" in text
    assert "norm: 0.0000% of 4000 changed" in text
    assert "<= 1: 40" in text
    run("diff", v1, v2, "--write", tmp_path / "d2")
    run("diff", v0, v2, "--write", tmp_path / "direct")
    assert "instead of" in run("compose", tmp_path / "d1", tmp_path / "d2", tmp_path / "both")
    root = run("verify", tmp_path / "both", "--base", v0).split()[-1]
    assert root == run("verify", tmp_path / "direct", "--base", v0).split()[-1]
    assert root == run("verify", tmp_path / "both").split()[-1]
    names = [(tmp_path / f / "objects").iterdir().__next__().name for f in ("both", "direct")]
    assert names[0] == names[1]


def test_diff_as_json(tmp_path: Path) -> None:
    """The same facts for programs."""
    v0, v1 = checkpoints(tmp_path, 2)
    tensors = {item["name"]: item for item in json.loads(run("diff", v0, v1, "--json"))["tensors"]}
    assert tensors["model.layers.0.a"]["changed_elements"] == 40
    assert tensors["norm"]["bytes_by_scheme"] == {}
    assert set(tensors["model.layers.0.a"]["bytes_by_scheme"]) == {"raw", "gap", "dense", "xor"}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Another base, another order, damage and other layouts are named."""
    v0, v1, v2 = checkpoints(tmp_path)
    run("diff", v0, v1, "--write", tmp_path / "d1")
    run("diff", v1, v2, "--write", tmp_path / "d2")
    with pytest.raises(VerifyError, match="applies to"):
        run("verify", tmp_path / "d2", "--base", v0)
    with pytest.raises(VerifyError, match="leads to"):
        run("compose", tmp_path / "d2", tmp_path / "d1", tmp_path / "x")
    other = tmp_path / "other.safetensors"
    save_file({"w": np.zeros(3, dtype=np.uint16)}, other)
    with pytest.raises(VerifyError, match="not the same tensors"):
        run("diff", v0, other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(VerifyError, match=r"no \.safetensors"):
        run("diff", tmp_path / "empty", v0)
    path = next((tmp_path / "d1" / "objects").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(VerifyError, match="hash"):
        run("verify", tmp_path / "d1")
    path.unlink()
    with pytest.raises(VerifyError, match="missing"):
        run("verify", tmp_path / "d1")


def test_apply_writes_files(tmp_path: Path) -> None:
    """A checkpoint becomes the next one, file for file; dry runs and second tries write nothing."""
    v0, v1 = checkpoints(tmp_path, 2)
    run("diff", v0, v1, "--write", tmp_path / "d")
    before = v0.read_bytes()
    assert "would change 40 elements" in run("apply", tmp_path / "d", v0, "--dry-run")
    assert v0.read_bytes() == before
    found = json.loads(run("apply", tmp_path / "d", v0, "--json"))
    assert (found["changed_elements"], found["written"]) == (40, True)
    assert v0.read_bytes() == v1.read_bytes()
    with pytest.raises(VerifyError, match="applies to"):
        run("apply", tmp_path / "d", v0)
    assert v0.read_bytes() == v1.read_bytes()
    assert not list(tmp_path.glob(".*"))


DIES = """
import sys
from pathlib import Path
from paceline.refit import inspection
from paceline.refit.delta.codec import Tools
from paceline.testing.crash_victim import Dying, DyingLoops

tools = Tools(loops=DyingLoops(Dying(1)))
folder, checkpoint = map(Path, sys.argv[1:])
inspection.apply_version(lambda base: inspection.read_version(folder), checkpoint, tools=tools)
"""


@pytest.mark.parametrize("next_format", ["paceline", "canonical"])
def test_apply_after_a_crash(tmp_path: Path, next_format: str) -> None:
    """Killed half-way through a tensor, the next call takes it back first and then goes through."""
    v0, v1 = checkpoints(tmp_path, 2)
    run("diff", v0, v1, "--write", tmp_path / "d")
    run("diff", v0, v1, "--write", tmp_path / "next", "--format", next_format)
    before = v0.read_bytes()
    done = subprocess.run([sys.executable, "-c", DIES, tmp_path / "d", v0], check=False, timeout=60)
    assert done.returncode == 9
    assert v0.read_bytes() not in {before, v1.read_bytes()}
    with pytest.raises(VerifyError, match="crashed"):
        run("apply", tmp_path / "next", v0, "--dry-run")
    with pytest.raises(VerifyError, match="crashed"):
        run("diff", v0, v1)
    run("apply", tmp_path / "next", v0)
    assert v0.read_bytes() == v1.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_apply_refuses_files_with_checksums(tmp_path: Path) -> None:
    """Tensors whose checksum stands in the file cannot be changed in place."""
    v0, v1 = checkpoints(tmp_path, 2)
    run("diff", v0, v1, "--write", tmp_path / "d")
    tensors = {
        name: FullTensor(dtype=item.dtype, shape=item.shape, data=item.data)
        for name, item in read_checkpoint(v0).items()
    }
    checked = tmp_path / "checked.safetensors"
    checked.write_bytes(render_full_shard(tensors))
    before = checked.read_bytes()
    with pytest.raises(VerifyError, match="carries checksums"):
        run("apply", tmp_path / "d", checked)
    assert checked.read_bytes() == before


def test_canonical_deltas_are_written_and_read(tmp_path: Path) -> None:
    """What stock receivers read goes out and comes in, proven against the base and its damage."""
    v0, v1 = checkpoints(tmp_path, 2)
    folder = tmp_path / "c"
    run("diff", v0, v1, "--write", folder, "--format", "canonical")
    assert sorted(path.name for path in folder.iterdir()) == [
        "model-00000-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    refused = CliRunner().invoke(versions, ["verify", str(folder)])
    assert "add --base" in refused.output
    assert "applies" in run("verify", folder, "--base", v0)
    with pytest.raises(VerifyError, match="adler32"):
        run("verify", folder, "--base", v1)
    run("apply", folder, v0)
    assert v0.read_bytes() == v1.read_bytes()
    (folder / "model-00000-of-00001.safetensors").unlink()
    with pytest.raises(VerifyError, match="is missing"):
        run("verify", folder, "--base", v0)


def test_canonical_deltas_say_the_names_that_they_are_given(tmp_path: Path) -> None:
    """Versions are called as on record, not as files; other deltas carry no names."""
    v0, v1 = checkpoints(tmp_path, 2)
    write = ("diff", v0, v1, "--write", tmp_path / "c", "--format", "canonical")
    run(*write, "--name", "run-000007", "--base-name", "run-000006")
    index = (tmp_path / "c" / "model.safetensors.index.json").read_bytes()
    assert versions_of(index) == ("run-000007", "run-000006")
    refused = CliRunner().invoke(versions, ["diff", str(v0), str(v1), "--name", "x"])
    assert "--format canonical" in refused.output


def test_equal_checkpoints_make_an_empty_canonical_delta(tmp_path: Path) -> None:
    """No shard, an index of nothing, and it applies."""
    (v0,) = checkpoints(tmp_path, 1)
    run("diff", v0, v0, "--write", tmp_path / "c", "--format", "canonical")
    before = v0.read_bytes()
    assert "changed 0 elements" in run("apply", tmp_path / "c", v0)
    assert v0.read_bytes() == before
