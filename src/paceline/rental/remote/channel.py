"""How a machine's shell is reached: a program here whose input and output are a program's there."""

import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Protocol

from paceline.core.clock import Clock
from paceline.rental.errors import BackendError, InstanceNotFoundError, RemoteCommandError
from paceline.rental.remote.frames import Event, FrameParser, Greeting, Word

HELLO_TIMEOUT_S = 30.0
"""For a shell to say its first word; longer than connecting may take."""
_SLICE_S = 0.5
_READ_BYTES = 1 << 18
_SAID_BYTES_MAX = 16 << 10
_END_TIMEOUT_S = 0.5


class Channel(Protocol):
    """One machine, and the command lines that reach it."""

    name: str
    """What errors call the machine."""
    host: str
    """How rsync names the far side."""
    home: str
    jobs: str
    has_login_shell: bool
    """What is started there goes through a shell, which reads it as a line of its own."""

    def words(self) -> list[str]:
        """Return the command that runs programs there, to which ``host`` and a program belong."""
        ...

    def argv(self, program: Sequence[str]) -> list[str]:
        """Return the command that runs ``program``, whole words, on the machine."""
        ...

    def error_of(self, said: str) -> BackendError:
        """Return what to raise when a connection failed with these words."""
        ...

    def reset(self) -> None:
        """Drop a connection that is shared, because it may be dead. Never raises."""
        ...


class ChannelBrokenError(RemoteCommandError):
    """The connection ended, or went silent, before the machine's shell was done."""

    def __init__(self, said: str, *, was_greeted: bool) -> None:
        super().__init__(said)
        self.said = said
        self.was_greeted = was_greeted


@dataclass(slots=True)
class Line:
    """One open connection to a shell there that runs one of our scripts."""

    process: subprocess.Popen[bytes]
    said_file: IO[bytes]
    clock: Clock
    silence_s: float

    def events(self, *, deadline_s: float | None = None) -> Iterator[Event]:
        """Yield what the script answers until it ends, or until the clock shows ``deadline_s``.

        Raises:
            ChannelBrokenError: nothing came for ``silence_s``, or it ended without a last word.
        """
        parser = FrameParser()
        was_greeted = False
        heard_s = self.clock.monotonic()
        output = self.process.stdout
        if output is None:
            raise ValueError("the process was started without a pipe")
        while deadline_s is None or self.clock.monotonic() < deadline_s:
            if select.select([output], [], [], self._slice_s(deadline_s))[0]:
                content = os.read(output.fileno(), _READ_BYTES)
                if not content:
                    end_process(self.process)
                    raise ChannelBrokenError(self._said(), was_greeted=was_greeted)
                heard_s = self.clock.monotonic()
                for event in parser.feed(content):
                    was_greeted = was_greeted or isinstance(event, Greeting)
                    yield event
            limit_s = self.silence_s if was_greeted else HELLO_TIMEOUT_S
            if self.clock.monotonic() - heard_s > limit_s:
                raise ChannelBrokenError(
                    f"Connection timed out: nothing was heard for {limit_s:g} s",
                    was_greeted=was_greeted,
                )

    def _slice_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return _SLICE_S
        return max(0.0, min(_SLICE_S, deadline_s - self.clock.monotonic()))

    def acknowledge(self) -> None:
        """Tell the script that its last word arrived; a connection that is gone stays unknown."""
        if self.process.stdin is not None:
            try:
                self.process.stdin.write(b"ok\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                return

    def _said(self) -> str:
        self.said_file.seek(0)
        return self.said_file.read(_SAID_BYTES_MAX).decode(errors="replace")


@contextmanager
def open_line(
    channel: Channel, script: str, *, clock: Clock, silence_s: float = HELLO_TIMEOUT_S
) -> Iterator[Line]:
    """Run ``script`` in the machine's shell while entered, and end what is left of it here."""
    # A file, not a pipe: the shared connection that stays behind holds on to it.
    with tempfile.TemporaryFile() as said_file:
        process = _spawn(channel.argv(["sh"]), said_file)
        try:
            _send(process, script.encode("utf-8", "surrogateescape"))
            yield Line(process, said_file, clock, silence_s)
        finally:
            end_process(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close(pipe)


def ask(channel: Channel, script: str, *, clock: Clock, silence_s: float = HELLO_TIMEOUT_S) -> Word:
    """Run a script that answers with one word, and return that.

    Raises:
        InstanceNotFoundError: the machine's directory is not there any more.
        BackendError: the machine cannot be reached; what the script does may have been done.
    """
    try:
        with open_line(channel, script, clock=clock, silence_s=silence_s) as line:
            for event in line.events():
                if isinstance(event, Word):
                    return refuse(channel, event)
    except ChannelBrokenError as exc:
        channel.reset()
        raise channel.error_of(exc.said) from exc
    raise RemoteCommandError(f"{channel.name}: the shell there gave no answer; try again")


def refuse(channel: Channel, word: Word) -> Word:
    """Return ``word``, or raise what it says cannot be done."""
    if word.letter != "F":
        return word
    if word.rest == "no-home":
        raise InstanceNotFoundError(
            f"{channel.name}: its directory {channel.home} does not exist any more; "
            "provision another"
        )
    if word.rest == "no-setsid":
        raise RemoteCommandError(
            f"{channel.name} has no setsid, without which a command cannot be ended for sure; "
            "use an image with util-linux or busybox"
        )
    if word.rest == "cannot-record":
        raise RemoteCommandError(
            f"{channel.name}: {channel.jobs} cannot be written there; is its disk full?"
        )
    raise RemoteCommandError(
        f"{channel.name}: what became of a command is not known: whoever waited for it there was "
        "killed, or the machine was started again"
    )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Let a program of ours end, by force after a while, and reap it."""
    if process.stdin is not None:
        _close(process.stdin)
    try:
        process.wait(timeout=_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _spawn(argv: Sequence[str], said_file: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        # A session of its own, so that Ctrl-C reaches us and not the connection.
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said_file,
            start_new_session=True,
        )
    except FileNotFoundError as exc:
        raise RemoteCommandError(
            f"there is no {argv[0]} on this computer; install it to reach machines"
        ) from exc


def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
    """Write the script; one that cannot be delivered shows as a connection that ended."""
    if process.stdin is not None:
        try:
            process.stdin.write(content)
            process.stdin.flush()
        except BrokenPipeError:
            return


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return  # what was left to write belongs to a connection that is gone
