"""Command lines, as lists of words. Pure: nothing is run here."""

import re
from collections.abc import Iterable

from paceline.rental.remote.rules import refuse_empty

RSYNC_VANISHED = 24
"""Exit status of rsync when files went away while it copied: whoever writes there goes on."""
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


def is_usable_rsync(version_text: str) -> bool:
    """Return whether the program that printed this compares times to the nanosecond.

    Rsync does from 3.1.3 (protocol 31) on; openrsync and the rsync 2.6.9 of older macOS do not.
    """
    found = re.search(r"rsync +version .*protocol version (\d+)", version_text)
    return found is not None and int(found.group(1)) >= _RSYNC_PROTOCOL_MIN


def gated_shell_argv(shell: str, command: str) -> list[str]:
    """Return the words that run ``command`` in ``shell`` once a line is written to their input."""
    return ["/bin/sh", "-c", _GATE, shell, command]
