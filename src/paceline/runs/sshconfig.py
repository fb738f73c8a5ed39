"""Names by which plain ``ssh``, rsync and editors reach the machines of runs.

Each machine has a file of its own below the state directory, written whole and renamed, so that
runs that come and go at the same time do not meet. ``~/.ssh/config`` gets one Include line for
them, when the operator asks for it, and loses it again the same way.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path

from paceline.core.errors import PreflightError
from paceline.rental.records import LABEL_PREFIX, Machine
from paceline.rental.remote.protocol import Access, SshTarget
from paceline.runs.files import write_atomic

MARK = "# paceline: names of rented machines; taken out by `paceline ssh-config remove`"
SUFFIX = ".conf"
_LABEL = re.compile(r"[a-z0-9][a-z0-9-]*")


def alias_of(machine: Machine) -> str:
    """Return the name of a machine: its run, role and index."""
    return f"{LABEL_PREFIX}{machine.run_id}-{machine.role}-{machine.index}"


def render_host(machine: Machine, target: SshTarget) -> str:
    """Return the lines of ssh's configuration for one machine.

    A role's first machine is also known without its index.
    """
    names = [alias_of(machine)]
    if machine.index == 0:
        names.append(alias_of(machine).removesuffix("-0"))
    options = {
        "HostName": target.host,
        "Port": str(target.port),
        "User": target.user,
        "UserKnownHostsFile": _quoted(target.known_hosts),
        "GlobalKnownHostsFile": "none",
        "StrictHostKeyChecking": "accept-new",
        "UpdateHostKeys": "no",
        "ForwardAgent": "no",
        "ServerAliveInterval": "15",
    }
    if target.identity is not None:
        options |= {"IdentityFile": _quoted(target.identity), "IdentitiesOnly": "yes"}
    if target.proxy_jump is not None:
        options["ProxyJump"] = target.proxy_jump
    lines = [f"Host {' '.join(names)}", *(f"  {name} {value}" for name, value in options.items())]
    return "\n".join(lines) + "\n"


class SshConfig:
    """The files of names, and the one line in the user's own configuration."""

    def __init__(self, directory: Path, *, user_file: Path) -> None:
        self.user_file = user_file
        self._directory = directory

    def add(self, machine: Machine, access: Access) -> None:
        """Write a machine's name; one that is not behind an sshd has none."""
        if isinstance(access, SshTarget):
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(self._path(machine.label), render_host(machine, access))

    def drop(self, label: str) -> None:
        """Forget a machine; fine when it has no name."""
        if _LABEL.fullmatch(label):
            self._path(label).unlink(missing_ok=True)

    def keep(self, labels: Collection[str]) -> None:
        """Forget all machines but these."""
        for path in self._directory.glob(f"*{SUFFIX}"):
            if path.stem not in labels:
                path.unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return every name that there is, sorted."""
        found: set[str] = set()
        for path in self._directory.glob(f"*{SUFFIX}"):
            try:
                first = path.read_text(encoding="utf-8").partition("\n")[0]
            except FileNotFoundError:  # its machine has just gone
                continue
            found.update(first.split()[1:])
        return sorted(found)

    def is_installed(self) -> bool:
        """Return whether the user's configuration includes the names."""
        return self._line() in self._user_lines()

    def install(self) -> None:
        """Add the line, once, at the top: after a Host line it would belong to that host.

        Raises PreflightError when the file cannot be written.
        """
        if not self.is_installed():
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._write_user([MARK, self._line(), *self._user_lines()])

    def remove(self) -> None:
        """Take the line out; the rest of the file stays as it is."""
        if self.is_installed():
            lines = self._user_lines()
            at = lines.index(self._line())
            first = at - 1 if at and lines[at - 1] == MARK else at
            self._write_user(lines[:first] + lines[at + 1 :])

    def _line(self) -> str:
        return f"Include {_quoted(self._directory / ('*' + SUFFIX))}"

    def _path(self, label: str) -> Path:
        return self._directory / f"{label}{SUFFIX}"

    def _user_lines(self) -> list[str]:
        try:
            return self.user_file.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise self._unusable(exc) from exc

    def _write_user(self, lines: list[str]) -> None:
        """Replace the user's file, with its mode; a link to it, as dotfiles have, stays one."""
        path = self.user_file.resolve()
        scratch = path.with_name(f"{path.name}.paceline-new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write("\n".join(lines))
            scratch.replace(path)
        except OSError as exc:
            raise self._unusable(exc) from exc

    def _unusable(self, exc: OSError) -> PreflightError:
        return PreflightError(
            f"cannot use {self.user_file}: {exc.strerror}; mend that, or add the line yourself: "
            f"{self._line()}"
        )


def _quoted(path: Path) -> str:
    """Quote a path for ssh's configuration, where a percent sign would be a token."""
    return f'"{str(path).replace("%", "%%")}"'
