"""How a command in the foreground waits for the signal that ends it."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether this process was told to stop. Only for the main thread.

    A pipe and not a threading.Event: a handler runs in the main thread, wherever that is, and an
    event whose lock the main thread holds at that moment would never be set.
    """

    def __init__(self, reader: int) -> None:
        self._reader = reader

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until told to stop, or for so long; return whether it was told."""
        readable, _, _ = select.select([self._reader], [], [], timeout_s)
        return bool(readable)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Take SIGTERM and SIGINT as a request to stop, until the block is left."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def stop(signum: int, frame: FrameType | None) -> None:
        try:
            os.write(writer, b"\0")
        except BlockingIOError:  # told often enough to fill the pipe
            return

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield StopRequest(reader)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
