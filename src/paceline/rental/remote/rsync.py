"""Copy files to and from a machine by rsync; what a broken connection left is gone on with."""

import os
import posixpath
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from paceline.core.clock import Clock
from paceline.rental.errors import RemoteCommandError
from paceline.rental.remote.argv import RSYNC_VANISHED, remote_rsync_argv, rsync_argv
from paceline.rental.remote.channel import Channel, ask, end_process
from paceline.rental.remote.protocol import Progress
from paceline.rental.remote.rules import Copy
from paceline.rental.remote.script import render_make
from paceline.rental.remote.trouble import Trouble, lacks_program, shorten, trouble_of

STALL_S = 60
"""A transfer in which nothing moves for so long is ended, and tried again."""
_NUM_TRIES = 4
_RETRY_DELAYS_S = (0.5, 2.0, 5.0)
_CONNECTION_CODES = frozenset({10, 12, 30, 35, 127, 255})
"""Exit statuses of rsync that speak of the connection, or of a machine without rsync."""
_PROGRESS = re.compile(rb"\s([\d,.]+)\s+(\d{1,3})%")
_PIECE_BYTES = 1 << 16

Watch = Callable[[Progress], None]


class NoRsyncError(RemoteCommandError):
    """The machine has no rsync; tar may do."""


class RsyncTransfer:
    """Copies by rsync over a channel."""

    def __init__(
        self, channel: Channel, *, program: str, clock: Clock, watch: Watch | None
    ) -> None:
        self._channel = channel
        self._program = program
        self._clock = clock
        self._watch = watch

    def push(self, src: Path, there: str, copy: Copy) -> None:
        """Copy the local ``src`` to the path ``there``. Raises NoRsyncError, RemoteCommandError."""
        slash = "/" if src.is_dir() else ""
        parent = posixpath.dirname(there.rstrip("/")) if slash else posixpath.dirname(there)
        if parent and not self._channel.has_login_shell:
            script = render_make(home=self._channel.home, path=parent)
            ask(self._channel, script, clock=self._clock)
            parent = ""
        self._run(
            f"{src.absolute()}{slash}",
            f"{self._channel.host}:{there.rstrip('/') if slash else there}{slash}",
            copy,
            make_parent=parent or None,
        )

    def pull(self, there: str, dst: Path, copy: Copy, *, is_dir: bool) -> None:
        """Copy the path ``there`` to the local ``dst``."""
        slash = "/" if is_dir else ""
        self._run(
            f"{self._channel.host}:{there.rstrip('/')}{slash}", f"{dst.absolute()}{slash}", copy
        )

    def _run(self, src: str, dst: str, copy: Copy, *, make_parent: str | None = None) -> None:
        argv = remote_rsync_argv(
            rsync_argv(
                self._program,
                src,
                dst,
                includes=copy.includes,
                excludes=copy.excludes,
                delete=copy.delete,
            ),
            words=self._channel.words(),
            make_parent=make_parent,
            timeout_s=STALL_S,
            with_progress=self._watch is not None,
        )
        for tries in range(_NUM_TRIES):
            code, said = self._once(argv)
            if code in (0, RSYNC_VANISHED):
                return
            if code in _CONNECTION_CODES or lacks_program(said, "rsync"):
                self._refuse_connection(said, is_last=tries == _NUM_TRIES - 1)
            else:
                raise RemoteCommandError(
                    f"{self._channel.name}: copying {src} to {dst}: rsync ended with {code}: "
                    f"{shorten(said)}"
                )
            self._channel.reset()
            self._clock.sleep(_RETRY_DELAYS_S[min(tries, len(_RETRY_DELAYS_S) - 1)])

    def _refuse_connection(self, said: str, *, is_last: bool) -> None:
        """Raise unless the connection broke on the way and another try may go on from there."""
        if lacks_program(said, "rsync"):
            raise NoRsyncError(f"{self._channel.name} has no rsync")
        if is_last or trouble_of(said) is not Trouble.CUT:
            raise self._channel.error_of(said)

    def _once(self, argv: Sequence[str]) -> tuple[int, str]:
        with tempfile.TemporaryFile() as said_file:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said_file,
                start_new_session=True,
            )
            try:
                if process.stdout is not None:
                    self._read_progress(process.stdout)
                code = process.wait()
            finally:
                end_process(process)
            said_file.seek(0)
            return code, said_file.read().decode(errors="replace")

    def _read_progress(self, output: IO[bytes]) -> None:
        with output:
            while piece := os.read(output.fileno(), _PIECE_BYTES):
                found = _PROGRESS.findall(piece)
                if found and self._watch is not None:
                    num_bytes, percent = found[-1]
                    self._watch(
                        Progress(
                            num_bytes=int(re.sub(rb"\D", b"", num_bytes)),
                            share=min(1.0, int(percent) / 100),
                        )
                    )
