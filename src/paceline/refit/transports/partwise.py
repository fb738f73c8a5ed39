"""A read plan for transports that move one part after another."""

from collections.abc import Callable, Sequence

from paceline.core.clock import Clock
from paceline.refit.errors import FetchError, TransferCancelledError
from paceline.refit.transports.protocol import Part, Terms, TransferRecord

ReadPart = Callable[[Part, float], int]
"""Fills a part within so many seconds and returns how often it had to try again."""


class PartwiseRead:
    """Signs ReadPlan: calls ``read`` for every part in turn, within one deadline."""

    def __init__(
        self,
        read: ReadPart,
        *,
        transport: str,
        source: str,
        parts: Sequence[Part],
        clock: Clock,
    ) -> None:
        self._read = read
        self._transport = transport
        self._source = source
        self._parts = tuple(parts)
        self._clock = clock

    @property
    def source(self) -> str:
        """The endpoint that the bytes come from."""
        return self._source

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.wanted.size for part in self._parts)

    def run(self, terms: Terms) -> TransferRecord:
        """Move part after part. Raises FetchError, TransferCancelledError."""
        started = self._clock.monotonic()
        retries = 0
        for index, part in enumerate(self._parts):
            if terms.is_cancelled():
                raise TransferCancelledError(f"reading from {self._source} was cancelled")
            left_s = started + terms.timeout_s - self._clock.monotonic()
            if left_s <= 0:
                raise FetchError(
                    f"{self._source}: not done after {terms.timeout_s:g} s",
                    source=self._source,
                    wanted=part.wanted,
                )
            retries += self._read(part, left_s)
            terms.on_part(index)
        seconds = self._clock.monotonic() - started
        return TransferRecord(
            transport=self._transport,
            source=self._source,
            num_bytes=self.num_bytes,
            seconds=seconds,
            retries=retries,
            stages={"move": seconds},
        )

    def close(self) -> None:
        """Nothing to let go."""
