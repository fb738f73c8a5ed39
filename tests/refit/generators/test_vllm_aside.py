"""What stages in a worker of vLLM leaves the cores and the turn to the model."""

import os
import subprocess
import sys
import threading

import pytest

from paceline.refit.generators.vllm.aside import NICENESS, run_aside

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


def test_the_model_goes_first() -> None:
    """The turn is given up by the thread alone, and errors come through."""
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert run_aside(priority) == NICENESS
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    with pytest.raises(ZeroDivisionError):
        run_aside(lambda: 1 // 0)
