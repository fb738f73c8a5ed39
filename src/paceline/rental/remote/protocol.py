"""A shell and files on one machine, however it is reached."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from paceline.rental.model import ExitCode


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
