"""Coverage-guided fuzzing of everything that reads a tensor's payload.

Usage: python fuzz_delta.py [CORPUS_DIR ...] [libFuzzer options, such as -max_total_time=60]

The first bytes of an input choose scheme, dtype and base; the rest is the payload. Whatever it is,
it is refused with ParseError or stays inside the tensor, equally by all loops.
"""

import sys

import atheris

with atheris.instrument_imports(include=["paceline.refit.delta"]):
    from paceline.refit.delta.codec import Tools, decode_tensor
    from paceline.refit.delta.order import as_words, kind_of
    from paceline.refit.delta.steps import Steps
    from paceline.refit.errors import ParseError
    from paceline.refit.manifest.v1 import Scheme

from paceline.refit.kernels.registry import load_loops
from paceline.refit.model import DTYPE_BITS

HEAD_BYTES = 3
_SCHEMES = list(Scheme)
_DTYPES = sorted(DTYPE_BITS)
_LOOPS = [load_loops("numpy"), load_loops("numba")]


def head_of(scheme: Scheme, dtype: str, num_bytes: int) -> bytes:
    """Return the bytes that choose these."""
    return bytes([_SCHEMES.index(scheme), _DTYPES.index(dtype), num_bytes])


def one_input(data: bytes) -> None:
    """Decode once with each loops; anything but ParseError or a tensor of the size is a find."""
    if len(data) < HEAD_BYTES:
        return
    scheme, dtype = _SCHEMES[data[0] % len(_SCHEMES)], _DTYPES[data[1] % len(_DTYPES)]
    kind = kind_of(dtype)
    if scheme is Scheme.CLASSED and not kind.exponent_bits:
        return
    base = bytes(i * 37 % 256 for i in range(data[2] // kind.width * kind.width))
    results: list[bytes | None] = []
    for loops in _LOOPS:
        target = as_words(bytearray(base), kind.width)
        try:
            updates = list(
                decode_tensor(
                    memoryview(data[HEAD_BYTES:]),
                    scheme=scheme,
                    base=base,
                    dtype=dtype,
                    tools=Tools(loops=loops),
                )
            )
        except ParseError:
            results.append(None)
            continue
        for update in updates:
            if isinstance(update.new, Steps):
                loops.add(update.new, target[update.part], kind)
            else:
                target[update.part] = update.new
        results.append(target.tobytes())
    if results[0] != results[1]:
        raise AssertionError("loops disagree")


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
