"""Who may touch the live parameters: one forward pass or one writer, and writers go first."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError
from paceline.refit.errors import UncertainStateError
from paceline.refit.generators.protocol import InstalledVersion


class PassGate:
    """Keeps writes between two forward passes, and says which version a pass runs on."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._turn = threading.Condition()
        self._is_taken = False
        self._num_writers = 0
        self._installed: InstalledVersion | None = None

    @property
    def installed(self) -> InstalledVersion | None:
        """What the next pass will run on."""
        with self._turn:
            return self._installed

    @contextmanager
    def forward_pass(self) -> Iterator[InstalledVersion | None]:
        """Hold the parameters still for one pass; yields what they are, None for "do not use".

        Waits as long as a write runs: a writer never waits for anything else, so it ends.
        """
        with self._turn:
            self._turn.wait_for(lambda: not self._is_taken and not self._num_writers)
            self._is_taken = True
            installed = self._installed
        try:
            yield installed
        finally:
            self._give_back()

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Do what GeneratorEngineAdapter.at_safe_point says."""
        self._take_for_write(timeout_s)
        began = self._clock.monotonic()
        try:
            write()
        except UncertainStateError:
            self._installed = None
            raise
        else:
            self._installed = installed
        finally:
            self._give_back()
        return self._clock.monotonic() - began

    def _take_for_write(self, timeout_s: float) -> None:
        with self._turn:
            self._num_writers += 1
            try:
                is_mine = self._turn.wait_for(lambda: not self._is_taken, timeout=timeout_s)
            finally:
                self._num_writers -= 1
                self._turn.notify_all()
            if not is_mine:
                raise DeadlineExceededError(
                    f"no safe point within {timeout_s:g} s: a forward pass is still running; "
                    "the parameters were not touched"
                )
            self._is_taken = True

    def _give_back(self) -> None:
        with self._turn:
            self._is_taken = False
            self._turn.notify_all()
