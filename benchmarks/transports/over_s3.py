"""One delta through S3 on loopback: publish, fetch, prove and apply; ours against the peer's.

The weights are copies of one simulated 64 MiB tensor (see snapshots.py): neither side looks
beyond a tensor. Both go from an old state to a new one and back, in turn with each other. The first
way is not timed, so that nothing is compiled, copied or connected for the first time; of the others
the medians count. The peer's engine load is left out; ours writes into live memory and proves it.
"""

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import torch
from bars import Bar, at_least, note
from snapshots import ELEMENTS, Snapshots

from paceline.refit.apply import Checks, prove_live, stage_install, write_install
from paceline.refit.kernels.registry import process_tools
from paceline.refit.model import (
    Shard,
    TensorEntry,
    TrainerStagingMode,
    WeightPayloadFormat,
)
from paceline.refit.receiver.fetch import Fetcher, FetchParts
from paceline.refit.staging.torch_bytes import byte_view
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.objectstore.bucket import Bucket, BucketOptions
from paceline.refit.transports.objectstore.reader import BucketObjectReader
from paceline.refit.transports.objectstore.server import BucketObjectServer
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.fakes.control import TOKENS, LoopbackControl
from paceline.testing.moto_server import ACCESS_KEY, S3, SECRET_KEY, serve_s3
from transports.processes import asked, beside

_RATE = 1e-6
_STEP = 100
_ROUNDS = 5
_PEER = Path(__file__).parents[2] / ".venv-peer" / "bin" / "python"


def measure(num_bytes: int) -> list[Bar]:
    """Return how much longer and larger the peer's way is."""
    count = max(1, num_bytes // (2 * ELEMENTS))
    snapshots = Snapshots({_RATE: (_STEP, _STEP + 1)})
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, beside(_serve) as s3:
        paths = [f"{folder}/{step}.npy" for step in (_STEP, _STEP + 1)]
        for step, path in zip((_STEP, _STEP + 1), paths, strict=True):
            np.save(path, snapshots(_RATE, step))
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        with asked(_ours, s3, paths, count) as ours, _theirs(s3, paths, count, folder) as theirs:
            for step in range(1, 2 + _ROUNDS):
                for name, found in (("ours", ours(step)), ("theirs", theirs())):
                    note(f"s3: delta {step}, {name}: {found}")
                    seconds[name].append(found["seconds"])
        sizes = _sizes(s3)
    ours_s, theirs_s = (statistics.median(found[1:]) for found in seconds.values())
    return [
        at_least("s3_delta_times_faster_than_peer", theirs_s / ours_s, 3.0),
        at_least("s3_delta_times_smaller_than_peer", sizes["theirs"] / sizes["ours"], 2.0),
    ]


def _serve(connection: Any) -> None:
    with serve_s3() as s3:
        connection.send(s3)
        connection.recv()


def _sizes(s3: S3) -> dict[str, int]:
    """Return the bytes that each side stored for the second delta, everything included."""
    client = boto3.client(
        "s3",
        endpoint_url=s3.endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )

    def stored(prefix: str) -> int:
        found = client.list_objects_v2(Bucket=s3.name, Prefix=prefix).get("Contents", [])
        return sum(item["Size"] for item in found)

    return {"ours": stored("ours-2/"), "theirs": stored("theirs/delta-2/")}


@contextmanager
def _theirs(
    s3: S3, paths: list[str], count: int, folder: str
) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield what moves the peer's next delta and returns its seconds."""
    service = LoopbackControl(MemoryStore(clock=system_clock()))
    token = Path(folder, "token")
    token.write_text(next(iter(TOKENS.values())))
    env = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "GLOO_SOCKET_IFNAME": "lo",
        "MODEL_EXPRESS_URL": service.address,
        "MX_AUTH_TOKEN_PATH": str(token),
        "S3_ENDPOINT": s3.endpoint,
        "TMPDIR": folder,
    }
    script = Path(__file__).with_name("peer_s3.py")
    words = Path(folder, "peer-stderr")
    with contextlib.ExitStack() as parts:
        parts.callback(service.stop)
        process = subprocess.Popen(
            [str(_PEER), str(script), *paths, str(count)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=parts.enter_context(words.open("w")),
            text=True,
        )
        parts.callback(process.kill)

        def hear() -> dict[str, float]:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    found: dict[str, float] = json.loads(line)
                    return found
            raise AssertionError(words.read_text()[-3000:])

        def move() -> dict[str, float]:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return hear()

        hear()
        yield move


def _ours(connection: Any, s3: S3, paths: list[str], count: int) -> None:
    words = [torch.from_numpy(np.load(path).view(np.int16)).view(torch.bfloat16) for path in paths]
    weights = {f"w{index:02d}": words[0].clone() for index in range(count)}
    live = {name: byte_view(name, tensor.clone()) for name, tensor in weights.items()}
    trainer = TorchModuleTrainer(clock=system_clock())
    trainer.bind_tensors(weights)
    first = trainer.stage_shard(
        tensors=None,
        staging_mode=TrainerStagingMode.COPY_TO_HOST,
        payload_format=WeightPayloadFormat.FULL_TENSOR,
    )
    trainer.commit_staged(first)
    trainer.release_staged(first)  # as in a run: its arena is taken again
    owner: Any = first.buffer_owner
    base = {entry.name: entry for entry in owner.manifest.tensors}
    connection.send("ready")
    while step := connection.recv():
        for tensor in weights.values():
            tensor.copy_(words[step % 2])
        bucket = Bucket(
            s3.url(f"ours-{step}"), options=BucketOptions(config=s3.config, allow_http=True)
        )
        started = time.perf_counter()
        address, digest = _publish(trainer, bucket)
        published = time.perf_counter()
        base = _install(bucket, address, digest, live, base)
        done = time.perf_counter()
        connection.send(
            {
                "publish_s": published - started,
                "apply_s": done - published,
                "seconds": done - started,
            }
        )


def _publish(trainer: TorchModuleTrainer, bucket: Bucket) -> tuple[str, str]:
    staged = trainer.stage_shard(
        tensors=None,
        staging_mode=TrainerStagingMode.COPY_TO_HOST,
        payload_format=WeightPayloadFormat.XOR_DELTA,
    )
    server = BucketObjectServer(bucket)
    owner: Any = staged.buffer_owner
    for item in owner.objects:
        server.serve_object(item.object_id, item.parts)
    address = server.publish_manifest(version_id="v", source_slot_id="s", manifest=staged.manifest)
    trainer.commit_staged(staged)
    return address, staged.manifest.digest


def _install(
    bucket: Bucket,
    address: str,
    digest: str,
    live: dict[str, Any],
    base: dict[str, TensorEntry],
) -> dict[str, TensorEntry]:
    reader, tools = BucketObjectReader(bucket, clock=system_clock()), process_tools()
    source = Shard(
        version_id="v",
        source_slot_id="s",
        worker_id="t",
        tensor_count=1,
        total_bytes=1,
        manifest_digest=digest,
        manifest_endpoint=address,
    )
    fetcher = Fetcher(reader, FetchParts(clock=system_clock()))
    manifest = fetcher.fetch_manifest([source])
    objects = fetcher.fetch_objects(manifest, [source], bytes_max=2**40)
    checks = Checks(whole=True, payload=False, tools=tools)  # as a receiver does
    staged = stage_install(manifest, objects, live=live, aliases={}, base=base, checks=checks)
    write_install(staged, tools=tools)
    assert prove_live(live, staged.entries, tools=tools) == manifest.root_digest
    reader.close()
    return {entry.name: entry for entry in staged.entries}
