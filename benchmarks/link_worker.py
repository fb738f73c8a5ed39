"""One process of a run on networks: trainer, receiver, control service or bucket, on its machine.

Takes one JSON object as its argument, and commands as lines of JSON; answers in lines of JSON.
"""

import json
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from paceline.refit import compose
from paceline.refit.compose.data import DataPlane, open_reader, open_source
from paceline.refit.compose.supply import open_supply
from paceline.refit.control.auth import Credentials
from paceline.refit.manifest.signature import sign_manifest, signing_key
from paceline.refit.model import TensorBuffer
from paceline.refit.receiver.install import InstallLimits, Supply
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.receiver.spread import Order, Spread
from paceline.system import chance, system_clock
from paceline.testing.fakes.generator import FakeGenerator
from paceline.testing.moto_server import serve_s3

MODEL, RUN = "m", "run"
TOKEN = "data-token-of-the-benchmark"  # noqa: S105 - of nothing


def say(**fields: object) -> None:
    """Answer."""
    print(json.dumps(fields), flush=True)


def commands() -> Any:
    """Yield what is asked for, until the other side closes."""
    for line in sys.stdin:
        yield json.loads(line)


def serve_control(given: dict[str, Any]) -> None:
    """Serve the control plane, in plain text: the networks here are nobody else's."""
    service = compose.start_control_server(
        token_file=Path(given["tokens"]), listen=f"{given['host']}:0", allow_plaintext=True
    )
    say(address=service.address)
    for _ in commands():
        break
    service.stop()


def serve_bucket(given: dict[str, Any]) -> None:
    """Serve S3."""
    with serve_s3(host=given["host"]) as s3:
        say(endpoint=s3.endpoint, bucket=s3.url("run"))
        for _ in commands():
            break


def plane_of(given: dict[str, Any]) -> DataPlane:
    """Return what this process serves and reads through."""
    return DataPlane(
        host=given["host"],
        transports=tuple(given.get("transports", ("http",))),
        bucket=given.get("bucket", ""),
        allow_http_bucket=True,
    )


def tunnel(given: dict[str, Any]) -> None:
    """Pass connections on to the control service, as an ssh tunnel does."""
    host, _, port = given["control"].rpartition(":")
    listener = socket.create_server((given["host"], 0))
    say(address=f"{given['host']}:{listener.getsockname()[1]}")
    while True:
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(source, target), daemon=True).start()


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy one direction of a connection until it ends."""
    while data := source.recv(2**16):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def connect(given: dict[str, Any], role: str) -> Any:
    """Return this process's control plane."""
    token = json.loads(Path(given["tokens"]).read_text("utf8"))[role]
    return compose.connect_control(given["control"], token=token, allow_plaintext=True)


def train(given: dict[str, Any]) -> None:
    """Publish: full, then deltas in which so many elements take one step on the bf16 grid."""
    import torch

    from paceline.refit.publisher import Publisher, PublisherOptions
    from paceline.refit.trainers.torch_module import TorchModuleTrainer

    generator = np.random.default_rng(0)
    words = [
        (generator.standard_normal(given["elements"], dtype=np.float32) * 0.02).view(np.uint32)
        for _ in range(given["tensors"])
    ]
    weights = {
        f"layer.{at:02d}": torch.from_numpy((each >> 16).astype(np.uint16).view(np.int16)).view(
            torch.bfloat16
        )
        for at, each in enumerate(words)
    }
    del words
    clock = system_clock()
    trainer = TorchModuleTrainer(clock=clock, arenas=3)
    trainer.bind_tensors(weights)
    key = signing_key(given["signing_key"])
    server = open_source(plane_of(given), token=lambda: TOKEN, name="trainer")
    publisher = Publisher(
        control=connect(given, "trainer"),
        trainer=trainer,
        source=server,
        clock=clock,
        options=PublisherOptions(
            model_name=MODEL,
            run_id=RUN,
            worker_id="trainer",
            anchor_every=1000,
            sign=lambda data, statement: sign_manifest(data, statement, key=key),
        ),
    )
    publisher.start()
    say(ready=True)
    for command in commands():
        if command["do"] == "raw":
            send_raw(given["host"], command["bytes"])
            continue
        if command["do"] == "step":
            for tensor in weights.values():
                raw = tensor.view(torch.int16).numpy()
                count = int(raw.size * command["changed"])
                at = generator.integers(0, raw.size, count)
                raw[at] += generator.choice(np.array([-1, 1], dtype=np.int16), count)
        asked_at = time.time()
        published = publisher.publish(step=0).result()
        say(
            asked_at=asked_at,
            payload_bytes=published.payload_bytes,
            full_bytes=published.full_bytes,
            publish_s=published.publish_ms / 1000,
            at=time.time(),
        )
    server.close()


