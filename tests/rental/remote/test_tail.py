"""A file is followed byte for byte: over rotations, cuts and connections that break."""

import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.core.waiting import wait_until
from paceline.rental.errors import BackendError, SshUnreachableError
from paceline.rental.remote.directory import DirectoryChannel
from paceline.rental.remote.protocol import DirectoryTarget
from paceline.rental.remote.shell import ShellParts, ShellRemote
from paceline.rental.remote.tail import Tail, Tailed
from paceline.system import system_clock


class CutChannel(DirectoryChannel):
    """A directory whose shells can be killed, as connections break."""

    def __init__(self, directory: Path, shell: str) -> None:
        super().__init__(DirectoryTarget(name="box", directory=directory, environ={}))
        self.shell = shell
        self.bytes_each: int | None = None
        """Every connection ends after so many bytes."""

    def argv(self, program: Sequence[str]) -> list[str]:
        if self.bytes_each is None:
            return [self.shell]
        return ["bash", "-c", f"exec dd bs=1 count={self.bytes_each} status=none < <({self.shell})"]

    def error_of(self, said: str) -> BackendError:
        return SshUnreachableError("box: connection closed")


class Reader:
    """Follows ``log`` in a thread and keeps what came."""

    def __init__(self, directory: Path, shell: str = "sh") -> None:
        self.log = directory / "log"
        self.channel = CutChannel(directory, shell)
        self.content = b""
        self.tail = Tail(
            self.channel,
            Tailed(home=str(directory), path="log", until="ended"),
            clock=system_clock(),
            sink=self._take,
        )
        self.thread = threading.Thread(target=self.tail.run, daemon=True)

    def _take(self, content: bytes) -> None:
        self.content += content

    def await_content(self, content: bytes) -> None:
        wait_until(
            lambda: len(self.content) >= len(content),
            what=f"{len(content)} bytes",
            clock=system_clock(),
            timeout_s=20,
            interval_s=0.01,
        )
        assert self.content == content

    def end(self) -> None:
        (self.log.parent / "ended").touch()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture(params=["dash", "bash"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reader]:
    one = Reader(tmp_path, request.param)
    yield one
    (tmp_path / "ended").touch()


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def test_what_is_appended_comes_and_the_end_is_seen(reader: Reader) -> None:
    """A file may come late and grow; with its end all of it has been passed on."""
    reader.thread.start()
    append(reader.log, b"one\n")
    reader.await_content(b"one\n")
    append(reader.log, b"no newline")
    reader.end()
    assert reader.content == b"one\nno newline"


def test_a_rotation_loses_and_doubles_nothing(reader: Reader) -> None:
    """What was written to the old file before and after it was renamed comes before the new."""
    append(reader.log, b"a" * 1000)
    reader.thread.start()
    reader.await_content(b"a" * 1000)
    with reader.log.open("ab") as held:
        reader.log.rename(reader.log.with_name("log.1"))
        held.write(b"b" * 10)
    append(reader.log, b"c" * 10)
    reader.await_content(b"a" * 1000 + b"b" * 10 + b"c" * 10)
    reader.log.with_name("log.1").rename(reader.log.with_name("log.2"))
    reader.log.rename(reader.log.with_name("log.1"))
    append(reader.log, b"d")
    reader.await_content(b"a" * 1000 + b"b" * 10 + b"c" * 10 + b"d")
    reader.end()
    assert reader.tail.num_gaps == 0


def test_older_files_come_first(reader: Reader) -> None:
    """Whoever begins to read gets what there is, oldest first."""
    for name, content in (("log.2", b"1"), ("log.1", b"2"), ("log", b"3")):
        append(reader.log.with_name(name), content)
    reader.thread.start()
    reader.end()
    assert reader.content == b"123"


@pytest.mark.parametrize("num_bytes", [130, 301])
def test_connections_that_break_anywhere_lose_and_double_nothing(
    tmp_path: Path, num_bytes: int
) -> None:
    """Every connection is cut after some bytes, in the middle of whatever they are."""
    reader = Reader(tmp_path)
    content = bytes(range(256))
    append(reader.log.with_name("log.1"), content)
    append(reader.log, content[::-1])
    reader.channel.bytes_each = num_bytes
    reader.thread.start()
    wait_until(
        lambda: len(reader.content) >= 2 * len(content),
        what="all",
        clock=system_clock(),
        timeout_s=60,
        interval_s=0.02,
    )
    reader.channel.bytes_each = None
    reader.end()
    assert reader.content == content + content[::-1]


def test_a_file_that_was_cut_off_is_told(reader: Reader) -> None:
    """After a cut the file is read from its start, and the gap is counted."""
    append(reader.log, b"x" * 100)
    reader.thread.start()
    reader.await_content(b"x" * 100)
    subprocess.run(["/usr/bin/truncate", "-s", "0", str(reader.log)], check=True)
    append(reader.log, b"new")
    reader.await_content(b"x" * 100 + b"new")
    assert reader.tail.num_gaps == 1


class SleepyClock:
    """The real clock of a computer that may sleep for an hour."""

    def __init__(self) -> None:
        self.asleep_s = 0.0
        self._clock = system_clock()

    def time(self) -> float:
        return self._clock.time() + self.asleep_s

    def monotonic(self) -> float:
        return self._clock.monotonic() + self.asleep_s

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(min(seconds, 0.05))


def test_an_hour_asleep_costs_no_command_its_connection(tmp_path: Path) -> None:
    """The first connection after waking is broken, the clock an hour on: the job is followed on."""
    clock = SleepyClock()

    class Waking(CutChannel):
        def error_of(self, said: str) -> BackendError:
            if self.bytes_each is not None:
                self.bytes_each = None
                clock.asleep_s = 3600.0
            return super().error_of(said)

    channel = Waking(tmp_path, "sh")
    channel.bytes_each = len("paceline-shell 1\nS\nO 6\nfir")
    taken: list[bytes] = []
    parts = ShellParts(clock=clock, rsync=None, sink=lambda stream, content: taken.append(content))
    remote = ShellRemote(channel, machine_id="m", parts=parts)
    ended = remote.run("echo first; echo last; exit 3", env={}, stream=True, timeout_s=None)
    assert (ended.code, clock.asleep_s) == (3, 3600.0)
    assert b"".join(taken) == b"first\nlast\n"
