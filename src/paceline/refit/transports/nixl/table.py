"""Where an object lies in a source's memory: the document that readers ask the source for. Pure.

``docs/formats/nixl-v1.md`` is the specification.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.refit.errors import FetchError

SCHEMA: Final = "paceline.nixl.v1"
TABLE_BYTES_MAX: Final = 16 * 2**20
_ADDRESS_MAX: Final = 2**64
_MEMORIES: Final = frozenset({"DRAM", "VRAM"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of an object where it lies in the source's memory."""

    address: int
    size: int
    memory: str
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One object of one agent."""

    agent_name: str
    agent_metadata: bytes
    stretches: tuple[Stretch, ...]

    @property
    def num_bytes(self) -> int:
        """Length of the object."""
        return sum(item.size for item in self.stretches)

    def cut(self, offset: int, size: int) -> Iterator[Stretch]:
        """Yield where a range lies; it must be inside the object."""
        for item in self.stretches:
            if offset < item.size and size > 0:
                taken = min(size, item.size - offset)
                yield Stretch(
                    address=item.address + offset,
                    size=taken,
                    memory=item.memory,
                    device=item.device,
                )
                size -= taken
            offset = max(0, offset - item.size)


def render_table(table: Table) -> bytes:
    """Return the document."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "agent_name": table.agent_name,
            "agent_meta_b64": base64.b64encode(table.agent_metadata).decode("ascii"),
            "stretches": [
                [item.address, item.size, item.memory, item.device] for item in table.stretches
            ],
        },
        separators=(",", ":"),
        sort_keys=True,
    ).encode("ascii")


def parse_table(data: bytes) -> Table:
    """Return what a source says about an object. Raises FetchError for anything else."""
    try:
        found = json.loads(data)
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise FetchError(f"the source answered no {SCHEMA}")
        name = found["agent_name"]
        metadata = base64.b64decode(found["agent_meta_b64"], validate=True)
        stretches = tuple(_stretch(row) for row in found["stretches"])
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as exc:
        raise FetchError(f"the source's table cannot be read: {exc}") from exc
    if not isinstance(name, str) or not name:
        raise FetchError("the source's table names no agent")
    return Table(agent_name=name, agent_metadata=metadata, stretches=stretches)


def _stretch(row: Sequence[Any]) -> Stretch:
    address, size, memory, device = row
    numbers = (address, size, device)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{row!r} is no stretch of memory")
    if memory not in _MEMORIES or size < 1 or address + size > _ADDRESS_MAX:
        raise ValueError(f"{row!r} is no stretch of memory")
    return Stretch(address=address, size=size, memory=memory, device=device)
