"""The control service under load: sustained rate, and latency with a thousand workers alive.

The service runs as users run it, as processes of its own; the load comes from another process
over loopback, so both share the machine's cores. Before each bar the same load generator talks
to a bare gRPC server that answers without doing anything: what the transport alone costs here.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from bars import Bar, at_least, at_most, run

from paceline.refit.wire import paceline_refit_v1_pb2 as own
from paceline.refit.wire import refit_pb2 as public
from paceline.testing.redis_server import RedisServer, redis_program

SECONDS = 6.0
WARM_UP_S = 1.5
IN_FLIGHT = 48
RATE = 500
WORKERS = 1000
HEARTBEATS, LOOKS, REFITS = 0.55, 0.35, 0.08
"""Shares of what is begun; the rest publishes a version."""
MODEL = "bench"
PUBLIC = "/model_express.refit.RefitService/"
OWN = "/paceline.refit.v1.ControlService/"

Request = tuple[str, bytes]


class Mix:
    """What a busy run's processes send: mostly heartbeats and looks."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a load, no secret
        self._seed = seed
        self._numbers = itertools.count()
        self.ready: list[str] = []

    def heartbeat(self) -> list[Request]:
        """Refresh one of the registrations."""
        return [register(self._random.randrange(WORKERS))]

    def look(self) -> list[Request]:
        """Read a version, its description, or its shards."""
        uid = self._random.choice(self.ready)
        name, message = self._random.choice(
            (
                (PUBLIC + "GetWeightVersion", public.GetWeightVersionRequest(uid=uid)),
                (OWN + "GetVersion", own.GetVersionRequest(uid=uid)),
                (
                    PUBLIC + "ListWeightVersionShards",
                    public.ListWeightVersionShardsRequest(version_id=uid),
                ),
            )
        )
        return [(name, message.SerializeToString())]

    def refit(self) -> list[Request]:
        """Take a lease, renew it and report what is installed."""
        uid, worker = self._random.choice(self.ready), f"g-{self._random.randrange(WORKERS)}"
        lease = public.RegisterVersionLeaseRequest(version_id=uid, worker_id=worker, ttl_seconds=60)
        report = own.InstalledReport(
            worker_id=worker, model_name=MODEL, version_id=uid, state="ready", root_digest="d"
        )
        take = (PUBLIC + "RegisterVersionLease", lease.SerializeToString())
        said = (
            OWN + "ReportInstalled",
            own.ReportInstalledRequest(report=report).SerializeToString(),
        )
        return [take, take, said]

    def publish(self) -> list[Request]:
        """Create a version of one slot and make it READY."""
        uid = f"v-{self._seed}-{next(self._numbers)}"
        create = public.CreateWeightVersionRequest(
            model_name=MODEL,
            idempotency_key=uid,
            payload_format="WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR",
            expected_source_slots=["rank-0"],
            uid=uid,
        )
        shard = public.WeightVersionShard(
            version_id=uid,
            source_slot_id="rank-0",
            worker_id="t-0",
            tensor_count=1,
            total_bytes=1,
            manifest_digest="d" * 64,
            manifest_endpoint="127.0.0.1:1",
        )
        return [
            (PUBLIC + "CreateWeightVersion", create.SerializeToString()),
            (
                PUBLIC + "CreateWeightVersionShard",
                public.CreateWeightVersionShardRequest(shard=shard).SerializeToString(),
            ),
        ]

    def sent(self, requests: Sequence[Request]) -> None:
        """Note that these were answered: a published version may now be read."""
        path, raw = requests[-1]
        if path.endswith("/CreateWeightVersionShard"):
            message = public.CreateWeightVersionShardRequest.FromString(raw)
            self.ready.append(message.shard.version_id)
            del self.ready[:-20]

    def next(self) -> list[Request]:
        """Return the next requests, to be sent one after the other."""
        chance = self._random.random()
        if chance < HEARTBEATS:
            return self.heartbeat()
        if chance < HEARTBEATS + LOOKS:
            return self.look()
        return self.refit() if chance < HEARTBEATS + LOOKS + REFITS else self.publish()


def register(number: int | None) -> Request:
    """Return the heartbeat of a generator, or of the one trainer."""
    worker = public.WorkerRegistration(
        worker_id="t-0" if number is None else f"g-{number}",
        role="WORKER_ROLE_TRAINER" if number is None else "WORKER_ROLE_GENERATOR",
        model_name=MODEL,
    )
    message = public.RegisterWorkerRequest(worker=worker, ttl_seconds=600)
    return PUBLIC + "RegisterWorker", message.SerializeToString()


