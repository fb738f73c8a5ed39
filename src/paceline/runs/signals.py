"""Turn SIGINT, SIGTERM and SIGHUP into a word that the watch loop reads."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While entered, no watched signal ends the process: the first is kept, later ones counted.

    Teardown must not be skipped by an impatient second Ctrl-C, so nothing is ever raised here.
    A SIGHUP that is ignored stays ignored: whoever said nohup wants the run to outlive a terminal.
    Only for the main thread.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self.received: str | None = None
        self.num_repeats = 0

    def __enter__(self) -> Self:
        """Install the handlers."""
        for number in WATCHED:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the handlers back that were there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received = name
        else:
            self.num_repeats += 1
