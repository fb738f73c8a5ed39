"""What an adapter that was built with no arguments works with: the real things of this computer."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from paceline import system
from paceline.core.clock import Clock
from paceline.rental.httpapi import HttpParts, Pacers
from paceline.rental.remote.container import container_remote
from paceline.rental.remote.local import LocalRemote, usable_rsync
from paceline.rental.remote.protocol import (
    ContainerTarget,
    NetworkRemote,
    ProcessRemote,
    SshTarget,
)
from paceline.rental.remote.shell import ShellParts
from paceline.rental.remote.ssh import ssh_remote

_PACERS = Pacers()
"""Of the whole process: an account's limits do not care how many clients there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The surroundings of an adapter, as values and functions that a test can replace."""

    clock: Clock
    environ: Mapping[str, str] = field(repr=False)
    """May hold keys."""
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
    config_dir: Path
    """Where the operator writes settings."""
    ssh_remote: Callable[[SshTarget, str], NetworkRemote]
    """Target, machine id -> shell and files of a machine behind an sshd."""
    container_remote: Callable[[ContainerTarget, str], NetworkRemote]
    """Target, machine id -> shell and files of a container."""
    http: HttpParts
    """How providers are called."""

    @property
    def identity(self) -> Path:
        """The operator's private key for machines that are rented by ``ssh_pubkey_path``."""
        return self.state_dir / "ssh" / "id_ed25519"

    def known_hosts(self, backend: str, instance_id: str) -> Path:
        """Return where the host key of one machine is kept; remove it with the machine."""
        return self.state_dir / "ssh" / "known_hosts" / f"{backend}-{quote(instance_id, safe='')}"


def default_parts() -> Parts:
    """Return the real surroundings; reads the environment, opens nothing."""
    clock = system.system_clock()

    def process_remote(root: Path, machine_id: str, environ: Mapping[str, str]) -> ProcessRemote:
        return LocalRemote(
            root, machine_id=machine_id, clock=clock, environ=environ, rsync=usable_rsync()
        )

    def ssh(target: SshTarget, machine_id: str) -> NetworkRemote:
        return ssh_remote(
            target,
            machine_id=machine_id,
            parts=ShellParts(clock=clock, rsync=usable_rsync()),
            control_dir=system.socket_dir(),
        )

    def container(target: ContainerTarget, machine_id: str) -> NetworkRemote:
        parts = ShellParts(clock=clock, rsync=usable_rsync())
        return container_remote(target, machine_id=machine_id, parts=parts)

    return Parts(
        config_dir=system.config_dir(),
        ssh_remote=ssh,
        container_remote=container,
        http=HttpParts(clock=clock, chance=system.chance, pacers=_PACERS),
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
