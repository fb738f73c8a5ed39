"""Containers, by the engine's own command line."""

from collections.abc import Sequence

from paceline.rental.errors import BackendError
from paceline.rental.remote.argv import container_words
from paceline.rental.remote.protocol import ContainerTarget
from paceline.rental.remote.shell import ShellParts, ShellRemote
from paceline.rental.remote.trouble import error_of


class ContainerChannel:
    """A Channel into a running container."""

    has_login_shell = False

    def __init__(self, target: ContainerTarget) -> None:
        self.name = target.name
        self.host = target.container
        self.home = target.home
        self.jobs = target.jobs
        self._target = target

    def words(self) -> list[str]:
        """Return the exec command."""
        return container_words(self._target)

    def argv(self, program: Sequence[str]) -> list[str]:
        """Return the exec command for ``program``."""
        return [*self.words(), self._target.container, *program]

    def error_of(self, said: str) -> BackendError:
        """Return what the engine's words mean."""
        return error_of(
            said,
            name=self.name,
            address=f"container {self._target.container[:12]}",
            identity=None,
            known_hosts=None,
        )

    def reset(self) -> None:
        """Do nothing: every command has a connection of its own."""


def container_remote(target: ContainerTarget, *, machine_id: str, parts: ShellParts) -> ShellRemote:
    """Return shell and files of a container, as ``ssh_remote`` does; asks the engine nothing."""
    return ShellRemote(ContainerChannel(target), machine_id=machine_id, parts=parts)
