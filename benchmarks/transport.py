"""The data plane against what the machine gives, and against the peer; ratios within one run.

``--size-mib`` measures at another size than 1 GiB, ``--only`` some of the questions: for working
on them, not for figures.
"""

import time
from collections.abc import Callable, Sequence

import bars
from bars import Bar
from transports import memory, over_http, over_nixl, over_s3

_SIZE_BYTES = 2**30
_QUESTIONS: dict[str, Callable[[int], Sequence[Bar]]] = {
    "nixl": over_nixl.measure,
    "http": over_http.measure,
    "memory": memory.measure,
    "s3": over_s3.measure,
}


def main() -> None:
    """Measure and print."""
    size = int(bars.option("--size-mib", str(_SIZE_BYTES // 2**20))) * 2**20
    only = bars.option("--only", ",".join(_QUESTIONS)).split(",")

    def measure() -> Sequence[Bar]:
        found: list[Bar] = []
        for name in only:
            started = time.monotonic()
            bars.note(f"{name}: measuring")
            found += _QUESTIONS[name](size)
            bars.note(f"{name}: took {time.monotonic() - started:.0f} s")
        return found

    bars.run(
        measure,
        "The data plane: NIXL, HTTP, memory, object stores.",
    )


if __name__ == "__main__":
    main()
