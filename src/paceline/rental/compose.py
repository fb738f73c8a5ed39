"""The composition root of what needs no run: the real clock, and backends by name."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.rental.backends.registry import load_backend
from paceline.rental.market import Survey, check_all, survey
from paceline.rental.model import CredentialReport, OfferConstraints
from paceline.rental.remote.argv import container_words, terminal_argv
from paceline.rental.remote.channel import Channel
from paceline.rental.remote.container import ContainerChannel
from paceline.rental.remote.directory import DirectoryChannel
from paceline.rental.remote.protocol import Access, ContainerTarget, SshTarget
from paceline.rental.remote.ssh import SshChannel
from paceline.rental.remote.tail import Sink, Tail, Tailed
from paceline.rental.remote.tunnel import Tunnel, TunnelPlan
from paceline.system import environ, socket_dir, system_clock

LOGIN_SHELL = 'exec "${SHELL:-/bin/sh}" -l'


def survey_offers(
    names: Sequence[str], constraints: OfferConstraints, *, timeout_s: float
) -> Survey:
    """Ask the backends named what they have. Raises UsageError for a target that is none."""
    return survey(
        names,
        constraints,
        backend=cache(lambda name: load_backend(name)()),
        clock=system_clock(),
        timeout_s=timeout_s,
    )


def check_credentials(
    names: Sequence[str], *, timeout_s: float
) -> list[tuple[str, CredentialReport]]:
    """Ask the backends named whether they let us in."""
    return check_all(
        names,
        backend=cache(lambda name: load_backend(name)()),
        clock=system_clock(),
        timeout_s=timeout_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """A program of this computer that is a shell on a machine."""

    argv: tuple[str, ...]
    cwd: Path | None
    environ: Mapping[str, str]


def open_channel(access: Access) -> Channel:
    """Return the way to a machine for programs; connects to nothing."""
    if isinstance(access, SshTarget):
        return SshChannel(access, control_dir=socket_dir())
    if isinstance(access, ContainerTarget):
        return ContainerChannel(access)
    return DirectoryChannel(access)


def terminal_of(access: Access, directory: str) -> Terminal:
    """Return an interactive shell on a machine that begins in ``directory``, if that is there."""
    if isinstance(access, SshTarget):
        home = shlex.quote(f"{access.home}/{directory}")
        line = f"cd {home} 2>/dev/null; {LOGIN_SHELL}"
        words = SshChannel(access, control_dir=socket_dir()).words()
        argv = terminal_argv(words, access.host, line=line)
        return Terminal(argv=tuple(argv), cwd=None, environ=environ())
    line = f"cd {shlex.quote(directory)} 2>/dev/null; exec $(command -v bash || command -v sh)"
    if isinstance(access, ContainerTarget):
        words = [*container_words(access), "-t", access.container, "sh", "-c", line]
        return Terminal(argv=tuple(words), cwd=None, environ=environ())
    return Terminal(argv=("sh", "-c", line), cwd=access.directory, environ=access.environ)


def tail_of(access: Access, path: str, *, until: str | None, sink: Sink) -> Tail:
    """Return a reader of a file on a machine; connects to nothing."""
    channel = open_channel(access)
    return Tail(
        channel,
        Tailed(home=channel.home, path=path, until=until),
        clock=system_clock(),
        sink=sink,
    )


def open_tunnel(target: SshTarget, plan: TunnelPlan, *, timeout_s: float) -> Tunnel:
    """Return a tunnel that is up, and kept so until it is closed.

    Raises SshUnreachableError when it does not come up in time.
    """
    tunnel = Tunnel(SshChannel(target, control_dir=None), plan, clock=system_clock())
    tunnel.open(timeout_s=timeout_s)
    return tunnel
