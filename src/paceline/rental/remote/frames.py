"""What a machine answers while a job is followed: lines, and output behind a line with its length.

    S            the job was started, now or before
    O 12 / E 12  twelve bytes of standard output / standard error follow
    H            nothing new; the connection lives
    X 3          it ended with status 3; nothing follows
    F lost       it cannot be done; the reason is one of a few words
    N 2, L 7 9   how many processes there are; which could not be ended

Pure: bytes in whatever pieces go in, what they mean comes out.
"""

from dataclasses import dataclass

from paceline.rental.errors import RemoteCommandError
from paceline.rental.remote.script import CHUNK_BYTES, GREETING

_LINE_BYTES_MAX = 64 << 10
_NOISE_BYTES_MAX = 1 << 20
"""Most that a login script may print before our first line."""
_STREAMS = {b"O": 1, b"E": 2}


@dataclass(frozen=True, slots=True)
class Greeting:
    """The machine's shell runs our script."""


@dataclass(frozen=True, slots=True)
class Output:
    """Some bytes that the job printed, the next in order."""

    stream: int
    """1 for standard output, 2 for standard error."""
    content: bytes


@dataclass(frozen=True, slots=True)
class Word:
    """Any other line: its letter and what follows it."""

    letter: str
    rest: str


Event = Greeting | Output | Word


class FrameParser:
    """Turns the bytes of one connection into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_greeted = False
        self._num_noise = 0
        self._stream = 1
        self._num_left = 0

    def feed(self, content: bytes) -> list[Event]:
        """Return the events that are complete now; output is passed on in the pieces it comes in.

        Raises:
            RemoteCommandError: these are not the bytes of our script.
        """
        self._buffer += content
        events: list[Event] = []
        while (event := self._next()) is not None:
            events.append(event)
        return events

    def _next(self) -> Event | None:
        if self._num_left and self._buffer:
            return self._take_output()
        if self._num_left:
            return None
        line = self._take_line()
        if line is None:
            return None
        if not self._is_greeted:
            return self._look_for_greeting(line)
        letter, _, rest = line.partition(b" ")
        if letter in _STREAMS and rest.isdigit():
            self._stream = _STREAMS[letter]
            self._num_left = int(rest)
            if not 0 < self._num_left <= CHUNK_BYTES:
                raise _garbled(line)
            return self._next()
        if letter not in (b"S", b"H", b"X", b"F", b"N", b"L"):
            raise _garbled(line)
        return Word(letter.decode(), rest.decode("ascii", "replace"))

    def _take_output(self) -> Output:
        piece = bytes(self._buffer[: self._num_left])
        del self._buffer[: len(piece)]
        self._num_left -= len(piece)
        return Output(self._stream, piece)

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > _LINE_BYTES_MAX:
                raise _garbled(bytes(self._buffer))
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line.rstrip(b"\r")

    def _look_for_greeting(self, line: bytes) -> Event | None:
        if line == GREETING.encode():
            self._is_greeted = True
            return Greeting()
        self._num_noise += len(line)
        if self._num_noise > _NOISE_BYTES_MAX:
            raise _garbled(line)
        return self._next()


def _garbled(line: bytes) -> RemoteCommandError:
    return RemoteCommandError(
        f"the machine's shell answered {line[:80]!r}; a login script there prints into every "
        "session or replaces the shell: silence it"
    )
