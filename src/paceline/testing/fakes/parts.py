"""The surroundings of an adapter that talks to a fake provider of the same process."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from paceline.core.clock import Clock
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.httpapi import HttpParts, HttpTransport
from paceline.rental.remote.protocol import NetworkRemote, SshTarget
from paceline.testing.fakes.machines import SilentRemote


def fake_parts(
    *,
    clock: Clock,
    state_dir: Path,
    environ: Mapping[str, str],
    transport: HttpTransport | None = None,
    ssh_remote: Callable[[SshTarget, str], NetworkRemote] = SilentRemote,
) -> Parts:
    """Return parts whose clock, environment and network are given.

    Without ``transport`` requests go over real sockets; without ``ssh_remote`` machines have a
    shell that does nothing.
    """
    return replace(
        default_parts(),
        clock=clock,
        environ=environ,
        state_dir=state_dir,
        ssh_remote=ssh_remote,
        http=HttpParts(clock=clock, chance=lambda: 0.5, transport=transport),
    )
