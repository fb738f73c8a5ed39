"""A log as JSON lines: each line of it with where it begins, whole or in pieces of bounded size."""

import json
from collections.abc import Callable

from paceline.runs.model import Slot

PIECE_BYTES = 64 * 1024
"""A longer line comes in several pieces; where the next begins says so."""


class JsonLines:
    """Takes the bytes of one slot's log as they come, and writes a JSON object for each line."""

    def __init__(self, slot: Slot, write: Callable[[str], None]) -> None:
        self._slot = slot
        self._write = write
        self._rest = b""
        self._offset = 0

    def take(self, content: bytes) -> None:
        """Write the lines that end in ``content``, and keep the last, which may go on."""
        self._rest += content
        while self._rest:
            end = self._rest.find(b"\n", 0, PIECE_BYTES) + 1
            if not end and len(self._rest) < PIECE_BYTES:
                return
            self._show(end or PIECE_BYTES)

    def close(self) -> None:
        """Write what has no end of line."""
        if self._rest:
            self._show(len(self._rest))

    def _show(self, num_bytes: int) -> None:
        line, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        found = {
            "role": self._slot.role,
            "index": self._slot.index,
            "offset": self._offset,
            "text": line.removesuffix(b"\n").decode("utf-8", "replace"),
        }
        self._offset += num_bytes
        self._write(json.dumps(found) + "\n")
