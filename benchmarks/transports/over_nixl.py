"""NIXL between two processes: ours against one raw READ of the same size.

``proven`` proves each tensor as a receiver does, while others travel. ``fetched`` is a receiver's
whole fetch into the file that it keeps, ``first_fetched`` into a new one: they measure the system's
page cache too, and have no limit.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from bars import Bar, at_least, best_of_rounds

from paceline.refit.manifest.v1 import Manifest
from paceline.refit.receiver.fetch import Fetcher, FetchLimits, FetchParts, spool_of
from paceline.refit.receiver.pieces import Target, pieces_of
from paceline.refit.receiver.prover import Prover
from paceline.refit.receiver.spool import Spool
from paceline.refit.transports.http.reader import HttpObjectReader
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.refit.transports.nixl.agent import NixlAgent, Region, region_of
from paceline.refit.transports.nixl.reader import NixlObjectReader
from paceline.refit.transports.nixl.server import NixlObjectServer
from paceline.refit.transports.protocol import Part, ReadPlan, Terms
from paceline.system import chance, system_clock
from transports.processes import beside
from transports.weights import noise, shard_at

_TOKEN = "of-this-benchmark"  # noqa: S105 - not a secret
_TENSORS = 200
_ROUNDS = 9
_ROUNDS_OF_FIRST = 3


def measure(num_bytes: int) -> list[Bar]:
    """Return the ratios to a raw READ, best of rounds that alternate: others only slow us down."""
    with beside(_serve, num_bytes) as (endpoint, address, manifest):
        size = manifest.objects[0].num_bytes
        agent = NixlAgent("reads")
        clock = system_clock()
        door = HttpObjectReader(token=lambda: _TOKEN, clock=clock, chance=chance)
        reader = NixlObjectReader(agent, door, clock=clock)
        target = np.ones(size, dtype=np.uint8)  # touched: faults are nobody's speed
        pieces = list(pieces_of(manifest, by_content=True))
        parts = [
            Part(
                wanted=piece.wanted, target=target.data[piece.wanted.offset :][: piece.wanted.size]
            )
            for piece in pieces
        ]
        targets = [(piece, part.target) for piece, part in zip(pieces, parts, strict=True)]
        plan = reader.plan_read(endpoint, parts, timeout_s=60)
        plan.run(Terms(timeout_s=60))  # connections are made on first use
        raw = agent.prepare("serves", [region_of(target.data)], [Region(address, size)])
        kept = spool_of(FetchLimits(), clock)
        ways: dict[str, Callable[[], object]] = {
            "raw": lambda: _read_raw(agent, raw),
            "ours": lambda: plan.run(Terms(timeout_s=60)),
            "proven": lambda: _read_proven(plan, targets),
            "fetched": lambda: _fetch(reader, endpoint, manifest, kept),
        }
        best = best_of_rounds(ways, _ROUNDS)
        # Not in turn with the others: what it leaves for the disk to write would slow them down.
        new = {"first": lambda: _fetch(reader, endpoint, manifest, spool_of(FetchLimits(), clock))}
        best |= best_of_rounds(new, _ROUNDS_OF_FIRST)
        plan.close()
        agent.forget(raw)
        reader.close()
    return [
        at_least("nixl_of_raw_read", best["raw"] / best["ours"], 0.90),
        at_least("nixl_proven_of_raw_read", best["raw"] / best["proven"], 0.75),
        at_least("nixl_fetched_of_raw_read", best["raw"] / best["fetched"], 0.0),
        at_least("nixl_first_fetched_of_raw_read", best["raw"] / best["first"], 0.0),
        at_least("nixl_raw_gb_per_s", size / best["raw"] / 1e9, 0.0),
    ]


def _serve(connection: Any, num_bytes: int) -> None:
    manifest, data = noise(num_bytes, tensors=_TENSORS)
    server = NixlObjectServer(NixlAgent("serves"), HttpObjectServer(token=lambda: _TOKEN))
    server.serve_object(manifest.objects[0].object_id, [data])
    connection.send((server.endpoint, region_of(data).address, manifest))
    connection.recv()
    server.close()


def _read_raw(agent: NixlAgent, read: object) -> None:
    done = agent.post(read)
    while not done:
        done = agent.poll(read)


def _read_proven(plan: ReadPlan, targets: Sequence[Target]) -> None:
    with Prover(1) as prover:
        proofs: list[Future[None]] = []

        def on_part(index: int) -> None:
            piece, data = targets[index]
            proofs.append(prover.submit(piece.settle, data))

        plan.run(Terms(timeout_s=60, on_part=on_part))
        for proof in proofs:
            proof.result()
    assert len(proofs) == len(targets)


def _fetch(reader: NixlObjectReader, endpoint: str, manifest: Manifest, spool: Spool) -> None:
    fetcher = Fetcher(reader, FetchParts(clock=system_clock(), spool=spool))
    found = fetcher.fetch_objects(manifest, [shard_at(endpoint)], bytes_max=2**40)
    assert sum(map(len, found.values())) == manifest.objects[0].num_bytes
