"""Parts that lie next to each other travel in one answer: how they are cut, and how far one is."""

from collections.abc import Iterator, Sequence

from paceline.refit.model import ObjectRange
from paceline.refit.transports.protocol import Part

Run = Sequence[tuple[int, Part]]
"""Parts with their indices, each starting in its object where the one before ends."""
Share = Sequence[Run]
"""What one stream moves."""


class Cursor:
    """Where in a run the next byte goes; survives a cut."""

    def __init__(self, run: Run) -> None:
        first = run[0][1].wanted
        self._run = run
        self._at = 0
        self._filled = 0
        """Bytes of the part that is being filled."""
        self._object_id = first.object_id
        self._offset = first.offset
        self.left = sum(part.wanted.size for _, part in run)
        """Bytes that are missing."""

    @property
    def missing(self) -> ObjectRange:
        """The bytes that are not there yet."""
        return ObjectRange(object_id=self._object_id, offset=self._offset, size=self.left)

    def start(self) -> Iterator[int]:
        """Yield the indices of empty parts at the beginning: they are there already."""
        return self.advance(0)

    def room(self, limit: int) -> memoryview:
        """Return where the next bytes go, at most ``limit`` of them."""
        target = self._run[self._at][1].target
        return target[self._filled : self._filled + limit]

    def advance(self, count: int) -> Iterator[int]:
        """Take note of ``count`` bytes, and yield the indices of parts that are complete now."""
        self._filled += count
        self._offset += count
        self.left -= count
        return self._completed()

    def _completed(self) -> Iterator[int]:
        while self._at < len(self._run):
            index, part = self._run[self._at]
            if self._filled < part.wanted.size:
                return
            self._at, self._filled = self._at + 1, 0
            yield index


def shares_of(parts: Sequence[Part], count: int) -> Sequence[Share]:
    """Cut parts into at most ``count`` shares of about equal size, in their order."""
    total = sum(part.wanted.size for part in parts)
    shares: list[list[tuple[int, Part]]] = [[] for _ in range(count)]
    before = 0
    for index, part in enumerate(parts):
        shares[min(before * count // max(total, 1), count - 1)].append((index, part))
        before += part.wanted.size
    return [list(runs_of(share)) for share in shares if share]


def runs_of(indexed: Sequence[tuple[int, Part]]) -> Iterator[Run]:
    """Yield stretches of parts that follow one another in one object."""
    run: list[tuple[int, Part]] = []
    for index, part in indexed:
        if run and not _follows(run[-1][1].wanted, part.wanted):
            yield run
            run = []
        run.append((index, part))
    if run:
        yield run


def _follows(before: ObjectRange, after: ObjectRange) -> bool:
    return before.object_id == after.object_id and before.offset + before.size == after.offset
