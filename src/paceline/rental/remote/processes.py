"""Find and end processes of this host that belong together, and never one that does not.

Processes are found in three ways, since each of them can be escaped:

- by a mark in the environment that a command was started with, which all descendants
  inherit, also those that made a session of their own and lost their parents;
- by the session of a leader that was written down, for those that dropped the mark;
- by descent from any of these, for those that did both.

A number alone proves nothing, because the system uses it again: a process is its number and
the moment of its start (`Identity`). The session of a leader that has ended is trusted only
for processes that work in the machine's own directory. What dropped its mark, left its
session and lost its parents is not found.
"""

import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.core.clock import Clock
from paceline.core.waiting import wait_until

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POLL_S = 0.02
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, told apart from every other that had or will have its number."""

    pid: int
    start: str
    """When it started, in words that are compared for equality only."""


def identity_of(pid: int) -> Identity | None:
    """Return who has this number now, or None; a process that has ended and waits is nobody."""
    try:
        start = _start_of(pid)
    except (psutil.Error, OSError):
        return None
    return Identity(pid, start) if start is not None else None


def _start_of(pid: int) -> str | None:
    if sys.platform == "linux":
        # psutil's create_time moves when somebody sets the computer's clock.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        state, ticks = fields[0], fields[19]
        return None if state in "ZX" else f"{_BOOT_ID.read_text().strip()}:{ticks}"
    else:  # noqa: RET505 - mypy reads the platform only from if and else
        process = psutil.Process(pid)
        is_dead = process.status() == psutil.STATUS_ZOMBIE
        return None if is_dead else repr(process.create_time())


def find_processes(
    *, mark: tuple[str, str], leaders: Iterable[Identity], root: Path
) -> set[Identity]:
    """Return the live processes that carry ``mark``, are led by ``leaders`` or descend from them.

    The calling process is never among them. ``root`` is the machine's directory.
    """
    led = {leader.pid: identity_of(leader.pid) == leader for leader in leaders}
    parents: dict[int, int] = {}
    found: set[int] = set()
    for process in psutil.process_iter():
        parents[process.pid] = _parent_of(process)
        if _carries(process, mark) or _is_led(process, led, root):
            found.add(process.pid)
    found |= _descendants(found, parents)
    return {who for pid in found - {os.getpid()} if (who := identity_of(pid)) is not None}


def has_session(leader: Identity) -> bool:
    """Return whether a process is left in the session that ``leader`` began."""
    return any(
        _session_of(pid) == leader.pid and identity_of(pid) is not None for pid in psutil.pids()
    )


def end_processes(
    find: Callable[[], Collection[Identity]], *, clock: Clock, grace_s: float
) -> None:
    """End all that ``find`` returns: a request first, SIGKILL to what is left after ``grace_s``.

    ``find`` is asked again and again, because what is being ended can still start something.

    Raises:
        DeadlineExceededError: some cannot be ended.
    """
    asked: set[Identity] = set()

    def are_gone() -> bool:
        alive = set(find())
        for who in alive - asked:
            send_signal(who, signal.SIGTERM)
        asked.update(alive)
        return not alive

    def are_killed() -> bool:
        alive = find()
        for who in alive:
            send_signal(who, signal.SIGKILL)
        return not alive

    deadline = clock.monotonic() + grace_s
    while grace_s > 0 and not are_gone() and clock.monotonic() < deadline:
        clock.sleep(_POLL_S)
    wait_until(
        are_killed,
        what="ending processes with SIGKILL",
        clock=clock,
        timeout_s=_KILL_TIMEOUT_S,
        interval_s=_POLL_S,
    )


def send_signal(who: Identity, signum: int) -> None:
    """Signal exactly this process; one that is gone, or not ours any more, is passed over."""
    try:
        if sys.platform == "linux":
            # The descriptor is taken before the check, so the number cannot change hands.
            descriptor = os.pidfd_open(who.pid)
            try:
                if identity_of(who.pid) == who:
                    signal.pidfd_send_signal(descriptor, signum)
            finally:
                os.close(descriptor)
        elif identity_of(who.pid) == who:
            os.kill(who.pid, signum)
    except (ProcessLookupError, PermissionError):
        return


def _carries(process: psutil.Process, mark: tuple[str, str]) -> bool:
    name, value = mark
    try:
        return process.environ().get(name) == value
    except (psutil.Error, OSError):
        return False  # somebody else's, or gone


def _parent_of(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _is_led(process: psutil.Process, led: Mapping[int, bool], root: Path) -> bool:
    """Return whether the process is in a recorded session; a dead leader needs a second sign."""
    is_alive = led.get(_session_of(process.pid))
    if is_alive is None:
        return False
    try:
        return is_alive or Path(process.cwd()).is_relative_to(root)
    except (psutil.Error, OSError):
        return False  # somebody else's, or gone


def _session_of(pid: int) -> int:
    """Return the number of the session, 0 for a process that is gone or not ours to ask."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return 0


def _descendants(roots: set[int], parents: dict[int, int]) -> set[int]:
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found
