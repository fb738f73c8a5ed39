"""What an adapter that was built with no arguments works with: the real things of this computer."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline import system
from paceline.core.clock import Clock
from paceline.rental.remote.local import LocalRemote, usable_rsync
from paceline.rental.remote.protocol import ProcessRemote


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The surroundings of an adapter, as values and functions that a test can replace."""

    clock: Clock
    environ: Mapping[str, str]
    state_dir: Path
    nonce: Callable[[], str]
    """Fresh lower-case hex for every call."""
    num_cpus: int
    interpreter_dir: Path
    """Where this interpreter's programs are: ``python``, ``paceline``."""
    working_dir: Path
    """What relative paths of the environment are relative to."""
    process_remote: Callable[[Path, str, Mapping[str, str]], ProcessRemote]
    """Directory, machine id, environment -> shell and files of a machine made of processes."""


def default_parts() -> Parts:
    """Return the real surroundings; reads the environment, opens nothing."""
    clock = system.system_clock()

    def process_remote(root: Path, machine_id: str, environ: Mapping[str, str]) -> ProcessRemote:
        return LocalRemote(
            root, machine_id=machine_id, clock=clock, environ=environ, rsync=usable_rsync()
        )

    return Parts(
        clock=clock,
        environ=system.environ(),
        state_dir=system.state_dir(),
        nonce=system.new_nonce,
        num_cpus=os.cpu_count() or 1,
        interpreter_dir=Path(sys.executable).parent,
        working_dir=_working_dir(),
        process_remote=process_remote,
    )


def _working_dir() -> Path:
    """Return the current directory, or the root where it was removed under us."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")
