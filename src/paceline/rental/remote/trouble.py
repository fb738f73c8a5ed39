"""What it means that a connection failed, from what ssh, rsync and docker say. Pure and total.

ssh ends with 255 for all of its own failures, and for commands that end with 255 or by a signal,
so only the words tell them apart. They are OpenSSH's, which does not translate them.
"""

from enum import StrEnum
from pathlib import Path

from paceline.rental.errors import (
    BackendError,
    HostKeyChangedError,
    InstanceNotFoundError,
    RemoteCommandError,
    SshDeniedError,
    SshKeyError,
    SshUnreachableError,
)

_SAID_CHARS_MAX = 400


class Trouble(StrEnum):
    """Kinds of failure, one per thing that is done about it."""

    UNREACHABLE = "unreachable"
    """Nobody answers, or not as sshd does: wait, within the time that booting may take."""
    CUT = "cut"
    """There was a connection and it broke: connect again."""
    DENIED = "denied"
    """Our key is not taken: keys arrive late; wait a little, then look which key is there."""
    HOST_KEY_CHANGED = "host key changed"
    KEY_UNUSABLE = "key unusable"
    """Our own key file is missing, or others can read it, or it has a passphrase."""
    NO_MACHINE = "no machine"
    """The engine knows no such container."""
    OTHER = "other"


_SIGNS: tuple[tuple[Trouble, tuple[str, ...]], ...] = (
    (
        Trouble.HOST_KEY_CHANGED,
        ("REMOTE HOST IDENTIFICATION HAS CHANGED", "Host key verification failed"),
    ),
    (
        Trouble.KEY_UNUSABLE,
        (
            "UNPROTECTED PRIVATE KEY FILE",
            "bad permissions",
            "not accessible: No such file",
            "not accessible: Permission denied",
            "Load key",
        ),
    ),
    (Trouble.DENIED, ("Permission denied (", "Too many authentication failures")),
    (
        Trouble.UNREACHABLE,
        (
            "Connection refused",
            "Connection timed out",
            "Operation timed out",
            "during banner exchange",
            "kex_exchange_identification",
            "No route to host",
            "Network is unreachable",
            "Could not resolve hostname",
            "Name or service not known",
            "Cannot connect to the Docker daemon",
            "error during connect",
            "is not running",
            "is paused",
        ),
    ),
    (Trouble.NO_MACHINE, ("No such container",)),
    (
        Trouble.CUT,
        (
            "Connection reset",
            "Broken pipe",
            "closed by remote host",
            "Connection to",
            "connection unexpectedly closed",
            "mux_client",
            "control socket",
            "Control socket",
            "client_loop",
            "timeout in data",
        ),
    ),
)
_NO_PROGRAM = ("command not found", ": not found", "No such file or directory", "executable file")


def trouble_of(said: str) -> Trouble:
    """Return what the words of a failed connection are about; OTHER if nobody knows them."""
    for trouble, signs in _SIGNS:
        if any(sign in said for sign in signs):
            return trouble
    return Trouble.OTHER


def lacks_program(said: str, program: str) -> bool:
    """Return whether ``said`` is a shell's, or an engine's, word that it has no such program."""
    return any(
        program in line and any(sign in line for sign in _NO_PROGRAM) for line in said.splitlines()
    )


def error_of(
    said: str, *, name: str, address: str, identity: Path | None, known_hosts: Path | None
) -> BackendError:
    """Return the error to raise for a connection that failed, with what to do next.

    Args:
        said: what the connecting program wrote to its standard error.
        name: the machine.
        address: where it was looked for.
        identity: the key that was offered, None for ssh's own choice.
        known_hosts: where the machine's host key is kept.
    """
    quote = shorten(said)
    key = "ssh's own keys" if identity is None else f"the key {identity}"
    match trouble_of(said):
        case Trouble.HOST_KEY_CHANGED:
            return HostKeyChangedError(
                f"{name}: the host key at {address} is not the one on record, so another machine "
                f"answers there. If it was made anew on purpose, remove {known_hosts} and try "
                "again; if not, destroy it and rent another"
            )
        case Trouble.KEY_UNUSABLE:
            return SshKeyError(
                f"{name}: {key} cannot be used: {quote}. It must exist, belong to you, be "
                "readable by nobody else (chmod 600) and have no passphrase, or be in ssh-agent"
            )
        case Trouble.DENIED:
            return SshDeniedError(
                f"{name}: {address} answers and does not take {key}: {quote}. A key may arrive "
                "some seconds after the machine; if not, see that its public half was given"
            )
        case Trouble.NO_MACHINE:
            return InstanceNotFoundError(f"{name} does not exist any more; see `paceline ls`")
        case Trouble.UNREACHABLE | Trouble.CUT:
            return SshUnreachableError(
                f"{name}: no answer from {address}: {quote}. Wait if it is still starting; "
                "otherwise look at its status"
            )
        case Trouble.OTHER:
            return RemoteCommandError(f"{name}: {address}: {quote}")


def shorten(said: str) -> str:
    """Return the last of what was said, on one line."""
    text = " ".join(said.split())
    return text[-_SAID_CHARS_MAX:] or "no reason was given"
