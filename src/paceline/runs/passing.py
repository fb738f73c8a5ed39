"""What a role prints on its machine, passed through here while it runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Thread

from paceline.rental import BackendError
from paceline.rental.records import Machine
from paceline.rental.remote.tail import Place, Tail
from paceline.runs.bootstrap import Guest

LAST_WORDS_S = 30.0
"""For what a role printed last, after it has ended."""

Passing = Callable[[Machine, Guest], AbstractContextManager[None]]
"""While entered, passes a role's log through; left when the role has ended."""


def no_passing(machine: Machine, guest: Guest) -> AbstractContextManager[None]:
    """Pass nothing through."""
    return _nothing()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class LogPasser:
    """Passes logs through, each byte once, also over restarts of a role on its machine."""

    def __init__(
        self, *, tail_of: Callable[[Machine, Guest], Tail], note: Callable[[str], None]
    ) -> None:
        self._tail_of = tail_of
        self._note = note
        self._places: dict[str, Place] = {}

    @contextmanager
    def passing(self, machine: Machine, guest: Guest) -> Iterator[None]:
        """Pass the log of one attempt through, to its end."""
        tail = self._tail_of(machine, guest)
        tail.place = self._places.get(machine.label, tail.place)
        thread = Thread(target=self._pass, args=(tail,), name=f"log-{guest.slot}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(LAST_WORDS_S)
            self._places[machine.label] = tail.place

    def _pass(self, tail: Tail) -> None:
        try:
            tail.run()
        except (BackendError, OSError) as exc:
            # The log itself is on the machine and is pulled; only this copy of it ends here.
            self._note(f"output is not passed through any more: {exc}")
