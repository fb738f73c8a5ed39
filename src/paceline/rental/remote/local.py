"""A machine that is a directory and processes of this host.

Every command is written down before it runs: it starts as a shell that waits for one line, its
number goes into ``<root>/commands``, and only then the line is written. Whoever comes after a
killed starter finds all of the machine's processes there and by the mark in their environment.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError
from paceline.rental.errors import (
    CommandTimeoutError,
    InstanceNotFoundError,
    RemoteCommandError,
    SshUnreachableError,
)
from paceline.rental.model import ExitCode
from paceline.rental.remote.argv import (
    RSYNC_VANISHED,
    gated_shell_argv,
    is_usable_rsync,
    rsync_argv,
)
from paceline.rental.remote.durable import write_durably
from paceline.rental.remote.processes import (
    Identity,
    end_processes,
    find_processes,
    has_session,
    identity_of,
)
from paceline.rental.remote.tree import copy_tree

MACHINE_MARK = "PACELINE_MACHINE_ID"
COMMAND_MARK = "PACELINE_COMMAND_ID"
WORKSPACE = "workspace"
COMMANDS = "commands"
_CLOSED = "commands.closed"
_GRACE_S = 5.0
_RECORD_BYTES_MAX = 4096


@functools.cache
def usable_rsync() -> str | None:
    """Return this host's rsync, or None if there is none that copies as ours does."""
    program = shutil.which("rsync")
    if program is None:
        return None
    asked = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False, timeout=10
    )
    return program if is_usable_rsync(asked.stdout) else None


