"""A real ``redis-server`` of a test's own: free port, empty, gone at the end."""

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Final

from paceline.core.waiting import wait_until
from paceline.system import system_clock

START_TIMEOUT_S: Final = 20.0
NEEDS: Final = "needs redis-server (Debian package redis-server)"


def redis_program() -> str | None:
    """Return where ``redis-server`` is, or None."""
    return shutil.which("redis-server")


class RedisServer:
    """One process on loopback; with ``durable`` every write is on disk before its answer."""

    def __init__(self, directory: Path, *, durable: bool = False) -> None:
        self._directory = directory
        self._durable = durable
        self.port = _free_port()
        self.start()

    @property
    def url(self) -> str:
        """Where the store reaches it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Run it, and wait until it answers. Raises RuntimeError, DeadlineExceededError."""
        options = ["--appendonly", "yes", "--appendfsync", "always"] if self._durable else []
        self._process = subprocess.Popen(
            [
                redis_program() or "redis-server",
                *("--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                *("--dir", str(self._directory), *options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(
            lambda: self._process.poll() is not None or _answers(self.port),
            what=f"redis-server on port {self.port}",
            clock=system_clock(),
            timeout_s=START_TIMEOUT_S,
            interval_s=0.02,
        )
        if self._process.poll() is not None:
            raise RuntimeError(f"redis-server did not start on port {self.port}")

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it; idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(5) == b"+PONG"
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
