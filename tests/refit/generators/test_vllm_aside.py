"""What stages in a worker of vLLM leaves its cores to the model."""

import subprocess
import sys

import pytest

from paceline.refit.generators.vllm.aside import run_aside

SCRIPT = """
import os
from concurrent.futures import ThreadPoolExecutor
from paceline.refit.generators.vllm.aside import run_aside
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores[:1])
def of_a_child():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(os.sched_getaffinity, 0).result()
others = set(cores[1:] or cores)
print(cores[:1] == sorted(os.sched_getaffinity(0)), run_aside(of_a_child) == others)
"""


def test_a_bound_worker_keeps_its_core_to_itself() -> None:
    """Threads that step aside, and what they start, use the cores that the model does not."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["True", "True"]


def test_errors_come_through() -> None:
    """Whoever waits for the work gets what it raised."""
    with pytest.raises(ZeroDivisionError):
        run_aside(lambda: 1 // 0)
