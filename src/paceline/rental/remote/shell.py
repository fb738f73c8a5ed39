"""Shell and files of a machine behind a channel: jobs, copies, and what is alive there."""

import os
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.clock import Clock
from paceline.rental.errors import RemoteCommandError
from paceline.rental.model import ExitCode
from paceline.rental.remote.channel import Channel, ask
from paceline.rental.remote.job import Follower, Patience, Sink, pass_through
from paceline.rental.remote.protocol import Captured
from paceline.rental.remote.rsync import NoRsyncError, RsyncTransfer, Watch
from paceline.rental.remote.rules import Copy
from paceline.rental.remote.script import (
    MACHINE_MARK,
    Job,
    render_count,
    render_end,
    render_look,
)
from paceline.rental.remote.tarball import TarTransfer

_CAPTURED_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellParts:
    """What a ShellRemote works with on this side."""

    clock: Clock
    rsync: str | None
    """This host's rsync; None copies as tar."""
    patience: Patience = field(default_factory=Patience)
    """How long a lost connection is waited for."""
    sink: Sink = pass_through
    """Who takes the output of commands that stream."""
    watch: Watch | None = None
    """Who is told how far a copy is, where rsync makes it."""


class ShellRemote:
    """A NetworkRemote over any channel; holds no connection, and several threads may use it."""

    def __init__(self, channel: Channel, *, machine_id: str, parts: ShellParts) -> None:
        """Build the remote; nothing is connected.

        Args:
            channel: how the machine is reached.
            machine_id: what marks its processes, so that all of them are found.
            parts: what it works with here.
        """
        self._channel = channel
        self._machine_id = machine_id
        self._parts = parts

    def run(
        self, command: str, *, env: Mapping[str, str], stream: bool, timeout_s: float | None
    ) -> ExitCode:
        """Run ``command`` by bash, or sh where there is none; a lost connection is taken up again.

        Raises, beside what the protocol says, ConnectionLostError when the machine stays away.
        """
        started_s = self._parts.clock.monotonic()
        follower = self._follower(command, env=env, sink=self._parts.sink if stream else None)
        code = follower.run(timeout_s=timeout_s)
        return ExitCode(code=code, duration_s=self._parts.clock.monotonic() - started_s)

    def capture(self, command: str, *, timeout_s: float = 60.0) -> Captured:
        """Run a short command and return what it printed."""
        printed = {1: bytearray(), 2: bytearray()}

        def keep(stream: int, content: bytes) -> None:
            printed[stream] += content
            if len(printed[stream]) > _CAPTURED_BYTES_MAX:
                raise RemoteCommandError(
                    f"{self._channel.name}: {command[:80]!r} prints more than is wanted of it"
                )

        code = self._follower(command, env={}, sink=keep).run(timeout_s=timeout_s)
        output, errors = (printed[stream].decode(errors="replace") for stream in (1, 2))
        return Captured(code=code, output=output, errors=errors)

    def push(
        self, src: Path, dst: str, *, includes: Iterable[str], excludes: Iterable[str], delete: bool
    ) -> None:
        """Copy to the machine."""
        if not src.exists() and not src.is_symlink():
            raise RemoteCommandError(f"{src} does not exist; nothing was copied")
        copy = Copy(includes=tuple(includes), excludes=tuple(excludes), delete=delete)
        if self._parts.rsync is not None:
            try:
                self._rsync_transfer(self._parts.rsync).push(src, self._from_login(dst), copy)
            except NoRsyncError:
                pass
            else:
                return
        TarTransfer(self._channel).push(src, dst, copy)

    def pull(
        self, src: str, dst: Path, *, includes: Iterable[str], excludes: Iterable[str]
    ) -> None:
        """Copy from the machine."""
        copy = Copy(includes=tuple(includes), excludes=tuple(excludes))
        kind = ask(
            self._channel, render_look(home=self._channel.home, path=src), clock=self._parts.clock
        ).rest
        if kind == "nothing":
            raise RemoteCommandError(
                f"{self._channel.name}: {src} does not exist there; nothing was copied"
            )
        is_dir = kind == "directory"
        try:
            dst.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise RemoteCommandError(f"cannot make {dst.parent}: {exc.strerror}") from exc
        if self._parts.rsync is not None:
            try:
                self._rsync_transfer(self._parts.rsync).pull(
                    self._from_login(src), dst, copy, is_dir=is_dir
                )
            except NoRsyncError:
                pass
            else:
                return
        TarTransfer(self._channel).pull(src, dst, copy, is_dir=is_dir)

    def num_processes(self) -> int:
        """Count what carries the machine's mark or belongs to a session that a command began."""
        script = render_count(
            home=self._channel.home, jobs=self._channel.jobs, mark=(MACHINE_MARK, self._machine_id)
        )
        return int(ask(self._channel, script, clock=self._parts.clock).rest)

    def close(self, *, force: bool) -> None:
        """End every process of the machine. What starts commands must be stopped before."""
        script = render_end(
            home=self._channel.home,
            jobs=self._channel.jobs,
            mark=(MACHINE_MARK, self._machine_id),
            job_id="*",
            grace_s=0.0 if force else self._parts.patience.grace_s,
        )
        left = ask(self._channel, script, clock=self._parts.clock).rest.split()
        if left:
            raise RemoteCommandError(
                f"{self._channel.name}: processes {left} do not end, not even by SIGKILL; end "
                "them and tear down again"
            )

    def probe(self, *, timeout_s: float = 15.0) -> None:
        """Ask the machine's shell for a word, once."""
        script = render_look(home=self._channel.home, path=".")
        ask(self._channel, script, clock=self._parts.clock, silence_s=timeout_s)

    def disconnect(self) -> None:
        """Drop the shared connection."""
        self._channel.reset()

    def _follower(self, command: str, *, env: Mapping[str, str], sink: Sink | None) -> Follower:
        job = Job(
            id=os.urandom(8).hex(),
            machine_id=self._machine_id,
            home=self._channel.home,
            jobs=self._channel.jobs,
            command=command,
            env=env,
            keeps_output=sink is not None,
        )
        return Follower(
            self._channel,
            job,
            clock=self._parts.clock,
            patience=self._parts.patience,
            sink=sink or _drop,
        )

    def _rsync_transfer(self, program: str) -> RsyncTransfer:
        return RsyncTransfer(
            self._channel, program=program, clock=self._parts.clock, watch=self._parts.watch
        )

    def _from_login(self, path: str) -> str:
        """Return ``path`` as rsync needs it, which knows no directory but the login's."""
        if path.startswith("~/"):
            return path[2:] or "."
        joined = posixpath.join(self._channel.home, path)
        return joined.removeprefix("./") or "."


def _drop(_stream: int, _content: bytes) -> None:
    """Take no output: none is kept for a command whose output nobody wants."""