@dataclass
class Load:
    """One process's view of the services, and how long each call took."""

    addresses: Sequence[str]
    token: str
    latencies_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._turns = itertools.count()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Hold a channel to each address."""
        self._channels = [grpc.aio.insecure_channel(address) for address in self.addresses]
        self._calls: list[dict[str, Callable[..., object]]] = [{} for _ in self._channels]
        yield
        for channel in self._channels:
            await channel.close()

    async def send(self, request: Request) -> None:
        """Make one call on the next channel; any refusal ends the benchmark."""
        path, raw = request
        turn = next(self._turns) % len(self._channels)
        call = self._calls[turn].get(path)
        if call is None:
            call = self._calls[turn][path] = self._channels[turn].unary_unary(path)
        start = time.perf_counter()
        await call(raw, metadata=(("authorization", f"Bearer {self.token}"),), timeout=30)
        self.latencies_ms.append((time.perf_counter() - start) * 1000)

    async def prepare(self, mix: Mix) -> None:
        """Register everybody and publish a first version."""
        await self.send(register(None))
        for first in range(0, WORKERS, 50):
            await asyncio.gather(*(self.send(register(n)) for n in range(first, first + 50)))
        await self._in_turn(mix, mix.publish())
        self.latencies_ms.clear()

    async def sustain(self, mix: Mix, *, seconds: float) -> float:
        """Keep IN_FLIGHT clients busy; return calls per second."""
        end = time.perf_counter() + seconds
        before = len(self.latencies_ms)

        async def client() -> None:
            while time.perf_counter() < end:
                await self._in_turn(mix, mix.next())

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
        return (len(self.latencies_ms) - before) / (time.perf_counter() - start)

    async def pace(self, mix: Mix, *, seconds: float) -> None:
        """Send RATE calls a second whether or not earlier ones are answered."""
        start, sent = time.perf_counter(), 0
        async with asyncio.TaskGroup() as group:
            while (now := time.perf_counter()) - start < seconds:
                while sent < (now - start) * RATE:
                    requests = mix.next()
                    sent += len(requests)
                    group.create_task(self._in_turn(mix, requests))
                await asyncio.sleep(0.002)

    async def _in_turn(self, mix: Mix, requests: Sequence[Request]) -> None:
        for request in requests:
            await self.send(request)
        mix.sent(requests)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the others do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextlib.contextmanager
def services(directory: Path, store: str, *, replicas: int) -> Iterator[tuple[list[str], str]]:
    """Run the control service; yield the addresses of its replicas and the operator's token."""
    tokens = directory / "tokens.json"
    command = [sys.executable, "-m", "paceline", "control", "serve", "--json"]
    command += ["--listen", "127.0.0.1:0", "--store", store]
    command += ["--token-file", str(tokens), "--create-tokens"]
    running: list[subprocess.Popen[str]] = []
    try:
        addresses = []
        for _ in range(replicas):
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            running.append(process)
            addresses.append(json.loads(first_line(process))["address"])
        yield addresses, json.loads(tokens.read_text())["operator"]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(timeout=30)


def first_line(process: "subprocess.Popen[str]") -> str:
    """Return what a process says first."""
    return process.stdout.readline() if process.stdout else ""


async def load(addresses: Sequence[str], token: str) -> tuple[float, float]:
    """Return the sustained rate, and the 99th percentile at RATE, in milliseconds."""
    made = Load(addresses=addresses, token=token)
    mix = Mix(os.getpid())
    async with made.connected():
        await made.prepare(mix)
        await made.sustain(mix, seconds=WARM_UP_S)
        rate = await made.sustain(mix, seconds=SECONDS)
        made.latencies_ms.clear()
        await made.pace(mix, seconds=SECONDS)
        return rate, percentile(made.latencies_ms, 0.99)


BARE = """
import asyncio, grpc

async def answer(raw, context):
    return b""

class Any(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(answer)

async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Any(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


def bare() -> float:
    """Return the rate of a server that answers every call with nothing, in this same setting."""
    process = subprocess.Popen([sys.executable, "-c", BARE], stdout=subprocess.PIPE, text=True)
    try:
        return asyncio.run(load_bare(f"127.0.0.1:{int(first_line(process))}"))
    finally:
        process.kill()
        process.wait()


async def load_bare(address: str) -> float:
    """Return the rate at one address, of calls whose replies mean nothing."""
    made = Load(addresses=[address], token="")
    mix = Mix(0)
    mix.ready.append("v")
    async with made.connected():
        await made.sustain(mix, seconds=WARM_UP_S)
        return await made.sustain(mix, seconds=SECONDS / 2)


def measure() -> Sequence[Bar]:
    """Measure sqlite with one service, and Redis with two replicas if it is installed."""
    floor = bare()
    bars = [at_least("bare gRPC server, calls/s (what the transport allows here)", floor, 0)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with services(directory, f"sqlite:{directory / 'control.db'}", replicas=1) as (at, token):
            bars += judge("sqlite", asyncio.run(load(at, token)))
        if redis_program() is not None:
            redis = RedisServer(directory, durable=True)
            try:
                with services(directory, redis.url, replicas=2) as (at, token):
                    bars += judge("redis, two replicas", asyncio.run(load(at, token)))
            finally:
                redis.stop()
    return bars


def judge(store: str, figures: tuple[float, float]) -> Sequence[Bar]:
    """Return the two bars of one store."""
    rate, p99_ms = figures
    return [
        at_least(f"{store}: mixed calls/s sustained", rate, 2000),
        at_most(f"{store}: p99 at {RATE} calls/s with {WORKERS} workers, ms", p99_ms, 20),
    ]


if __name__ == "__main__":
    run(measure, __doc__)
