"""Command lines, as lists of words. Pure: nothing is run here."""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.rental.remote.protocol import ContainerTarget, SshTarget
from paceline.rental.remote.rules import refuse_empty

RSYNC_VANISHED = 24
"""Exit status of rsync when files went away while it copied: whoever writes there goes on."""
CONTROL_PERSIST_S = 60
_RSYNC_PROTOCOL_MIN = 31
# Waits for one line on its input before it becomes the command. Whoever starts it writes down
# its process id first; if that fails, or the starter dies, the input ends and nothing runs.
_GATE = 'read -r go || exit 125; exec "$0" -c "$1" </dev/null'


def rsync_argv(
    program: str,
    src: str,
    dst: str,
    *,
    includes: Iterable[str] = (),
    excludes: Iterable[str] = (),
    delete: bool = False,
) -> list[str]:
    """Return the rsync command that makes ``dst`` a copy of ``src``.

    Links, modes and times are kept; owners, devices and hard links are not: the other side
    has other users. Times are compared to the nanosecond, since a file can be written twice
    in a second. Includes come first, because the first match decides. ``--filter`` is used
    because ``--exclude`` gives patterns such as ``!`` and ``+ x`` a meaning of their own.
    """
    argv = [program, "-rlpt", "--modify-window=-1"]
    argv += ["--delete"] if delete else []
    for sign, patterns in (("+", includes), ("-", excludes)):
        for pattern in patterns:
            refuse_empty(pattern)
            argv.append(f"--filter={sign} {pattern}")
    return [*argv, "--", src, dst]


def remote_rsync_argv(
    local: Sequence[str],
    *,
    words: Sequence[str],
    make_parent: str | None = None,
    timeout_s: int,
    with_progress: bool,
) -> list[str]:
    """Return ``local``, a command of ``rsync_argv``, as one that reaches a machine.

    Paths go through rsync's own protocol (``-s``), past the machine's shell. What a broken
    connection left of a file is kept, and the next try goes on from there. It has the file's
    own name until then: a directory apart would be one more pattern for every name, which made
    a look at 10,000 unchanged files half as long again.

    Args:
        local: what ``rsync_argv`` returned, with ``machine:path`` for the far side.
        words: the command that starts a program on the machine, to which rsync adds the
            machine's name and the program.
        make_parent: a directory that is made on the machine first.
        timeout_s: a transfer in which nothing moves for so long is ended.
        with_progress: print how far it is.
    """
    program, *rest = local
    options = ["-s", "--partial", f"--timeout={timeout_s}"]
    options += ["-e", " ".join(_rsync_word(word) for word in words)]
    if make_parent is not None:
        options.append(f"--rsync-path=mkdir -p {shlex.quote(make_parent)} && rsync")
    options += ["--info=progress2"] if with_progress else []
    return [program, *options, *rest]


def ssh_words(target: SshTarget, *, control_path: Path | None, connect_timeout_s: int) -> list[str]:
    """Return the ssh command for ``target`` up to its host, which comes next.

    The user's own ssh configuration is left out: a ``RemoteCommand`` or a ``ControlPath`` there
    would change what we mean. One connection is shared by all commands to a machine and closes
    when nobody has used it for a while.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(connect_timeout_s),
        "ServerAliveInterval": "15",
        "ServerAliveCountMax": "4",
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": _ssh_value(target.known_hosts),
        "GlobalKnownHostsFile": "none",
        "HashKnownHosts": "no",
        "UpdateHostKeys": "no",
        "LogLevel": "ERROR",
        "RequestTTY": "no",
        "ForwardAgent": "no",
    }
    if control_path is not None:
        options |= {
            "ControlMaster": "auto",
            "ControlPath": _ssh_value(control_path),
            "ControlPersist": str(CONTROL_PERSIST_S),
        }
    words = ["ssh", "-F", "none", "-l", target.user, "-p", str(target.port)]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    if target.identity is not None:
        words += ["-o", "IdentitiesOnly=yes", "-i", str(target.identity)]
    if target.proxy_jump is not None:
        words += ["-J", target.proxy_jump]
    return words


def container_words(target: ContainerTarget) -> list[str]:
    """Return the command that runs a program in a container, up to the container's name."""
    return [*target.docker, "exec", "-i"]


def terminal_argv(words: Sequence[str], host: str, *, line: str) -> list[str]:
    """Return ``words``, a command of ``ssh_words``, with a terminal and a line for the shell there.

    The first of two values of an option counts, so ours comes before ``RequestTTY``.
    """
    program, *rest = words
    return [program, "-t", *rest, "--", host, line]


def _rsync_word(word: str) -> str:
    """Quote a word as rsync's ``-e`` reads it, which knows quotes and no backslashes."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return "'" + word.replace("'", "''") + "'"


def _ssh_value(path: Path) -> str:
    """Quote a path as the value of an ssh option; a percent sign would be a token there."""
    escaped = str(path).replace("%", "%%").replace('"', '\\"')
    return f'"{escaped}"'


def is_usable_rsync(version_text: str) -> bool:
    """Return whether the program that printed this compares times to the nanosecond.

    Rsync does from 3.1.3 (protocol 31) on; openrsync and the rsync 2.6.9 of older macOS do not.
    """
    found = re.search(r"rsync +version .*protocol version (\d+)", version_text)
    return found is not None and int(found.group(1)) >= _RSYNC_PROTOCOL_MIN


def gated_shell_argv(shell: str, command: str) -> list[str]:
    """Return the words that run ``command`` in ``shell`` once a line is written to their input."""
    return ["/bin/sh", "-c", _GATE, shell, command]