class LocalRemote:
    """Shell and files of the machine in ``root``; relative paths are under its workspace."""

    def __init__(
        self,
        root: Path,
        *,
        machine_id: str,
        clock: Clock,
        environ: Mapping[str, str],
        rsync: str | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        """Build the remote; ``rsync`` None copies in Python, with the same result."""
        self._root = root.resolve()
        self._machine_id = machine_id
        self._clock = clock
        self._environ = environ
        self._rsync = rsync
        self._grace_s = grace_s

    def run(
        self, command: str, *, env: Mapping[str, str], stream: bool, timeout_s: float | None
    ) -> ExitCode:
        """Run ``command`` in the workspace by bash, or sh where there is none."""
        command_id = os.urandom(8).hex()
        started_s = self._clock.monotonic()
        process = self._start(command, command_id, env, stream=stream)
        leader = identity_of(process.pid)
        record = self._root / COMMANDS / f"{command_id}.json"
        try:
            self._write_down(leader, record)
            process.communicate(b"go\n", timeout=timeout_s)
        except subprocess.TimeoutExpired as exc:
            self._end_command(process, leader, command_id, grace_s=self._grace_s)
            raise CommandTimeoutError(
                f"machine {self._machine_id}: a command was ended after {timeout_s:g} s; "
                "give it a longer timeout_s or look at its log"
            ) from exc
        except BaseException:
            self._end_command(process, leader, command_id, grace_s=0.0)
            raise
        finally:
            # What it left in the background, as a server does, is the machine's until it ends.
            if leader is None or not has_session(leader):
                record.unlink(missing_ok=True)
        # The shell reports 128 + n for what it ran; a negative number is the shell, signalled.
        code = process.returncode
        return ExitCode(
            code=128 - code if code < 0 else code,
            duration_s=self._clock.monotonic() - started_s,
        )

    def push(
        self, src: Path, dst: str, *, includes: Iterable[str], excludes: Iterable[str], delete: bool
    ) -> None:
        """Copy into the machine."""
        target = self._path(dst)
        self._copy(src, target, into=dst.endswith("/"), rules=(includes, excludes), delete=delete)

    def pull(
        self, src: str, dst: Path, *, includes: Iterable[str], excludes: Iterable[str]
    ) -> None:
        """Copy out of the machine."""
        self._copy(self._path(src), dst, into=False, rules=(includes, excludes), delete=False)

    def num_processes(self) -> int:
        """Count what is alive, by mark, group and descent."""
        return len(self._processes())

    def close(self, *, force: bool) -> None:
        """Move the command records away, so that none can be added, and end what they name."""
        # Closed before, perhaps by somebody who was killed: then only the ending is left.
        with contextlib.suppress(FileNotFoundError):
            (self._root / COMMANDS).rename(self._root / _CLOSED)
        try:
            end_processes(
                self._processes, clock=self._clock, grace_s=0.0 if force else self._grace_s
            )
        except DeadlineExceededError as exc:
            pids = sorted(who.pid for who in self._processes())
            raise RemoteCommandError(
                f"machine {self._machine_id}: processes {pids} do not end, not even by SIGKILL; "
                "end them and tear down again"
            ) from exc

    def _start(
        self, command: str, command_id: str, env: Mapping[str, str], *, stream: bool
    ) -> subprocess.Popen[bytes]:
        """Start the waiting shell, in a session of its own so that Ctrl-C does not reach it."""
        output = None if stream else subprocess.DEVNULL
        try:
            return subprocess.Popen(
                gated_shell_argv(shutil.which("bash") or "/bin/sh", command),
                cwd=self._root / WORKSPACE,
                env={
                    **self._environ,
                    **env,
                    MACHINE_MARK: self._machine_id,
                    COMMAND_MARK: command_id,
                },
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except FileNotFoundError as exc:
            raise self._not_found() from exc
        except (OSError, ValueError) as exc:
            raise SshUnreachableError(
                f"machine {self._machine_id}: no shell could be started: {exc}"
            ) from exc

    def _write_down(self, leader: Identity | None, record: Path) -> None:
        """Record whose command is about to run; None has ended already and will not."""
        if leader is None:
            return
        content = json.dumps({"pid": leader.pid, "start": leader.start})
        try:
            write_durably(record, content.encode())
        except FileNotFoundError as exc:  # torn down in this moment
            raise self._not_found() from exc
        except OSError as exc:
            raise SshUnreachableError(
                f"machine {self._machine_id}: the command cannot be recorded and was not "
                f"started: {exc.strerror}; free some disk space under {self._root}"
            ) from exc

    def _end_command(
        self,
        process: subprocess.Popen[bytes],
        leader: Identity | None,
        command_id: str,
        *,
        grace_s: float,
    ) -> None:
        """End one command, its group and all its descendants, and reap the shell."""
        if process.stdin is not None:
            process.stdin.close()  # nothing runs any more that has not begun
        leaders = [leader] if leader is not None else []
        end_processes(
            lambda: find_processes(
                mark=(COMMAND_MARK, command_id), leaders=leaders, root=self._root
            ),
            clock=self._clock,
            grace_s=grace_s,
        )
        process.wait()

    def _processes(self) -> set[Identity]:
        return find_processes(
            mark=(MACHINE_MARK, self._machine_id),
            leaders=_recorded_leaders(self._root),
            root=self._root,
        )

    def _path(self, path: str) -> Path:
        """Return where ``path`` of the machine is; what would leave the machine is refused."""
        workspace = self._root / WORKSPACE
        if not workspace.is_dir():
            raise self._not_found()
        target = Path(os.path.normpath(workspace / path))
        if not target.is_relative_to(workspace):
            raise RemoteCommandError(
                f"machine {self._machine_id}: {path!r} is outside the machine's workspace, and "
                "this machine is a directory of your computer; give a path relative to it"
            )
        return target

    def _copy(
        self,
        src: Path,
        dst: Path,
        *,
        into: bool,
        rules: tuple[Iterable[str], Iterable[str]],
        delete: bool,
    ) -> None:
        includes, excludes = (tuple(patterns) for patterns in rules)
        if not src.exists() and not src.is_symlink():
            raise RemoteCommandError(f"{src} does not exist; nothing was copied")
        target = dst / src.name if not src.is_dir() and (into or dst.is_dir()) else dst
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if self._rsync is None:
                copy_tree(src, target, includes=includes, excludes=excludes, delete=delete)
                return
        except OSError as exc:
            raise RemoteCommandError(f"copying {src} to {target}: {exc}") from exc
        slash = "/" if src.is_dir() else ""
        _run_rsync(
            rsync_argv(
                self._rsync,
                f"{src.absolute()}{slash}",
                f"{target.absolute()}{slash}",
                includes=includes,
                excludes=excludes,
                delete=delete,
            )
        )

    def _not_found(self) -> InstanceNotFoundError:
        return InstanceNotFoundError(
            f"machine {self._machine_id} does not exist any more; see `paceline ls`"
        )


def _recorded_leaders(root: Path) -> list[Identity]:
    """Return the leaders that were written down; records that cannot be read name nobody."""
    leaders = []
    for record in (*root.glob(f"{COMMANDS}/*.json"), *root.glob(f"{_CLOSED}/*.json")):
        leader = _read_leader(record)
        if leader is not None:
            leaders.append(leader)
    return leaders


def _read_leader(record: Path) -> Identity | None:
    try:
        with record.open("rb") as file:
            content = json.loads(file.read(_RECORD_BYTES_MAX))
        return Identity(int(content["pid"]), str(content["start"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None  # gone meanwhile, or not ours; the mark still finds the processes


def _run_rsync(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode not in (0, RSYNC_VANISHED):
        said = done.stderr.strip()[-500:]
        raise RemoteCommandError(
            f"copying {argv[-2]} to {argv[-1]}: rsync ended with {done.returncode}: {said}"
        )
