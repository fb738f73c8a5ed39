"""A short run of the fuzz target from a seeded corpus; longer ones are run by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.refit.manifest.v1 import Scheme
from paceline.refit.model import DTYPE_BITS

HERE = Path(__file__).parent
CASES = json.loads((HERE.parent / "vectors" / "delta" / "cases.json").read_text())
SCHEMES, DTYPES = list(Scheme), sorted(DTYPE_BITS)


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="no atheris on this platform"
)
def test_fuzzing_finds_nothing(tmp_path: Path) -> None:
    """Thousands of inputs grown from the vectors are all refused or harmless."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, case in enumerate(CASES):
        base = bytes.fromhex(case["base"])
        if len(base) < 256:
            head = [SCHEMES.index(case["scheme"]), DTYPES.index(case["dtype"]), len(base)]
            (corpus / str(i)).write_bytes(bytes(head) + bytes.fromhex(case["payload"]))
    done = subprocess.run(
        [
            sys.executable,
            HERE / "fuzz_delta.py",
            corpus,
            "-runs=20000",
            "-max_total_time=8",
            "-seed=1",
            "-rss_limit_mb=2048",
            f"-artifact_prefix={tmp_path}/",
        ],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
