"""HTTP over loopback, one stream: ours against a bare socket pair with sendfile and recv_into."""

import os
import socket
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from bars import Bar, at_least, best_of_rounds

from paceline.refit.control.tls import issue, new_authority
from paceline.refit.model import ObjectRange
from paceline.refit.transports.http.reader import HttpObjectReader, HttpReaderOptions
from paceline.refit.transports.http.server import (
    HttpObjectServer,
    HttpServerOptions,
    HttpTlsFiles,
)
from paceline.refit.transports.protocol import Part, Terms, read_parts
from paceline.system import chance, system_clock
from transports.processes import beside

_TOKEN = "of-this-benchmark"  # noqa: S105 - not a secret
_WINDOW = 64 * 2**20
_PART = 4 * 2**20
_STEP = 2**20
_ROUNDS = 7


def measure(num_bytes: int) -> list[Bar]:
    """Return ratios to the bare pair, best of rounds that alternate: others only slow us down."""
    with tempfile.TemporaryDirectory() as folder:
        authority = _certificate(Path(folder))
        with beside(_serve, num_bytes, folder) as (plain, secret, port):
            target = np.ones(_WINDOW, dtype=np.uint8)
            reader = HttpObjectReader(
                token=lambda: _TOKEN,
                clock=system_clock(),
                chance=chance,
                options=HttpReaderOptions(trusted=authority),
            )
            ways: dict[str, Callable[[], None]] = {
                "bare": lambda: _read_bare(port, num_bytes, target.data),
                "http": lambda: _read(reader, plain, num_bytes, target.data),
                "https": lambda: _read(reader, secret, num_bytes, target.data),
            }
            best = best_of_rounds(ways, _ROUNDS)
            reader.close()
    return [
        at_least("http_of_bare_sockets", best["bare"] / best["http"], 0.85),
        at_least("https_of_bare_sockets", best["bare"] / best["https"], 0.0),
        at_least("bare_sockets_gb_per_s", num_bytes / best["bare"] / 1e9, 0.0),
    ]


def _certificate(folder: Path) -> bytes:
    now = datetime.now(UTC)
    authority = new_authority("benchmark", now=now)
    issued = issue(authority, ["127.0.0.1"], now=now)
    (folder / "c.pem").write_bytes(issued.certificate)
    (folder / "k.pem").write_bytes(issued.key)
    return authority.certificate


def _serve(connection: Any, num_bytes: int, folder: str) -> None:
    fd = os.memfd_create("weights")
    data = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data.data)
    files = HttpTlsFiles(certificate=Path(folder, "c.pem"), key=Path(folder, "k.pem"))
    servers = [
        HttpObjectServer(token=lambda: _TOKEN, options=HttpServerOptions(tls=tls))
        for tls in (None, files)
    ]
    for server in servers:
        server.serve_object("ab", [data.data])
    listener = socket.create_server(("127.0.0.1", 0))
    connection.send((servers[0].endpoint, servers[1].endpoint, listener.getsockname()[1]))
    for _ in range(_ROUNDS):
        peer, _ = listener.accept()
        at = 0
        while at < num_bytes:
            at += os.sendfile(peer.fileno(), fd, at, num_bytes - at)
        peer.close()
    connection.recv()
    for server in servers:
        server.close()


def _read_bare(port: int, num_bytes: int, target: memoryview) -> None:
    with socket.create_connection(("127.0.0.1", port)) as peer:
        got = 0
        while got < num_bytes:
            at = got % len(target)
            got += peer.recv_into(target[at : at + _STEP])


def _read(reader: HttpObjectReader, endpoint: str, num_bytes: int, target: memoryview) -> None:
    for start in range(0, num_bytes, len(target)):
        size = min(len(target), num_bytes - start)
        parts = [
            Part(
                wanted=ObjectRange(object_id="ab", offset=start + at, size=min(_PART, size - at)),
                target=target[at : at + min(_PART, size - at)],
            )
            for at in range(0, size, _PART)
        ]
        read_parts(reader, endpoint, parts, Terms(timeout_s=60))
