"""Machines behind an sshd, by OpenSSH's own client.

One connection per machine is shared by everything that talks to it, from whichever process of this
computer: its socket has a name made of all that tells one machine from another, since providers
give addresses to the next customer. It closes by itself when nobody uses it.
"""

import hashlib
import os
import shlex
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.rental.errors import BackendError, SshKeyError
from paceline.rental.remote.argv import ssh_words
from paceline.rental.remote.protocol import SshTarget
from paceline.rental.remote.shell import ShellParts, ShellRemote
from paceline.rental.remote.trouble import error_of

CONNECT_TIMEOUT_S = 10
_SOCKET_BYTES_MAX = 80
"""For a socket's path: 104 in the strictest system, less what ssh adds while it makes it."""
_RESET_TIMEOUT_S = 5.0


class SshChannel:
    """A Channel to an sshd."""

    has_login_shell = True

    def __init__(self, target: SshTarget, *, control_dir: Path | None) -> None:
        self.name = target.name
        self.host = f"[{target.host}]" if ":" in target.host else target.host
        self.home = target.home
        self.jobs = target.jobs
        self._target = target
        self._control_path = _control_path(target, control_dir)

    def words(self) -> list[str]:
        """Return the ssh command; makes what it needs of directories."""
        self._target.known_hosts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return ssh_words(
            self._target,
            control_path=self._control_path,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )

    def argv(self, program: Sequence[str]) -> list[str]:
        """Return the ssh command for ``program``, which the machine's login shell starts."""
        self._refuse_missing_key()
        return [*self.words(), "--", self._target.host, f"exec {shlex.join(program)}"]

    def error_of(self, said: str) -> BackendError:
        """Return what ssh's words mean."""
        return error_of(
            said,
            name=self.name,
            address=f"{self._target.user}@{self._target.host}:{self._target.port}",
            identity=self._target.identity,
            known_hosts=self._target.known_hosts,
        )

    def reset(self) -> None:
        """End the shared connection; nothing happens when there is none."""
        if self._control_path is None or not self._control_path.exists():
            return
        words = [*self.words(), "-O", "exit", "--", self._target.host]
        try:
            subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
                timeout=_RESET_TIMEOUT_S,
            )
        except (subprocess.TimeoutExpired, OSError):
            # Whoever serves the socket hangs: without the socket nobody asks it any more.
            self._control_path.unlink(missing_ok=True)

    def _refuse_missing_key(self) -> None:
        """Say which key is missing: ssh would only say that it was not let in."""
        key = self._target.identity
        if key is not None and not key.exists():
            raise SshKeyError(
                f"{self.name}: there is no private key at {key}; put it there, or make one with "
                f"ssh-keygen -t ed25519 -N '' -f {key} and give its .pub to the machine"
            )


def ssh_remote(
    target: SshTarget, *, machine_id: str, parts: ShellParts, control_dir: Path | None
) -> ShellRemote:
    """Return shell and files of the machine behind ``target``; connects nothing.

    Args:
        target: where it is.
        machine_id: what marks its processes; the backend's own id of it.
        parts: what it works with here.
        control_dir: a short, private directory for sockets, made if missing; None shares none.
    """
    channel = SshChannel(target, control_dir=control_dir)
    return ShellRemote(channel, machine_id=machine_id, parts=parts)


def _control_path(target: SshTarget, control_dir: Path | None) -> Path | None:
    """Return where the shared connection's socket is; None where none can be kept private."""
    if control_dir is None:
        return None
    facts = (
        target.name,
        target.host,
        target.port,
        target.user,
        target.identity,
        target.known_hosts,
        target.proxy_jump,
    )
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    path = control_dir / name
    if len(os.fsencode(path)) > _SOCKET_BYTES_MAX or not _is_private(control_dir):
        return None
    return path


def _is_private(directory: Path) -> bool:
    """Make the directory and return whether nobody else can put a socket there."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = directory.lstat()
    is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
    return is_ours and not facts.st_mode & 0o077
