"""What a machine answers is read the same in whatever pieces it comes, and garbage is refused."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental.errors import RemoteCommandError
from paceline.rental.remote.frames import Event, FrameParser, Greeting, Output, Word
from paceline.rental.remote.script import GREETING

HELLO = GREETING.encode() + b"\n"
FRAMES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from((1, 2)), st.binary(min_size=1, max_size=50)),
        st.sampled_from([("S", ""), ("H", ""), ("X", "3"), ("F", "lost")]),
    ),
    max_size=8,
)


def joined(events: list[Event]) -> list[tuple[object, object]]:
    """Return events as pairs, neighbouring pieces of one output put together."""
    found: list[tuple[object, object]] = []
    for event in events:
        if isinstance(event, Output):
            if found and found[-1][0] == event.stream:
                last = found.pop()
                found.append((event.stream, bytes(last[1]) + event.content))  # type: ignore[call-overload]
            else:
                found.append((event.stream, event.content))
        elif isinstance(event, Word):
            found.append((event.letter, event.rest))
    return found


def render(frames: list[tuple[object, object]]) -> bytes:
    out = b"motd: welcome\r\n\n" + HELLO
    for kind, content in frames:
        if isinstance(content, bytes):
            out += b"%s %d\n%s" % (b"O" if kind == 1 else b"E", len(content), content)
        else:
            out += f"{kind} {content}\n".encode() if content else f"{kind}\n".encode()
    return out


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 400), max_size=6))
def test_pieces_do_not_matter(frames: list[tuple[object, object]], cuts: list[int]) -> None:
    """However the bytes are cut, the same words and the same output come out."""
    content = render(frames)
    parser = FrameParser()
    events: list[Event] = []
    places = sorted({0, *(cut for cut in cuts if cut < len(content)), len(content)})
    for start, end in pairwise(places):
        events += parser.feed(content[start:end])
    assert isinstance(events[0], Greeting)
    assert joined(events) == joined(FrameParser().feed(content))
    text = b"".join(c for _, c in frames if isinstance(c, bytes))
    assert b"".join(e.content for e in events if isinstance(e, Output)) == text


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_never_crashes(content: bytes) -> None:
    """Bytes that are not ours are an error of ours, or wait for more."""
    with suppress(RemoteCommandError):
        FrameParser().feed(HELLO + content)


@pytest.mark.parametrize("line", [b"O 0\n", b"O 99999999\n", b"Z 1\n", b"O x\n", b"x" * 70_000])
def test_lengths_and_lines_have_limits(line: bytes) -> None:
    """A length that no script of ours sends, and an endless line, are refused."""
    with pytest.raises(RemoteCommandError):
        FrameParser().feed(HELLO + line)


def test_an_endless_login_message_is_refused() -> None:
    """What a login script prints has a limit too."""
    with pytest.raises(RemoteCommandError):
        FrameParser().feed((b"x" * 20_000 + b"\n") * 100)