def send_raw(host: str, size: int) -> None:
    """Send bytes through a bare socket: what the link gives to anybody."""
    with socket.create_server((host, 0)) as listener:
        say(port=listener.getsockname()[1])
        peer, _ = listener.accept()
        block = memoryview(bytes(2**20))
        with peer:
            for _ in range(size // len(block)):
                peer.sendall(block)


def receive_raw(host: str, port: int) -> tuple[int, float]:
    """Read a bare socket to its end."""
    buffer = memoryview(bytearray(2**20))
    total = 0
    started = time.perf_counter()
    with socket.create_connection((host, port)) as peer:
        while count := peer.recv_into(buffer):
            total += count
    return total, time.perf_counter() - started


class TimedSpread(Spread):
    """Says how long each payload took, and how large it was."""

    def fetch(self, order: Order) -> dict[str, memoryview]:
        """Fetch, with a watch."""
        started = time.perf_counter()
        found = super().fetch(order)
        seconds = time.perf_counter() - started
        size = sum(item.num_bytes for item in order.manifest.objects)
        uid = order.sources[0].version_id
        say(fetched=uid, bytes=size, fetch_s=seconds, at=time.time())
        return found


def receive(given: dict[str, Any]) -> None:
    """Follow the run and serve on what was fetched; say what is installed."""
    engine = FakeGenerator(
        [
            TensorBuffer(
                name=f"layer.{at:02d}",
                dtype="BF16",
                shape=(given["elements"],),
                data=memoryview(bytearray(2 * given["elements"])),
            )
            for at in range(given["tensors"])
        ]
    )
    say(ready=True)
    parts = ExitStack()
    for command in commands():
        if command["do"] == "raw":
            size, seconds = receive_raw(command["host"], command["port"])
            say(bytes=size, raw_s=seconds)
        elif command["do"] == "follow":
            follow(given, engine, parts)
        elif command["do"] == "stop":
            break
    parts.close()


def follow(given: dict[str, Any], engine: FakeGenerator, parts: Any) -> None:
    """Start a receiver in a thread, and one that tells what it has installed."""
    clock = system_clock()
    control = connect(given, "generator")
    name = given["name"]
    credentials = Credentials(
        role="generator",
        control_token="-",  # noqa: S106 - not used
        data_token=TOKEN,
        verify_key=given["verify_key"],
    )
    plane = plane_of(given)
    supply = open_supply(credentials, plane, board=control, worker_id=name, parts=parts)
    assert supply.spread is not None
    spread = TimedSpread(supply.spread.swarm)
    receiver = Receiver(
        ReceiverConfig(
            worker_id=name,
            model_name=MODEL,
            run_id=RUN,
            endpoint="",
            poll_interval_s=0.02,
            limits=InstallLimits(whole_check_every=given.get("whole_check_every", 1)),
        ),
        control=control,
        engine=engine,
        reader=open_reader(plane, token=lambda: TOKEN, name=name),
        clock=clock,
        chance=chance,
        supply=Supply(verify_key=supply.verify_key, spread=spread),
    )
    receiver.register()
    receiver.start()
    parts.callback(receiver.stop, timeout_s=30)

    def tell() -> None:
        seen = None
        while True:
            installed = engine.installed()
            if installed is not None and installed != seen:
                seen = installed
                say(
                    installed=installed.version_id,
                    root=installed.root_digest,
                    at=time.time(),
                )
            time.sleep(0.005)

    threading.Thread(target=tell, daemon=True).start()
    say(following=True)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    roles = {
        "bucket": serve_bucket,
        "control": serve_control,
        "receiver": receive,
        "trainer": train,
        "tunnel": tunnel,
    }
    roles[arguments["role"]](arguments)
