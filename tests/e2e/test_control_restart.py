"""The control service is killed while clients write: nothing acknowledged is lost or invented."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from paceline.refit import compose
from paceline.refit.control.protocol import ControlClient
from paceline.refit.model import VersionState
from paceline.system import environ, system_clock
from paceline.testing.contracts.control import EVENT, FULL, MODEL, TRAINER, shard_of
from paceline.testing.redis_server import NEEDS, RedisServer, redis_program

pytestmark = pytest.mark.e2e

KILLS: Final = 3
WRITERS: Final = 3
WRITES_BETWEEN: Final = 6
RECOVERY_S: Final = 5.0
START_TIMEOUT_S: Final = 30.0
SRC = str(Path(__file__).parents[2] / "src")


class Service:
    """One replica as a process, always on the same port."""

    def __init__(self, tmp_path: Path, store: str) -> None:
        self.tokens = tmp_path / "tokens.json"
        self._store = store
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Run it, and wait until it answers."""
        command = [sys.executable, "-m", "paceline", "control", "serve", "--json"]
        command += ["--listen", self.address, "--store", self._store]
        command += ["--token-file", str(self.tokens), "--create-tokens"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=dict(environ()) | {"PYTHONPATH": SRC},
        )
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]

    def kill(self) -> None:
        """End it as the kernel would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def client(self) -> ControlClient:
        """Return an operator's client."""
        return compose.connect_control(self.address, token_file=self.tokens)


class Writer(threading.Thread):
    """Publishes versions one after the other; remembers what was acknowledged."""

    def __init__(self, service: Service, number: int) -> None:
        super().__init__(daemon=True)
        self._client = service.client()
        self._number = number
        self.ending = threading.Event()
        self.progress = threading.Semaphore(0)
        self.ready: list[str] = []
        self.staging: list[str] = []
        self.events: list[int] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Write until told to end; every error ends the thread, and the test sees it."""
        try:
            count = 0
            while not self.ending.is_set():
                self._publish(count)
                count += 1
                self.progress.release()
        except BaseException as exc:  # noqa: BLE001 - shown by the test
            self.error = exc
            self.progress.release(1000)
        finally:
            self._client.close()

    def _publish(self, count: int) -> None:
        uid = f"v-{self._number}-{count}"
        request = replace(FULL, uid=uid, idempotency_key=uid)
        assert self._client.create_version(request).uid == uid
        self._client.create_shard(shard_of(uid, "rank-0"))
        if count % 3 == 2:
            self.staging.append(uid)
            return
        state = self._client.create_shard(shard_of(uid, "rank-1")).state
        assert state is VersionState.READY
        self.ready.append(uid)
        at = self._number * 10_000 + count
        self._client.record_event(replace(EVENT, at_unix_ms=at))
        self.events.append(at)


@pytest.fixture(params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:{tmp_path / 'control.db'}"
        return
    if redis_program() is None:
        pytest.skip(NEEDS)
    server = RedisServer(tmp_path, durable=True)
    yield server.url
    server.stop()


def test_no_acknowledged_write_is_lost_and_clients_recover(store: str, tmp_path: Path) -> None:
    """Killed three times under load: all that was acknowledged is there, nothing is invented."""
    clock = system_clock()
    service = Service(tmp_path, store)
    plane = service.client()
    plane.register_worker(TRAINER, ttl_seconds=600)
    writers = [Writer(service, n) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    recoveries = []
    for _ in range(KILLS):
        for writer in writers:
            for _ in range(WRITES_BETWEEN):
                assert writer.progress.acquire(timeout=START_TIMEOUT_S)
        service.kill()
        service.start()
        back_at = clock.monotonic()
        plane.list_versions(MODEL)
        recoveries.append(clock.monotonic() - back_at)
    for writer in writers:
        writer.ending.set()
    for writer in writers:
        writer.join(timeout=START_TIMEOUT_S)
        assert writer.error is None, writer.error
    found = {version.uid: version.state for version in plane.list_versions(MODEL)}
    events = [event.at_unix_ms for event in plane.list_events(limit=10_000)]
    plane.close()
    service.kill()
    assert {uid for uid, state in found.items() if state is VersionState.READY} == {
        uid for writer in writers for uid in writer.ready
    }
    assert {uid for uid, state in found.items() if state is VersionState.STAGING} == {
        uid for writer in writers for uid in writer.staging
    }
    assert sorted(events) == sorted(at for writer in writers for at in writer.events)
    # Not a measurement: the patience that clients are promised, with room for a busy machine.
    assert max(recoveries) < 2 * RECOVERY_S


def test_redis_may_be_killed_too(tmp_path: Path) -> None:
    """With appendfsync always, what was acknowledged survives Redis itself."""
    if redis_program() is None:
        pytest.skip(NEEDS)
    server = RedisServer(tmp_path, durable=True)
    service = Service(tmp_path, server.url)
    plane = service.client()
    plane.register_worker(TRAINER, ttl_seconds=600)
    writer = Writer(service, 0)
    writer.start()
    for _ in range(WRITES_BETWEEN):
        assert writer.progress.acquire(timeout=START_TIMEOUT_S)
    server.kill()
    server.start()
    for _ in range(WRITES_BETWEEN):
        assert writer.progress.acquire(timeout=START_TIMEOUT_S)
    writer.ending.set()
    writer.join(timeout=START_TIMEOUT_S)
    assert writer.error is None, writer.error
    found = {v.uid for v in plane.list_versions(MODEL) if v.state is VersionState.READY}
    assert found == set(writer.ready)
    plane.close()
    service.kill()
    server.stop()
