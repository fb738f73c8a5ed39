"""One end of a NIXL transfer in a process of its own; talks to its test in JSON lines.

``serve BYTES`` serves an object of so many patterned bytes; for each line on its input, which is
``withdraw`` or ``other``, it withdraws that object, or lets another one come and go.
``read BYTES TIMEOUT`` is told an endpoint first, then reads that object once per line and tells
what came; with ``plan`` and ``run TIMEOUT`` in two steps.
"""

# ruff: noqa: T201 - printing is how it answers

import hashlib
import json
import os
import sys

import numpy as np

from paceline.core.retry import RetryPolicy
from paceline.refit.errors import FetchError
from paceline.refit.model import ObjectRange
from paceline.refit.transports.http.reader import HttpObjectReader, HttpReaderOptions
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.refit.transports.nixl.agent import NixlAgent
from paceline.refit.transports.nixl.reader import NixlObjectReader
from paceline.refit.transports.nixl.server import NixlObjectServer
from paceline.refit.transports.protocol import Part, Terms
from paceline.system import system_clock

TOKEN = "of-this-test"  # noqa: S105 - not a secret


def pattern(num_bytes: int) -> np.ndarray:
    """Bytes that differ everywhere."""
    return np.random.default_rng(7).integers(0, 256, num_bytes, dtype=np.uint8)


def serve(num_bytes: int) -> None:
    data = pattern(num_bytes)
    door = HttpObjectServer(token=lambda: TOKEN)
    server = NixlObjectServer(NixlAgent(f"serve-{os.getpid()}"), door)
    half = num_bytes // 2
    server.serve_object("ab", [data[:half].data, data[half:].data])
    print(json.dumps({"endpoint": server.endpoint}), flush=True)
    for line in sys.stdin:
        if line.strip() == "withdraw":
            server.withdraw_object("ab")
        else:
            other = bytearray(4096)
            server.serve_object("cd", [memoryview(other)])
            server.withdraw_object("cd")
        print(json.dumps({"done": line.strip()}), flush=True)
    server.close()


def read(num_bytes: int, timeout_s: float) -> None:
    clock = system_clock()
    door = HttpObjectReader(
        token=lambda: TOKEN,
        clock=clock,
        chance=lambda: 0.5,
        options=HttpReaderOptions(retry=RetryPolicy(attempts=1)),
    )
    reader = NixlObjectReader(NixlAgent(f"read-{os.getpid()}"), door, clock=clock)
    wanted = ObjectRange(object_id="ab", offset=0, size=num_bytes)
    plan = None
    endpoint = sys.stdin.readline().strip()
    for line in sys.stdin:
        target = bytearray(num_bytes)
        started = clock.monotonic()
        try:
            word, _, limit = line.strip().partition(" ")
            if word != "run" or plan is None:
                part = Part(wanted=wanted, target=memoryview(target))
                plan = reader.plan_read(endpoint, [part], timeout_s=timeout_s)
            if word != "plan":
                plan.run(Terms(timeout_s=float(limit or timeout_s)))
            answer = {"sha256": hashlib.sha256(part.target).hexdigest()}
        except FetchError as exc:
            answer = {"error": str(exc), "source": exc.source}
        print(json.dumps({**answer, "seconds": clock.monotonic() - started}), flush=True)
    reader.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        read(int(sys.argv[2]), float(sys.argv[3]))
