"""Real clock, randomness, environment and state directory: the one file that touches them."""

import os
import random
import secrets
import tempfile
import time
from collections.abc import Mapping
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


def socket_dir() -> Path:
    """Return a directory for sockets, whose paths must be short; it may not be there yet."""
    given = environ().get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir():
        return Path(given) / "paceline"
    return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
