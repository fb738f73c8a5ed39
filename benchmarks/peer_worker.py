"""What ModelExpress 0.7.0 does with one tensor, timed in a process and a venv of its own.

Reads commands, one per line, answers one JSON line each. ``encode OLD NEW`` (paths of .npy
files) does what its publisher does per tensor: a copy to host memory, the XOR, its compression,
and the checksum of the new bytes. ``apply`` does what its receiver does with that: expand block by
block, XOR in place, checksum of the result.
"""

import json
import sys
import time

import numpy as np
import torch
import zstandard
from modelexpress_rl.utils import checksum_factory, compress_delta, compute_delta

_BLOCK = 2 * 2**20


def main() -> None:
    """Serve until the input ends."""
    state: dict[str, np.ndarray] = {}
    paths: tuple[str, str] | None = None
    for line in sys.stdin:
        command, *names = line.split()
        if command == "encode":
            if paths != (names[0], names[1]):
                paths = (names[0], names[1])
                state = {"old": _bytes(names[0]), "new": np.load(names[1])}
            answer = _encode(state)
        else:
            answer = _apply(state)
        print(json.dumps(answer), flush=True)


def _encode(state: dict[str, np.ndarray]) -> dict[str, float]:
    tensor = torch.from_numpy(state["new"].view(np.int16)).view(torch.bfloat16)
    start = time.perf_counter()
    current = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    delta, _ = compute_delta(current, state["old"])
    assert delta is not None
    state["frame"] = compress_delta(delta)
    checksum = checksum_factory("adler32")
    checksum.update(current)
    seconds = time.perf_counter() - start
    state["wanted"] = current
    return {"seconds": seconds, "bytes": state["frame"].nbytes}


def _apply(state: dict[str, np.ndarray]) -> dict[str, float]:
    target = state["old"].copy()
    start = time.perf_counter()
    checksum = checksum_factory("adler32")
    reader = zstandard.ZstdDecompressor().stream_reader(state["frame"])
    at = 0
    while at < len(target):
        block = reader.read(min(_BLOCK, len(target) - at))
        region = target[at : at + len(block)]
        np.bitwise_xor(region, np.frombuffer(block, dtype=np.uint8), out=region)
        checksum.update(region)
        at += len(block)
    seconds = time.perf_counter() - start
    assert np.array_equal(target, state["wanted"])
    return {"seconds": seconds}


def _bytes(path: str) -> np.ndarray:
    return np.load(path).view(np.uint8)


if __name__ == "__main__":
    main()
