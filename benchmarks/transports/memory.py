"""How much memory a receiver needs to fetch and prove a payload, whatever its size."""

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bars import Bar, at_most

from paceline.refit.manifest.v1 import Manifest
from paceline.refit.receiver.fetch import Fetcher, FetchLimits, FetchParts
from paceline.refit.transports.http.reader import HttpObjectReader
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.system import chance, system_clock
from transports.processes import answer_of, beside
from transports.weights import noise, shard_at

_TOKEN = "of-this-benchmark"  # noqa: S105 - not a secret


def measure(num_bytes: int) -> list[Bar]:
    """Return the growth of a receiver's own memory, as a multiple of its window."""
    bars = []
    for size in (num_bytes // 4, num_bytes):
        with beside(_serve, size) as (endpoint, manifest):
            peak = answer_of(_fetch, endpoint, manifest)
        name = f"receiver_memory_in_windows_at_{size // 2**20}_mib"
        bars.append(at_most(name, peak / FetchLimits().window_bytes, 2.0))
    return bars


def _serve(connection: Any, num_bytes: int) -> None:
    manifest, data = noise(num_bytes, tensors=1)
    server = HttpObjectServer(token=lambda: _TOKEN)
    server.serve_object(manifest.objects[0].object_id, [data])
    connection.send((server.endpoint, manifest))
    connection.recv()
    server.close()


def _fetch(endpoint: str, manifest: Manifest) -> int:
    reader = HttpObjectReader(token=lambda: _TOKEN, clock=system_clock(), chance=chance)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as spool:  # not in memory, as /tmp may be
        limits = FetchLimits(spool_dir=Path(spool))
        parts = FetchParts(clock=system_clock(), limits=limits)
        before, peaks, done = _own_bytes(), [0], threading.Event()

        def watch() -> None:
            while not done.is_set():
                peaks.append(_own_bytes())
                time.sleep(0.002)

        thread = threading.Thread(target=watch)
        thread.start()
        found = Fetcher(reader, parts).fetch_objects(
            manifest, [shard_at(endpoint)], bytes_max=2**40
        )
        done.set()
        thread.join()
        assert sum(len(data) for data in found.values()) == manifest.objects[0].num_bytes
    reader.close()
    return max(peaks) - before


def _own_bytes() -> int:
    """Return memory that cannot be given back to the system by dropping a cache."""
    kib = 0
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kib += int(line.split()[1])
    return kib * 1024
