"""Real clock, randomness, environment and state directory: the one file that touches them."""

import os
import random
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import platformdirs

from paceline.core.clock import AsyncClock, Clock

_SYSTEM_RANDOM = random.SystemRandom()
"""Leaves alone the state of `random`, which is the program's that we run in."""


class SystemClock:
    """The computer's own clock."""

    def time(self) -> float:
        """Return seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds since some fixed moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block; zero or less returns at once."""
        if seconds > 0:
            time.sleep(seconds)


class SystemAsyncClock:
    """The same for an event loop."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Let others run."""
        import asyncio  # 20 ms that the command line need not pay

        await asyncio.sleep(max(0.0, seconds))


def system_clock() -> Clock:
    """Return the computer's clock."""
    return SystemClock()


def system_async_clock() -> AsyncClock:
    """Return the computer's clock, for an event loop."""
    return SystemAsyncClock()


def environ() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def new_nonce(num_bytes: int = 4) -> str:
    """Return fresh lower-case hex that nobody can guess."""
    return secrets.token_hex(num_bytes)


def chance() -> float:
    """Return a random number in [0, 1) for jitter; not for secrets."""
    return _SYSTEM_RANDOM.random()


def state_dir() -> Path:
    """Return the operator's state directory: PACELINE_STATE_DIR or the platform's own place."""
    given = environ().get("PACELINE_STATE_DIR")
    return Path(given) if given else Path(platformdirs.user_state_path("paceline"))


def config_dir() -> Path:
    """Return where the operator writes settings: PACELINE_CONFIG_DIR or the platform's place."""
    given = environ().get("PACELINE_CONFIG_DIR")
    return Path(given) if given else Path(platformdirs.user_config_path("paceline"))


def memory_available(root: Path = Path("/")) -> int:
    """Return how many bytes this process may still take; 0 where the system does not say.

    The least of what the machine has and what each control group that we are in leaves.
    """
    lines = _text_of(root / "proc/meminfo").splitlines()
    found = [int(each.split()[1]) << 10 for each in lines if each.startswith("MemAvailable:")]
    for line in _text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in _MEMORY_GROUPS:
            folder, words = _MEMORY_GROUPS[controllers]
            found += _left_in_groups(root / folder, Path(path).parts[1:], words)
    return min(found, default=0)


_MEMORY_GROUPS = {
    "": ("sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
    "memory": (
        "sys/fs/cgroup/memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
}
"""Controllers of a line -> where its groups are, and what files and counts are called there.

Files that are cached count as used, and are given back when somebody asks for memory.
"""


def _left_in_groups(
    folder: Path, names: tuple[str, ...], words: tuple[str, str, str]
) -> Iterator[int]:
    """Yield what the group leaves, and every group above it; inside a container some are hidden."""
    for count in range(len(names) + 1):
        place = folder.joinpath(*names[:count])
        limit, used = (_text_of(place / word).strip() for word in words[:2])
        if limit.isdigit() and used.isdigit():
            counts = dict(line.split() for line in _text_of(place / "memory.stat").splitlines())
            yield max(0, int(limit) - int(used) + int(counts.get(words[2], 0)))


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def socket_dir() -> Path:
    """Return a directory for sockets, whose paths must be short; it may not be there yet."""
    given = environ().get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir():
        return Path(given) / "paceline"
    return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
