"""How a command in the foreground waits for the signal that ends it."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_READ_BYTES = 4096


class StopRequest:
    """Whether this process was told to stop. Only for the main thread.

    The interpreter itself writes every signal's number into the pipe, in whatever thread the signal
    arrives. A handler would not do: it runs when the main thread runs next, and a main thread that
    waits does not wake for a signal that another thread took or that came just before the wait.
    """

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._is_told = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until told to stop, or for so long; return whether it was told."""
        while not self._is_told:
            readable, _, _ = select.select([self._reader], [], [], timeout_s)
            if not readable:
                return False
            came = os.read(self._reader, _READ_BYTES)
            self._is_told = not set(STOP_SIGNALS).isdisjoint(came)
        return True


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Take SIGTERM and SIGINT as a request to stop, until the block is left."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def stop(signum: int, frame: FrameType | None) -> None:
        """Let the signal's number in the pipe be all that comes of it."""

    waking_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield StopRequest(reader)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(waking_before)
        os.close(reader)
        os.close(writer)
