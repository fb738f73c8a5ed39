"""A machine that is a directory of this computer, as a channel: the shell is ours."""

from collections.abc import Sequence

from paceline.rental.errors import BackendError, InstanceNotFoundError
from paceline.rental.remote.protocol import DirectoryTarget


class DirectoryChannel:
    """A Channel to a directory; ``home`` is absolute, so that any program finds it."""

    has_login_shell = False
    jobs = ".paceline/jobs"

    def __init__(self, target: DirectoryTarget) -> None:
        self.name = target.name
        self.host = "localhost"
        self.home = str(target.directory)

    def words(self) -> list[str]:
        """Return no words: a program is started as it is."""
        return []

    def argv(self, program: Sequence[str]) -> list[str]:
        """Return the program."""
        return list(program)

    def error_of(self, said: str) -> BackendError:
        """Say that it went away: nothing else ends a shell of this computer."""
        return InstanceNotFoundError(f"{self.name}: its shell ended; {said.strip()[-200:]}")

    def reset(self) -> None:
        """Do nothing: there is no connection."""
