"""A shell and files on one machine, however it is reached."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.rental.model import ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """Where a machine's sshd is, and what is needed to be let in."""

    name: str
    """What errors call the machine, such as ``vast machine 1234``."""
    host: str
    port: int
    user: str
    known_hosts: Path
    """A file for this machine alone, made on first contact: addresses are used again by other
    machines. Remove it when the machine is gone."""
    identity: Path | None = None
    """Our private key; None leaves the choice to ssh: its agent and its own key files."""
    proxy_jump: str | None = None
    """``user@host:port`` to go through, as ``ssh -J`` takes it."""
    home: str = "."
    """Directory on the machine in which commands start and to which relative paths are
    relative; itself relative to the login directory. It must exist."""
    jobs: str = ".paceline/jobs"
    """Directory on the machine for the records of commands, relative to ``home``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTarget:
    """A container, and which engine it lives in."""

    name: str
    """What errors call the machine."""
    container: str
    """Its id or name."""
    docker: tuple[str, ...] = ("docker",)
    """The engine's command line, with what chooses the engine."""
    home: str = "."
    jobs: str = ".paceline/jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryTarget:
    """A machine that is a directory of this computer."""

    name: str
    directory: Path
    environ: Mapping[str, str] = field(repr=False)
    """What its programs find in their environment."""


Access = SshTarget | ContainerTarget | DirectoryTarget
"""How a machine is reached by whoever brings a program of its own: a terminal, a tunnel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a copy is."""

    num_bytes: int
    """Bytes of the files copied so far."""
    share: float
    """Part of what is known to be copied, 0 to 1."""


class Remote(Protocol):
    """One machine's shell and files. Remote paths are the machine's own; blocking calls."""

    def run(
        self, command: str, *, env: Mapping[str, str], stream: bool, timeout_s: float | None
    ) -> ExitCode:
        """Run ``command`` in the machine's shell, wait, and return its own exit status.

        Output passes through while it runs if ``stream``, else it is dropped. An exception in
        the caller (Ctrl-C) ends the command before it is raised on. ``env`` never shows up in
        an argument list.

        Raises:
            SshUnreachableError: nothing was started.
            CommandTimeoutError: the command and all it started were ended after ``timeout_s``.
        """
        ...

    def push(
        self, src: Path, dst: str, *, includes: Iterable[str], excludes: Iterable[str], delete: bool
    ) -> None:
        """Make ``dst`` on the machine a copy of the local ``src``.

        A directory's contents become the contents of ``dst``; a file becomes ``dst``, or goes
        into it when ``dst`` is a directory or ends with a slash. Missing directories above are
        made. Raises RemoteCommandError; then some of it may have been copied, and repeating
        is safe.
        """
        ...

    def pull(
        self, src: str, dst: Path, *, includes: Iterable[str], excludes: Iterable[str]
    ) -> None:
        """Make the local ``dst`` a copy of ``src`` on the machine; never deletes. As push."""
        ...


class ProcessRemote(Remote, Protocol):
    """A remote whose machine is nothing but processes, so that ending those ends the machine."""

    def num_processes(self) -> int:
        """Return how many processes of this machine are alive now, whoever started them."""
        ...

    def close(self, *, force: bool) -> None:
        """Let no further command start and end every process of the machine; idempotent.

        Raises RemoteCommandError, naming them, if some cannot be ended.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A short command's answer."""

    code: int
    output: str
    """Standard output, decoded; what is no UTF-8 is replaced."""
    errors: str


class NetworkRemote(ProcessRemote, Protocol):
    """A remote behind a connection that can break, to a machine that may not be up yet."""

    def probe(self, *, timeout_s: float = 15.0) -> None:
        """Return once the machine's shell answers; one try.

        Raises:
            SshUnreachableError: not now; SshDeniedError when it does not take our key yet.
            HostKeyChangedError, SshKeyError: waiting does not help.
        """
        ...

    def capture(self, command: str, *, timeout_s: float = 60.0) -> Captured:
        """Run a short command and return what it printed, as ``run`` does otherwise.

        Raises RemoteCommandError for more output than a few megabytes.
        """
        ...

    def disconnect(self) -> None:
        """Close the shared connection; the next call opens another. Never raises."""
        ...
