"""When a command that rents ends what runs left behind: before it, or while its machine boots.

Each backend is looked at once per command. Where anything is on record that is not proven gone,
that comes first. Where nothing is, there is nothing to adopt or to end, unless a record was wrong;
to find that, the listing can wait until the new machine has been ordered. Providers that count
calls then answer with the listing that the wait for the new machine reads anyway.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock, Thread

from paceline.core.errors import PacelineError
from paceline.rental.records import Machine
from paceline.runs.upkeep import EndRule, Keeping, end_left_overs, find_left_overs

PATIENCE_S = 3.0
"""After so long it is said what is waited for."""
REST_TIMEOUT_S = 900.0
"""For what comes late: a listing, and the end of what it shows."""


def split(names: Iterable[str], alive: Iterable[Machine]) -> tuple[list[str], list[str]]:
    """Return which backends are looked at before anything is rented, and which meanwhile. Pure.

    ``alive`` are the machines on record that are not proven gone, intents among them.
    """
    on_record = {machine.backend for machine in alive}
    known = list(dict.fromkeys(names))
    return [one for one in known if one in on_record], [
        one for one in known if one not in on_record
    ]


class CleanUp:
    """Ends what nobody drives, for one command."""

    def __init__(
        self, keeping: Keeping, backends: Iterable[str], *, tell: Callable[[str], None]
    ) -> None:
        """Take the record, where the command rents, and who is told what is ended and what not."""
        self._keeping = keeping
        self._tell = tell
        self._begun_s = keeping.clock.monotonic()
        self._first, self._later = split(backends, keeping.rental.machines())
        self._lock = Lock()
        self._thread: Thread | None = None
        self._bug: BaseException | None = None

    def begin(self) -> None:
        """Look at the record, and at the backends on it; end what nobody drives.

        Raises UsageError where that would be too much at once, with nothing ended.
        """
        self._end(self._first)

    def heard(self, event: str) -> None:
        """Go on with the backends that are left, once: something has become of an order."""
        self._go_on(since_s=self._begun_s)

    def _go_on(self, *, since_s: float | None) -> None:
        with self._lock:
            if self._thread is None:
                work = partial(self._end_rest, since_s)
                self._thread = Thread(target=work, name="clean-up", daemon=True)
                self._thread.start()

    def finish(self, *, is_stopped: bool = False) -> None:
        """Return when all backends have been looked at, also where nothing was ordered.

        Whoever ``is_stopped`` before anything was ordered has left nothing, and waits for nothing.
        """
        if not is_stopped:
            self._go_on(since_s=None)  # nobody else reads a listing any more
        thread = self._thread
        if thread is not None:
            names = ", ".join(self._later)
            thread.join(PATIENCE_S)
            if thread.is_alive():
                self._tell(f"{names}: looking for what runs left behind; Ctrl-C leaves it to gc")
                thread.join(REST_TIMEOUT_S)
            if thread.is_alive():
                self._tell(f"{names}: what runs left behind is not ended yet; run paceline gc")
        if self._bug is not None:
            raise self._bug

    def _end_rest(self, since_s: float | None) -> None:
        try:
            # Nothing of them is on record: who does not answer now is asked by the next command.
            names = [name for name in self._later if not self._keeping.rental.is_down(name)]
            if names:
                self._end(names, since_s=since_s)
        except PacelineError as exc:
            self._tell(str(exc))
        except BaseException as exc:  # noqa: BLE001 - raised on by finish
            self._bug = exc

    def _end(self, names: Sequence[str], *, since_s: float | None = None) -> None:
        found = find_left_overs(self._keeping, names, since_s=since_s)
        rule = EndRule()
        for machine in rule.chosen(found):
            self._tell(f"ending {machine.label}, left by a run that nobody drives")
        for failure in end_left_overs(self._keeping, found, rule).failures:
            self._tell(str(failure))
