"""Standard output and error that fail in a way the command line can answer.

What a command does must not depend on who listens: stderr carries progress and errors, and when
it cannot be written (a closed terminal, a pipe without reader) that is no reason to leave
machines behind. Stdout carries the result, so there a failure is told, but as an error of ours.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from paceline.core.errors import PacelineError, PreflightError


class ReaderGoneError(PacelineError):
    """Whoever read standard output has stopped reading; nothing is wrong."""


class _Stream:
    """Everything of a text stream; what cannot be written or flushed goes to ``_fail``."""

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, text: str) -> int:
        """Write, or do what this stream does when it cannot."""
        if text == "":  # not b"", with which click finds out what a stream takes
            return 0  # a device may refuse even that, and click's trial would swallow the error
        try:
            return self._inner.write(text)
        except OSError as exc:
            self._fail(exc)
            return len(text)

    def flush(self) -> None:
        """Flush, or do what this stream does when it cannot."""
        try:
            self._inner.flush()
        except OSError as exc:
            self._fail(exc)

    def _fail(self, exc: OSError) -> None:
        """Send what is still buffered, and all that follows, nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._inner.fileno())
        os.close(nowhere)


class _Output(_Stream):
    """Stdout: a failure ends the command."""

    def _fail(self, exc: OSError) -> None:
        super()._fail(exc)
        if exc.errno == errno.EPIPE:
            raise ReaderGoneError("nobody reads standard output any more") from exc
        raise PreflightError(
            f"cannot write to standard output: {exc.strerror}; send it where there is room"
        ) from exc


@contextmanager
def output_to_stderr() -> Iterator[None]:
    """Send what this process and those that it starts write to stdout to stderr instead."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def guard_streams() -> None:
    """Put the guards before this process's standard streams; for programs, not for libraries."""
    if sys.stdout is not None:
        sys.stdout = _Output(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = _Stream(sys.stderr)
