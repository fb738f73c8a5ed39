"""NIXL between two processes: ours against one raw READ of the same size."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from bars import Bar, at_least

from paceline.refit.digest import content_digest
from paceline.refit.model import ObjectRange
from paceline.refit.transports.http.reader import HttpObjectReader
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.refit.transports.nixl.agent import NixlAgent, Region, region_of
from paceline.refit.transports.nixl.reader import NixlObjectReader
from paceline.refit.transports.nixl.server import NixlObjectServer
from paceline.refit.transports.protocol import Part, Terms
from paceline.system import chance, system_clock
from transports.processes import beside

_TOKEN = "of-this-benchmark"  # noqa: S105 - not a secret
_TENSORS = 200
_ROUNDS = 9


def measure(num_bytes: int) -> list[Bar]:
    """Return the ratios to a raw READ, best of rounds that alternate: others only slow us down."""
    with beside(_serve, num_bytes) as (endpoint, address):
        agent = NixlAgent("reads")
        clock = system_clock()
        door = HttpObjectReader(token=lambda: _TOKEN, clock=clock, chance=chance)
        reader = NixlObjectReader(agent, door, clock=clock)
        target = np.ones(num_bytes, dtype=np.uint8)  # touched: faults are nobody's speed
        edges = [num_bytes * index // _TENSORS for index in range(_TENSORS + 1)]
        parts = [
            Part(
                wanted=ObjectRange(object_id="ab", offset=start, size=stop - start),
                target=target[start:stop].data,
            )
            for start, stop in itertools.pairwise(edges)
        ]
        plan = reader.plan_read(endpoint, parts, timeout_s=60)
        plan.run(Terms(timeout_s=60))  # connections are made on first use
        expected = [content_digest(part.target) for part in parts]
        raw = agent.prepare("serves", [region_of(target.data)], [Region(address, num_bytes)])
        with ThreadPoolExecutor(2) as checker:
            ways: dict[str, Callable[[], object]] = {
                "raw": lambda: _read_raw(agent, raw),
                "ours": lambda: plan.run(Terms(timeout_s=60)),
                "proven": lambda: _read_proven(plan, parts, expected, checker),
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(_ROUNDS):
                for name, way in ways.items():
                    started = time.perf_counter()
                    way()
                    seconds[name].append(time.perf_counter() - started)
        plan.close()
        agent.forget(raw)
        reader.close()
    best = {name: min(found) for name, found in seconds.items()}
    return [
        at_least("nixl_of_raw_read", best["raw"] / best["ours"], 0.90),
        at_least("nixl_proven_of_raw_read", best["raw"] / best["proven"], 0.75),
        at_least("nixl_raw_gb_per_s", num_bytes / best["raw"] / 1e9, 0.0),
    ]


def _serve(connection: Any, num_bytes: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
    server = NixlObjectServer(NixlAgent("serves"), HttpObjectServer(token=lambda: _TOKEN))
    server.serve_object("ab", [data.data])
    connection.send((server.endpoint, region_of(data.data).address))
    connection.recv()
    server.close()


def _read_raw(agent: NixlAgent, read: object) -> None:
    done = agent.post(read)
    while not done:
        done = agent.poll(read)


def _read_proven(plan: Any, parts: list[Part], expected: list[str], checker: Any) -> None:
    checks: list[Future[str]] = [Future()] * len(parts)

    def on_part(index: int) -> None:
        checks[index] = checker.submit(content_digest, parts[index].target)

    plan.run(Terms(timeout_s=60, on_part=on_part))
    assert [check.result() for check in checks] == expected
