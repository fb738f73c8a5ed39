"""What ssh, rsync and docker say is told apart by what is to be done about it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental.errors import (
    BackendError,
    HostKeyChangedError,
    InstanceNotFoundError,
    RemoteCommandError,
    SshDeniedError,
    SshKeyError,
    SshUnreachableError,
)
from paceline.rental.remote.trouble import Trouble, error_of, lacks_program, trouble_of

CASES: list[tuple[str, type[BackendError]]] = [
    ("ssh: connect to host h port 22: Connection refused", SshUnreachableError),
    ("Connection timed out during banner exchange", SshUnreachableError),
    ("kex_exchange_identification: Connection closed by remote host", SshUnreachableError),
    ("ssh: Could not resolve hostname h: Name or service not known", SshUnreachableError),
    ("ssh: connect to host h port 22: No route to host", SshUnreachableError),
    ("client_loop: send disconnect: Broken pipe", SshUnreachableError),
    ("me@h: Permission denied (publickey).", SshDeniedError),
    ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key ver", HostKeyChangedError),
    (
        "@ UNPROTECTED PRIVATE KEY FILE! @\n0644 too open.\nme@h: Permission denied (publickey).",
        SshKeyError,
    ),
    ("Error response from daemon: No such container: abc", InstanceNotFoundError),
    ("Error response from daemon: Container abc is not running", SshUnreachableError),
    ("something that nobody has seen", RemoteCommandError),
    ("", RemoteCommandError),
]


def raised(said: str) -> BackendError:
    return error_of(said, name="m", address="u@h:22", identity=Path("/k"), known_hosts=Path("/kh"))


@pytest.mark.parametrize(("said", "kind"), CASES)
def test_words_become_the_error_of_what_to_do_next(said: str, kind: type[BackendError]) -> None:
    """Each sentence that was seen leads to its own type, which names the machine."""
    error = raised(said)
    assert type(error) is kind
    assert str(error).startswith("m")


def test_a_changed_host_key_names_the_file_to_remove() -> None:
    """The fix is in the message."""
    assert "/kh" in str(raised("REMOTE HOST IDENTIFICATION HAS CHANGED"))


def test_an_unusable_key_is_named() -> None:
    """So is the key."""
    assert "/k" in str(raised("bad permissions"))


@given(st.text(max_size=200))
def test_every_text_has_a_meaning(said: str) -> None:
    """The mapping is total."""
    assert isinstance(trouble_of(said), Trouble)
    assert isinstance(raised(said), BackendError)


def test_a_missing_program_is_told_from_a_missing_file() -> None:
    """Rsync's own complaint about a file is not the shell's about rsync."""
    assert lacks_program("bash: line 1: rsync: command not found", "rsync")
    assert lacks_program('exec: "rsync": executable file not found in $PATH', "rsync")
    assert lacks_program("sh: 1: tar: not found", "tar")
    assert not lacks_program("file has vanished", "rsync")
